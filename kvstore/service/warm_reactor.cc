#include "kvstore/service/warm_reactor.h"

#include <grpcpp/server_context.h>

#include <utility>

#include "common/routing.h"
#include "common/status.h"
#include "common/thrown.h"
#include "kvstore/service/convert.h"

namespace carrel::kvstore {

WarmReactor* WarmReactor::Start(Engine* engine, ContextSource* source,
                                grpc::CallbackServerContext* context, absl::StatusOr<Visit> visit) {
  const std::shared_ptr<WarmReactor> reactor(new WarmReactor(context, std::move(visit)));
  reactor->self_ = reactor;
  absl::Status status = reactor->visit_.status();
  if (status.ok()) {
    // A copy: TakeSession changes what the visit is counted under, not what it may do.
    Visit of = *reactor->visit_;
    absl::StatusOr<std::shared_ptr<void>> place = of.TakeSession();
    status = place.status();
    absl::MutexLock lock(&reactor->mu_);
    if (place.ok()) reactor->place_ = *std::move(place);
  }
  if (!status.ok()) {
    reactor->End(status);
    return reactor.get();
  }
  const std::string name = reactor->visit_->lookup_name();
  if (source == nullptr) {
    status = engine->Submit(
        [reactor, engine, name] {
          reactor->End(CatchThrown("warm", [&] { return engine->Get(name).status(); }));
        },
        reactor->visit_->turn().get());
    if (!status.ok()) reactor->End(status);
    return reactor.get();
  }
  const std::weak_ptr<WarmReactor> weak = reactor;
  std::shared_ptr<void> bringing =
      source->Bring(name, {.later = true,
                           .progress =
                               [weak](const ContextComes& comes) {
                                 if (const auto self = weak.lock(); self != nullptr)
                                   self->Say(comes);
                               },
                           .done =
                               [weak](const absl::Status& here) {
                                 const auto self = weak.lock();
                                 if (self == nullptr) return;
                                 absl::Status status = here;
                                 // The source was asked for as long as that makes sense. A server that ends says so otherwise.
                                 if (!here.ok() && !absl::IsCancelled(here)) {
                                   status.SetPayload(kAnsweredUrl, absl::Cord("1"));
                                 }
                                 self->End(status);
                               }});
  absl::MutexLock lock(&reactor->mu_);
  if (!reactor->finished_) reactor->bringing_ = std::move(bringing);
  return reactor.get();
}

void WarmReactor::Say(const ContextComes& comes) {
  const absl::Status still = visit_->StillAllowed();
  absl::MutexLock lock(&mu_);
  if (finished_ || here_) return;
  if (!still.ok()) return FinishWith(still);
  if (writing_) return;
  reply_.Clear();
  reply_.set_bytes(comes.bytes);
  reply_.set_of(comes.of);
  reply_.set_waits_for_room(comes.waits_for_room);
  writing_ = true;
  StartWrite(&reply_);
}

void WarmReactor::End(const absl::Status& status) {
  const absl::Status told = visit_.ok() ? visit_->Told(status) : status;
  if (visit_.ok()) visit_->Log("warm", told);
  absl::MutexLock lock(&mu_);
  if (finished_ || here_) return;
  if (!told.ok()) return FinishWith(told);
  here_ = true;
  if (!writing_) WriteLast();
}

void WarmReactor::WriteLast() {
  finished_ = true;
  const int64_t of = reply_.of();
  reply_.Clear();
  reply_.set_bytes(of);
  reply_.set_of(of);
  reply_.set_here(true);
  StartWriteAndFinish(&reply_, grpc::WriteOptions(), grpc::Status::OK);
}

void WarmReactor::FinishWith(const absl::Status& status) {
  if (finished_) return;
  finished_ = true;
  if (status.GetPayload(kAnsweredUrl).has_value()) {
    context_->AddTrailingMetadata(kAnsweredMetadata, "1");
  }
  // Who lost this server for its end finds another.
  Finish(ToGrpc(absl::IsCancelled(status) ? absl::UnavailableError(status.message()) : status));
}

void WarmReactor::OnWriteDone(bool ok) {
  absl::MutexLock lock(&mu_);
  writing_ = false;
  if (finished_) return;
  if (!ok) return FinishWith(absl::CancelledError("the client is gone"));
  if (here_) WriteLast();
}

void WarmReactor::OnCancel() {
  absl::MutexLock lock(&mu_);
  FinishWith(absl::CancelledError("warm: cancelled"));
}

void WarmReactor::OnDone() {
  const std::shared_ptr<WarmReactor> last = std::move(self_);
  std::shared_ptr<void> place, bringing;  // go without the lock
  absl::MutexLock lock(&mu_);
  place = std::move(place_);
  bringing = std::move(bringing_);
}

}  // namespace carrel::kvstore
