#include "kvstore/service/context_service.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "common/thrown.h"
#include "kvstore/service/convert.h"
#include "kvstore/service/warm_reactor.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {
namespace {

absl::Status OfSource(absl::string_view what) {
  return absl::FailedPreconditionError(absl::StrCat(
      what, ": this server's contexts are those of a bucket: push and rm do it there"));
}

// What the source has and the store does not, each where its name has its place.
void AddElsewhere(const Visit& visit, const std::vector<SourceContext>& all,
                  v1::ListResponse* reply) {
  std::set<std::string> here;
  for (const v1::ListResponse::Summary& summary : reply->contexts()) here.insert(summary.name());
  for (const SourceContext& context : all) {
    if (here.count(context.name) > 0 || !visit.principal().Sees(context.name)) continue;
    v1::ListResponse::Summary& wire = *reply->add_contexts();
    wire.set_name(context.name);
    wire.set_tokens(context.tokens);
    wire.set_bytes(context.bytes);
    wire.set_content_id(context.content_id);
    wire.set_elsewhere(true);
  }
  std::sort(reply->mutable_contexts()->begin(), reply->mutable_contexts()->end(),
            [](const auto& a, const auto& b) { return a.name() < b.name(); });
}

bool IsHere(const ContextSource& source, const std::string& name) {
  const std::vector<SourceContext> all = source.Contexts();
  return std::any_of(all.begin(), all.end(), [&](const SourceContext& context) {
    return context.here && context.name == name;
  });
}

}  // namespace

absl::StatusOr<Visit> ContextServiceImpl::Begin(grpc::CallbackServerContext* context,
                                                absl::string_view rpc, const std::string& name) {
  ASSIGN_OR_RETURN(Visit visit, admission_->Admit(CallerOf(*context), rpc));
  RETURN_IF_ERROR(visit.Allow(rpc, name));
  RETURN_IF_ERROR(visit.SpendCall());
  return visit;
}

absl::Status ContextServiceImpl::OnEngine(grpc::ServerUnaryReactor* reactor,
                                          grpc::CallbackServerContext* context, Visit visit,
                                          std::function<absl::Status(const Visit&)> call,
                                          bool background) {
  const std::shared_ptr<const void> turn = visit.turn();
  auto task = [reactor, context, visit = std::move(visit), call = std::move(call)] {
    // Its deadline has passed, or its client is gone.
    if (context->IsCancelled()) return reactor->Finish(grpc::Status::CANCELLED);
    reactor->Finish(ToGrpc(visit.Told(CatchThrown("request", [&] { return call(visit); }))));
  };
  return background ? engine_->SubmitBackground(std::move(task))
                    : engine_->Submit(std::move(task), turn.get());
}

grpc::ServerUnaryReactor* ContextServiceImpl::Run(grpc::CallbackServerContext* context,
                                                  absl::string_view rpc, const std::string& name,
                                                  std::function<absl::Status(const Visit&)> call,
                                                  When when) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  absl::StatusOr<Visit> visit = Begin(context, rpc, name);
  absl::Status status = visit.status();
  if (status.ok() && when == When::kHere && source_ != nullptr) {
    // What it is told with keeps the handle, which keeps the context here until the call has read it.
    const auto handle = std::make_shared<std::shared_ptr<void>>();
    const std::string looked_up = visit->lookup_name();
    *handle = source_->Bring(
        looked_up, {.later = true,  // a client that reads what a context is opens it next
                    .progress = nullptr,
                    .done = [this, reactor, context, handle, visit = *visit,
                             call = std::move(call)](const absl::Status& here) {
                      // Who loses this server for its end may ask another.
                      absl::Status told =
                          absl::IsCancelled(here) ? absl::UnavailableError(here.message()) : here;
                      if (told.ok()) {
                        told = OnEngine(reactor, context, visit,
                                        [handle, call](const Visit& of) { return call(of); });
                      }
                      if (!told.ok()) reactor->Finish(ToGrpc(visit.Told(told)));
                    }});
    return reactor;
  }
  if (status.ok()) {
    status = OnEngine(reactor, context, *std::move(visit), std::move(call),
                      /*background=*/when == When::kBehind);
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
    const std::vector<SourceContext> of_source =
        source_ == nullptr ? std::vector<SourceContext>() : source_->Contexts();
    std::set<std::string> here;
    for (const SourceContext& context : of_source) {
      if (context.here) here.insert(context.name);
    }
    for (const v1::Manifest& manifest : manifests) {
      if (!visit.principal().Sees(manifest.name())) continue;
      // What left the source, and is open still, is not there to be opened.
      if (source_ != nullptr && here.count(manifest.name()) == 0) continue;
      SummaryToWire(manifest, reply->add_contexts());
    }
    AddElsewhere(visit, of_source, reply);
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
  const auto get = [this, reply](const Visit& visit) -> absl::Status {
    ASSIGN_OR_RETURN(*reply->mutable_manifest(), source_ != nullptr
                                                     ? source_->Describe(visit.lookup_name())
                                                     : engine_->Get(visit.lookup_name()));
    reply->mutable_manifest()->clear_segment_digests();
    return absl::OkStatus();
  };
  const bool here = source_ == nullptr || IsHere(*source_, request->name());
  return Run(context, "ContextService.Get", request->name(), get,
             here ? When::kTurn : When::kBehind);
}

