#include "kvstore/service/warm_reactor.h"

#include <grpcpp/server_context.h>

#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/routing.h"
#include "common/thrown.h"
#include "kvstore/service/convert.h"

namespace carrel::kvstore {
namespace {

class WarmReactor final : public grpc::ServerWriteReactor<v1::WarmReply>,
                          public std::enable_shared_from_this<WarmReactor> {
 public:
  WarmReactor(grpc::CallbackServerContext* context, absl::StatusOr<Visit> visit)
      : context_(context), visit_(std::move(visit)) {}

  void Start(Engine* engine, ContextSource* source) {
    self_ = shared_from_this();
    if (!visit_.ok()) return End(visit_.status());
    // A copy: TakeSession changes what the visit is counted under, not what it may do.
    Visit of = *visit_;
    absl::StatusOr<std::shared_ptr<void>> place = of.TakeSession();
    if (!place.ok()) return End(place.status());
    {
      absl::MutexLock lock(&mu_);
      place_ = *std::move(place);
    }
    const std::string name = visit_->lookup_name();
    if (source == nullptr) {
      const absl::Status submitted = engine->Submit(
          [self = self_, engine, name] {
            self->End(CatchThrown("warm", [&] { return engine->Get(name).status(); }));
          },
          visit_->turn().get());
      if (!submitted.ok()) End(submitted);
      return;
    }
    const std::weak_ptr<WarmReactor> weak = self_;
    const auto say = [weak](const ContextComes& comes) {
      if (const auto self = weak.lock(); self != nullptr) self->Say(comes);
    };
    const auto end = [weak](absl::Status here) {
      const auto self = weak.lock();
      if (self == nullptr) return;
      // The source was asked for as long as that makes sense. A server that ends says so otherwise.
      if (!here.ok() && !absl::IsCancelled(here)) here.SetPayload(kAnsweredUrl, absl::Cord("1"));
      self->End(here);
    };
    std::shared_ptr<void> bringing =
        source->Bring(name, {.later = true, .progress = say, .done = end});
    absl::MutexLock lock(&mu_);
    if (!finished_) bringing_ = std::move(bringing);
  }

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mu_);
    writing_ = false;
    if (finished_) return;
    if (!ok) return FinishWith(absl::CancelledError("the client is gone"));
    if (here_) WriteLast();
  }
  void OnCancel() override {
    absl::MutexLock lock(&mu_);
    FinishWith(absl::CancelledError("warm: cancelled"));
  }
  void OnDone() override {
    const std::shared_ptr<WarmReactor> last = std::move(self_);
    std::shared_ptr<void> place, bringing;  // go without the lock
    absl::MutexLock lock(&mu_);
    place = std::move(place_);
    bringing = std::move(bringing_);
  }
  void Say(const ContextComes& comes) {
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
  void End(const absl::Status& status) {
    const absl::Status told = visit_.ok() ? visit_->Told(status) : status;
    if (visit_.ok()) visit_->Log("warm", told);
    absl::MutexLock lock(&mu_);
    if (finished_ || here_) return;
    if (!told.ok()) return FinishWith(told);
    here_ = true;
    if (!writing_) WriteLast();
  }

 private:
  void WriteLast() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    finished_ = true;
    const int64_t of = reply_.of();
    reply_.Clear();
    reply_.set_bytes(of);
    reply_.set_of(of);
    reply_.set_here(true);
    StartWriteAndFinish(&reply_, grpc::WriteOptions(), grpc::Status::OK);
  }
  void FinishWith(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (finished_) return;
    finished_ = true;
    if (status.GetPayload(kAnsweredUrl).has_value()) {
      context_->AddTrailingMetadata(kAnsweredMetadata, "1");
    }
    // Who lost this server for its end finds another.
    Finish(ToGrpc(absl::IsCancelled(status) ? absl::UnavailableError(status.message()) : status));
  }

  grpc::CallbackServerContext* const context_;
  const absl::StatusOr<Visit> visit_;
  std::shared_ptr<WarmReactor> self_;  // until OnDone
  absl::Mutex mu_;
  std::shared_ptr<void> place_ ABSL_GUARDED_BY(mu_), bringing_ ABSL_GUARDED_BY(mu_);
  v1::WarmReply reply_ ABSL_GUARDED_BY(mu_);  // gRPC's while writing_
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool here_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace

grpc::ServerWriteReactor<v1::WarmReply>* StartWarm(Engine* engine, ContextSource* source,
                                                   grpc::CallbackServerContext* context,
                                                   absl::StatusOr<Visit> visit) {
  const auto reactor = std::make_shared<WarmReactor>(context, std::move(visit));
  reactor->Start(engine, source);
  return reactor.get();
}

}  // namespace carrel::kvstore
