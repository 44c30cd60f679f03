// What: ContextService over an engine. Calls read the disk, so they run on engine threads.
// Ownership: engine, admission and transfers outlive it.
#pragma once

#include <functional>
#include <string>
#include <utility>

#include "carrel/v1/context.grpc.pb.h"
#include "kvstore/access/admission.h"
#include "kvstore/engine/context_source.h"
#include "kvstore/engine/engine.h"
#include "kvstore/service/transfer_reactors.h"

namespace carrel::kvstore {

class ContextServiceImpl : public v1::ContextService::CallbackService {
 public:
  // All outlive this. source: where contexts come from that the store lacks: then nobody brings or deletes one
  // here; null: nowhere. advertise: as ServerConfig.
  ContextServiceImpl(Engine* engine, Admission* admission, TransferRegistry* transfers,
                     ContextSource* source, std::string advertise)
      : engine_(engine),
        admission_(admission),
        transfers_(transfers),
        source_(source),
        advertise_(std::move(advertise)) {}

  grpc::ServerUnaryReactor* List(grpc::CallbackServerContext* context,
                                 const v1::ListRequest* request, v1::ListResponse* reply) override;
  grpc::ServerUnaryReactor* Get(grpc::CallbackServerContext* context, const v1::GetRequest* request,
                                v1::GetResponse* reply) override;
  grpc::ServerUnaryReactor* Tokens(grpc::CallbackServerContext* context,
                                   const v1::TokensRequest* request,
                                   v1::TokensResponse* reply) override;
  // At once, on gRPC's thread: it is asked when the engine is busy.
  grpc::ServerUnaryReactor* Statistics(grpc::CallbackServerContext* context,
                                       const v1::StatisticsRequest* request,
                                       v1::StatisticsResponse* reply) override;
  grpc::ServerUnaryReactor* Verify(grpc::CallbackServerContext* context,
                                   const v1::VerifyRequest* request,
                                   v1::VerifyResponse* reply) override;
  grpc::ServerWriteReactor<v1::ExportPiece>* Export(grpc::CallbackServerContext* context,
                                                    const v1::ExportRequest* request) override;
  grpc::ServerBidiReactor<v1::ImportRequest, v1::ImportReply>* Import(
      grpc::CallbackServerContext* context) override;
  grpc::ServerUnaryReactor* Delete(grpc::CallbackServerContext* context,
                                   const v1::DeleteRequest* request,
                                   v1::DeleteResponse* reply) override;
  grpc::ServerWriteReactor<v1::WarmReply>* Warm(grpc::CallbackServerContext* context,
                                                const v1::WarmRequest* request) override;
  // At once: it says what the server was told.
  grpc::ServerUnaryReactor* Locate(grpc::CallbackServerContext* context,
                                   const v1::LocateRequest* request,
                                   v1::LocateResponse* reply) override;

 private:
  absl::StatusOr<Visit> Begin(grpc::CallbackServerContext* context, absl::string_view rpc,
                              const std::string& name);
  // Runs the call if the caller may make it, and finishes with its status: when its turn on an engine thread
  // comes; the same once the context is here, if there is a source; or on a thread that no search waits for.
  enum class When : uint8_t { kTurn, kHere, kBehind };
  grpc::ServerUnaryReactor* Run(grpc::CallbackServerContext* context, absl::string_view rpc,
                                const std::string& name,
                                std::function<absl::Status(const Visit&)> call,
                                When when = When::kTurn);
  absl::Status OnEngine(grpc::ServerUnaryReactor* reactor, grpc::CallbackServerContext* context,
                        Visit visit, std::function<absl::Status(const Visit&)> call,
                        bool background = false);

  Engine* const engine_;
  Admission* const admission_;
  TransferRegistry* const transfers_;
  ContextSource* const source_;
  const std::string advertise_;
};

}  // namespace carrel::kvstore
