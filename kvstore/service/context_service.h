// What: ContextService over an engine. Calls read the disk, so they run on engine threads.
// Ownership: engine, admission and transfers outlive it.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "carrel/v1/context.grpc.pb.h"
#include "kvstore/access/admission.h"
#include "kvstore/engine/engine.h"
#include "kvstore/service/transfer_registry.h"

namespace carrel::kvstore {

class ContextServiceImpl : public v1::ContextService::CallbackService {
 public:
  // All outlive this. of_source: contexts come and go by a ContextSource alone, nobody brings or deletes one here.
  ContextServiceImpl(Engine* engine, Admission* admission, TransferRegistry* transfers,
                     bool of_source)
      : engine_(engine), admission_(admission), transfers_(transfers), of_source_(of_source) {}

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

 private:
  absl::StatusOr<Visit> Begin(grpc::CallbackServerContext* context, absl::string_view rpc,
                              const std::string& name);
  // Runs the call on an engine thread if the caller may make it, and finishes with its status.
  grpc::ServerUnaryReactor* Run(grpc::CallbackServerContext* context, absl::string_view rpc,
                                const std::string& name,
                                std::function<absl::Status(const Visit&)> call);

  Engine* const engine_;
  Admission* const admission_;
  TransferRegistry* const transfers_;
  const bool of_source_;
};

}  // namespace carrel::kvstore
