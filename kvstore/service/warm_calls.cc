#include "kvstore/service/warm_calls.h"

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <map>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "carrel/v1/context.grpc.pb.h"
#include "common/routing.h"
#include "common/status.h"
#include "common/thrown.h"

namespace carrel::kvstore {

class WarmCalls::Call {
 public:
  Call(const std::shared_ptr<grpc::Channel>& channel, const std::string& key,
       const std::string& name, ContextWaiter waiter)
      : stub_(v1::ContextService::NewStub(channel)), waiter_(std::move(waiter)) {
    if (!key.empty()) context_.AddMetadata("authorization", "Bearer " + key);
    context_.AddMetadata(kContextHeader, ContextHeaderValue(name));
    request_.set_name(name);
  }

  void Begin(grpc::CompletionQueue& queue) {
    reader_ = stub_->PrepareAsyncWarm(&context_, request_, &queue);
    reader_->StartCall(this);  // from here on the thread has it
  }
  void Drop() {
    dropped_ = true;
    Cancel();
  }
  void Cancel() { context_.TryCancel(); }

  // What was begun has ended, well or not. False: so has the call.
  bool Next(bool ok) {
    if (finishing_) {
      Finished();
      return false;
    }
    if (reading_ && ok) Hear();
    if (ok) {
      reading_ = true;
      reader_->Read(&reply_, this);
    } else {
      finishing_ = true;
      reader_->Finish(&status_, this);
    }
    return true;
  }

 private:
  void Hear() {
    here_ = reply_.here();
    if (here_ || dropped_ || !waiter_.progress) return;
    Tell([this] {
      waiter_.progress(
          {.bytes = reply_.bytes(), .of = reply_.of(), .waits_for_room = reply_.waits_for_room()});
    });
  }

  void Finished() {
    const ContextWaiter waiter = std::move(waiter_);  // which may refer to who keeps us
    if (!dropped_ && waiter.done) Tell([&] { waiter.done(Told()); });
  }

  // What a callback throws is its own end: the call goes on.
  static void Tell(absl::FunctionRef<void()> callback) {
    CatchThrown("a wait for a context", [&] {
      callback();
      return absl::OkStatus();
    }).IgnoreError();
  }

  absl::Status Told() const {
    if (here_ || status_.error_code() == grpc::StatusCode::UNIMPLEMENTED) return absl::OkStatus();
    if (status_.ok()) {
      return absl::UnavailableError("the server stopped without saying that the context is here");
    }
    absl::Status told(static_cast<absl::StatusCode>(status_.error_code()), status_.error_message());
    if (SaysServerIsGone(told)) {
      told = absl::UnavailableError(absl::StrCat("the server is gone: ", told.message()));
    }
    if (context_.GetServerTrailingMetadata().count(kAnsweredMetadata) > 0) {
      told.SetPayload(kAnsweredUrl, absl::Cord("1"));
    }
    return told;
  }

  const std::unique_ptr<v1::ContextService::Stub> stub_;
  ContextWaiter waiter_;
  grpc::ClientContext context_;
  v1::WarmRequest request_;
  v1::WarmReply reply_;
  grpc::Status status_;
  std::unique_ptr<grpc::ClientAsyncReader<v1::WarmReply>> reader_;
  bool reading_ = false, finishing_ = false, here_ = false;  // the thread's
  std::atomic<bool> dropped_{false};
};

// Invariant: a call is in `running` from before it begins until Next said that it has ended.
struct WarmCalls::Queue {
  void Work() {
    void* tag = nullptr;
    for (bool ok = false; queue.Next(&tag, &ok);) {
      const auto call = static_cast<Call*>(tag);
      if (!call->Next(ok)) End(call);
    }
  }

  // Lets go of it without the lock: it may be the last that keeps a channel.
  void End(Call* call) {
    std::shared_ptr<Call> last;
    absl::MutexLock lock(&mu);
    const auto found = running.find(call);
    last = std::move(found->second);
    running.erase(found);
  }

  grpc::CompletionQueue queue;
  absl::Mutex mu;
  bool ended ABSL_GUARDED_BY(mu) = false;
  std::map<Call*, std::shared_ptr<Call>> running ABSL_GUARDED_BY(mu);
  std::thread thread ABSL_GUARDED_BY(mu);  // of the first call
};

WarmCalls::WarmCalls() : queue_(std::make_unique<Queue>()) {}

WarmCalls::~WarmCalls() {
  std::thread thread;
  {
    absl::MutexLock lock(&queue_->mu);
    queue_->ended = true;
    for (const auto& [at, call] : queue_->running) call->Cancel();
    const auto none = [this] {
      queue_->mu.AssertReaderHeld();
      return queue_->running.empty();
    };
    queue_->mu.Await(absl::Condition(&none));
    thread.swap(queue_->thread);
  }
  queue_->queue.Shutdown();
  if (thread.joinable()) {
    thread.join();
  } else {
    queue_->Work();  // gRPC wants to be told that nothing is left
  }
}

std::shared_ptr<void> WarmCalls::Start(const std::shared_ptr<grpc::Channel>& channel,
                                       const std::string& key, const std::string& name,
                                       ContextWaiter waiter) {
  {
    absl::MutexLock lock(&queue_->mu);
    if (!queue_->ended) {
      if (!queue_->thread.joinable())
        queue_->thread = std::thread([queue = queue_.get()] { queue->Work(); });
      const auto call = std::make_shared<Call>(channel, key, name, std::move(waiter));
      queue_->running.emplace(call.get(), call);
      call->Begin(queue_->queue);
      return std::shared_ptr<void>(nullptr, [call](void*) { call->Drop(); });
    }
  }
  waiter.done(absl::UnavailableError("waits for contexts have ended"));
  return nullptr;
}

}  // namespace carrel::kvstore
