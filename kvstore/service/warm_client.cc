#include "kvstore/service/warm_client.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/client_callback.h>

#include <atomic>
#include <utility>

#include "carrel/v1/context.grpc.pb.h"
#include "common/routing.h"

namespace carrel::kvstore {
namespace {

class WarmCall final : public grpc::ClientReadReactor<v1::WarmReply> {
 public:
  WarmCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& key,
           const std::string& name, ContextWaiter waiter)
      : stub_(v1::ContextService::NewStub(channel)), waiter_(std::move(waiter)) {
    if (!key.empty()) context_.AddMetadata("authorization", "Bearer " + key);
    context_.AddMetadata(kContextHeader, ContextHeaderValue(name));
    request_.set_name(name);
  }

  static std::shared_ptr<void> Begin(const std::shared_ptr<WarmCall>& call) {
    call->self_ = call;
    call->stub_->async()->Warm(&call->context_, &call->request_, call.get());
    call->StartRead(&call->reply_);
    call->StartCall();
    return std::shared_ptr<void>(nullptr, [call](void*) {
      call->dropped_ = true;
      call->context_.TryCancel();
    });
  }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    here_ = reply_.here();
    if (!here_ && !dropped_ && waiter_.progress) {
      waiter_.progress(
          {.bytes = reply_.bytes(), .of = reply_.of(), .waits_for_room = reply_.waits_for_room()});
    }
    StartRead(&reply_);
  }

  void OnDone(const grpc::Status& status) override {
    const std::shared_ptr<WarmCall> last = std::move(self_);
    const ContextWaiter waiter = std::move(waiter_);  // which may refer to who keeps us
    if (dropped_ || !waiter.done) return;
    if (here_ || status.error_code() == grpc::StatusCode::UNIMPLEMENTED) {
      return waiter.done(absl::OkStatus());
    }
    if (status.ok()) {
      return waiter.done(
          absl::UnavailableError("the server stopped without saying that the context is here"));
    }
    absl::Status told(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
    if (context_.GetServerTrailingMetadata().count(kAnsweredMetadata) > 0) {
      told.SetPayload(kAnsweredUrl, absl::Cord("1"));
    }
    waiter.done(told);
  }

 private:
  const std::unique_ptr<v1::ContextService::Stub> stub_;
  ContextWaiter waiter_;
  grpc::ClientContext context_;
  v1::WarmRequest request_;
  v1::WarmReply reply_;
  bool here_ = false;  // gRPC's, between calls
  std::atomic<bool> dropped_{false};
  std::shared_ptr<WarmCall> self_;  // until OnDone
};

}  // namespace

std::shared_ptr<void> StartWarm(const std::shared_ptr<grpc::Channel>& channel,
                                const std::string& key, const std::string& name,
                                ContextWaiter waiter) {
  return WarmCall::Begin(std::make_shared<WarmCall>(channel, key, name, std::move(waiter)));
}

}  // namespace carrel::kvstore