grpc::ServerUnaryReactor* ContextServiceImpl::Tokens(grpc::CallbackServerContext* context,
                                                     const v1::TokensRequest* request,
                                                     v1::TokensResponse* reply) {
  return Run(
      context, "ContextService.Tokens", request->name(),
      [this, request, reply](const Visit& visit) -> absl::Status {
        v1::TokensRequest looked_up = *request;
        looked_up.set_name(visit.lookup_name());
        const absl::StatusOr<v1::TokensResponse> read = engine_->Tokens(looked_up);
        if (request->begin() == 0) visit.Log("tokens", visit.Told(read.status()));
        ASSIGN_OR_RETURN(*reply, read);
        // What it was is known only now: the next call waits for it, or is refused.
        visit.principal().Spend(0, static_cast<int64_t>(reply->token_ids().size()));
        return absl::OkStatus();
      },
      When::kHere);
}

grpc::ServerUnaryReactor* ContextServiceImpl::Statistics(grpc::CallbackServerContext* context,
                                                         const v1::StatisticsRequest*,
                                                         v1::StatisticsResponse* reply) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  const absl::StatusOr<Visit> visit = Begin(context, "ContextService.Statistics", "");
  if (visit.ok()) *reply = engine_->Statistics();
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
  if (visit.ok() && source_ != nullptr) visit = OfSource("import");
  return StartImport(engine_, transfers_, context, std::move(visit));
}

grpc::ServerUnaryReactor* ContextServiceImpl::Delete(grpc::CallbackServerContext* context,
                                                     const v1::DeleteRequest* request,
                                                     v1::DeleteResponse*) {
  return Run(context, "ContextService.Delete", request->name(), [this](const Visit& visit) {
    const absl::StatusOr<v1::Manifest> manifest = engine_->Get(visit.lookup_name());
    const absl::Status status =
        source_ != nullptr ? OfSource("delete") : engine_->Delete(visit.lookup_name());
    visit.Log("delete", visit.Told(status), manifest.ok() ? FactsOf(*manifest) : ContextFacts());
    return status;
  });
}

grpc::ServerWriteReactor<v1::WarmReply>* ContextServiceImpl::Warm(
    grpc::CallbackServerContext* context, const v1::WarmRequest* request) {
  return StartWarm(engine_, source_, context,
                   Begin(context, "ContextService.Warm", request->name()));
}

grpc::ServerUnaryReactor* ContextServiceImpl::Locate(grpc::CallbackServerContext* context,
                                                     const v1::LocateRequest* request,
                                                     v1::LocateResponse* reply) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  const absl::StatusOr<Visit> visit = Begin(context, "ContextService.Locate", request->name());
  if (visit.ok()) reply->set_address(advertise_);
  reactor->Finish(ToGrpc(visit.status()));
  return reactor;
}

}  // namespace carrel::kvstore
