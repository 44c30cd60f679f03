#include "kvstore/service/context_service.h"

#include <functional>
#include <utility>

#include "common/no_memory.h"
#include "common/status.h"
#include "kvstore/service/convert.h"
#include "kvstore/service/transfer_reactors.h"

namespace carrel::kvstore {
namespace {

// Runs call on an engine thread and finishes with its status.
grpc::ServerUnaryReactor* RunOn(Engine* engine, grpc::CallbackServerContext* context,
                                std::function<absl::Status()> call) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  const absl::Status status = engine->Submit([reactor, call = std::move(call)] {
    reactor->Finish(ToGrpc(CatchNoMemory("request", call)));
  });
  if (!status.ok()) reactor->Finish(ToGrpc(status));
  return reactor;
}

}  // namespace

grpc::ServerUnaryReactor* ContextServiceImpl::List(grpc::CallbackServerContext* context,
                                                   const v1::ListRequest*,
                                                   v1::ListResponse* reply) {
  return RunOn(engine_, context, [this, reply]() -> absl::Status {
    std::vector<absl::Status> unreadable;
    ASSIGN_OR_RETURN(const std::vector<v1::Manifest> manifests, engine_->List(&unreadable));
    for (const v1::Manifest& manifest : manifests) SummaryToWire(manifest, reply->add_contexts());
    for (const absl::Status& status : unreadable) {
      reply->add_unreadable(std::string(status.message()));
    }
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* ContextServiceImpl::Get(grpc::CallbackServerContext* context,
                                                  const v1::GetRequest* request,
                                                  v1::GetResponse* reply) {
  return RunOn(engine_, context, [this, request, reply]() -> absl::Status {
    ASSIGN_OR_RETURN(*reply->mutable_manifest(), engine_->Get(request->name()));
    reply->mutable_manifest()->clear_segment_digests();
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* ContextServiceImpl::Statistics(grpc::CallbackServerContext* context,
                                                         const v1::StatisticsRequest*,
                                                         v1::StatisticsResponse* reply) {
  StatisticsToWire(engine_->Statistics(), reply);
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

grpc::ServerUnaryReactor* ContextServiceImpl::Verify(grpc::CallbackServerContext* context,
                                                     const v1::VerifyRequest* request,
                                                     v1::VerifyResponse* reply) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  const absl::Status started = engine_->Verify(
      request->name(), request->deep(), [context] { return context->IsCancelled(); },
      [reactor, reply](Engine::Verified verified) {
        if (!verified.ok()) return reactor->Finish(ToGrpc(verified.status()));
        const auto& [manifest, report] = *verified;
        reply->set_content_id(manifest.content_id());
        reply->set_segments(report.segments);
        reply->set_bytes(report.bytes);
        reply->set_error_count(report.error_count);
        for (const std::string& error : report.errors) reply->add_errors(error);
        reactor->Finish(grpc::Status::OK);
      });
  if (!started.ok()) reactor->Finish(ToGrpc(started));
  return reactor;
}

grpc::ServerWriteReactor<v1::ExportPiece>* ContextServiceImpl::Export(
    grpc::CallbackServerContext*, const v1::ExportRequest* request) {
  return StartExport(engine_, request->name());
}

grpc::ServerBidiReactor<v1::ImportRequest, v1::ImportReply>* ContextServiceImpl::Import(
    grpc::CallbackServerContext*) {
  return StartImport(engine_);
}

grpc::ServerUnaryReactor* ContextServiceImpl::Delete(grpc::CallbackServerContext* context,
                                                     const v1::DeleteRequest* request,
                                                     v1::DeleteResponse*) {
  return RunOn(engine_, context, [this, request] { return engine_->Delete(request->name()); });
}

}  // namespace carrel::kvstore
