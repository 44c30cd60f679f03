#include "kvstore/service/context_service.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "common/thrown.h"
#include "kvstore/service/convert.h"
#include "kvstore/service/grpc_caller.h"
#include "kvstore/service/transfer_reactors.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {
namespace {

absl::Status OfSource(absl::string_view what) {
  return absl::FailedPreconditionError(absl::StrCat(
      what, ": this server's contexts are those of a bucket: push and rm do it there"));
}

}  // namespace

absl::StatusOr<Visit> ContextServiceImpl::Begin(grpc::CallbackServerContext* context,
                                                absl::string_view rpc, const std::string& name) {
  ASSIGN_OR_RETURN(Visit visit, admission_->Admit(CallerOf(*context), rpc));
  RETURN_IF_ERROR(visit.Allow(rpc, name));
  RETURN_IF_ERROR(visit.SpendCall());
  return visit;
}

grpc::ServerUnaryReactor* ContextServiceImpl::Run(grpc::CallbackServerContext* context,
                                                  absl::string_view rpc, const std::string& name,
                                                  std::function<absl::Status(const Visit&)> call) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  absl::StatusOr<Visit> visit = Begin(context, rpc, name);
  absl::Status status = visit.status();
  if (status.ok()) {
    const std::shared_ptr<const void> turn = visit->turn();
    status = engine_->Submit(
        [reactor, context, visit = *std::move(visit), call = std::move(call)] {
          // Its deadline has passed, or its client is gone.
          if (context->IsCancelled()) return reactor->Finish(grpc::Status::CANCELLED);
          reactor->Finish(ToGrpc(visit.Told(CatchThrown("request", [&] { return call(visit); }))));
        },
        turn.get());
  }
  if (!status.ok()) reactor->Finish(ToGrpc(status));
  return reactor;
}

grpc::ServerUnaryReactor* ContextServiceImpl::List(grpc::CallbackServerContext* context,
                                                   const v1::ListRequest*,
                                                   v1::ListResponse* reply) {
  return Run(context, "ContextService.List", "", [this, reply](const Visit& visit) -> absl::Status {
    std::vector<absl::Status> unreadable;
    ASSIGN_OR_RETURN(const std::vector<v1::Manifest> manifests, engine_->List(&unreadable));
    for (const v1::Manifest& manifest : manifests) {
      if (!visit.principal().Sees(manifest.name())) continue;
      SummaryToWire(manifest, reply->add_contexts());
    }
    ASSIGN_OR_RETURN(const std::vector<UnfinishedPrefill> unfinished,
                     engine_->store().ListUnfinished());
    for (const UnfinishedPrefill& prefill : unfinished) {
      if (!visit.principal().Sees(prefill.name)) continue;
      v1::ListResponse::Unfinished& wire = *reply->add_unfinished();
      wire.set_name(prefill.name);
      wire.set_bytes(prefill.bytes);
      wire.set_touched_unix_s(absl::ToUnixSeconds(prefill.touched));
      wire.set_running(prefill.running);
    }
    if (!visit.principal().SeesAll()) return absl::OkStatus();  // whose they are, nobody knows
    for (const absl::Status& status : unreadable) {
      reply->add_unreadable(std::string(status.message()));
    }
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* ContextServiceImpl::Get(grpc::CallbackServerContext* context,
                                                  const v1::GetRequest* request,
                                                  v1::GetResponse* reply) {
  return Run(context, "ContextService.Get", request->name(),
             [this, reply](const Visit& visit) -> absl::Status {
               ASSIGN_OR_RETURN(*reply->mutable_manifest(), engine_->Get(visit.lookup_name()));
               reply->mutable_manifest()->clear_segment_digests();
               return absl::OkStatus();
             });
}

grpc::ServerUnaryReactor* ContextServiceImpl::Tokens(grpc::CallbackServerContext* context,
                                                     const v1::TokensRequest* request,
                                                     v1::TokensResponse* reply) {
  return Run(context, "ContextService.Tokens", request->name(),
             [this, request, reply](const Visit& visit) -> absl::Status {
               v1::TokensRequest looked_up = *request;
               looked_up.set_name(visit.lookup_name());
               const absl::StatusOr<v1::TokensResponse> read = engine_->Tokens(looked_up);
               if (request->begin() == 0) visit.Log("tokens", visit.Told(read.status()));
               ASSIGN_OR_RETURN(*reply, read);
               // What it was is known only now: the next call waits for it, or is refused.
               visit.principal().Spend(0, static_cast<int64_t>(reply->token_ids().size()));
               return absl::OkStatus();
             });
}

grpc::ServerUnaryReactor* ContextServiceImpl::Statistics(grpc::CallbackServerContext* context,
                                                         const v1::StatisticsRequest*,
                                                         v1::StatisticsResponse* reply) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  const absl::StatusOr<Visit> visit = Begin(context, "ContextService.Statistics", "");
  if (visit.ok()) StatisticsToWire(engine_->Statistics(), reply);
  reactor->Finish(ToGrpc(visit.status()));
  return reactor;
}

grpc::ServerUnaryReactor* ContextServiceImpl::Verify(grpc::CallbackServerContext* context,
                                                     const v1::VerifyRequest* request,
                                                     v1::VerifyResponse* reply) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  const absl::StatusOr<Visit> visit = Begin(context, "ContextService.Verify", request->name());
  if (!visit.ok()) {
    reactor->Finish(ToGrpc(visit.status()));
    return reactor;
  }
  const absl::Status started = engine_->Verify(
      visit->lookup_name(), request->deep(), [context] { return context->IsCancelled(); },
      [reactor, reply, visit = *visit](Engine::Verified verified) {
        if (!verified.ok()) return reactor->Finish(ToGrpc(visit.Told(verified.status())));
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
    grpc::CallbackServerContext* context, const v1::ExportRequest* request) {
  return StartExport(engine_, transfers_, context,
                     Begin(context, "ContextService.Export", request->name()));
}

grpc::ServerBidiReactor<v1::ImportRequest, v1::ImportReply>* ContextServiceImpl::Import(
    grpc::CallbackServerContext* context) {
  absl::StatusOr<Visit> visit = Begin(context, "ContextService.Import", "");
  if (visit.ok() && of_source_) visit = OfSource("import");
  return StartImport(engine_, transfers_, context, std::move(visit));
}

grpc::ServerUnaryReactor* ContextServiceImpl::Delete(grpc::CallbackServerContext* context,
                                                     const v1::DeleteRequest* request,
                                                     v1::DeleteResponse*) {
  return Run(context, "ContextService.Delete", request->name(), [this](const Visit& visit) {
    const absl::StatusOr<v1::Manifest> manifest = engine_->Get(visit.lookup_name());
    const absl::Status status =
        of_source_ ? OfSource("delete") : engine_->Delete(visit.lookup_name());
    visit.Log("delete", visit.Told(status), manifest.ok() ? FactsOf(*manifest) : ContextFacts());
    return status;
  });
}

}  // namespace carrel::kvstore
