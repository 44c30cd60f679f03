#include "decoder/client/store_client_grpc.h"

#include <grpcpp/grpcpp.h>

#include <deque>
#include <string>
#include <thread>
#include <tuple>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "carrel/v1/retrieval.grpc.pb.h"
#include "common/http_proxy.h"
#include "common/routing.h"
#include "common/status.h"
#include "common/thrown.h"
#include "decoder/client/wire.h"
#include "retrieval/errors.h"

namespace carrel::decoder {
namespace {

using retrieval::RequestId;
using Clock = std::chrono::steady_clock;

// A part of a reply is about a megabyte by default, and 32 by the store's upper limit.
constexpr int kMaxReplyBytes = 64 << 20;
// What a store that says in time that it is too late gets for saying so.
constexpr absl::Duration kTimeoutSlack = absl::Seconds(1);

absl::Status FromGrpc(const grpc::Status& status) {
  // The codes of both are those of google.rpc.Code.
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

// What became of a stream that was open: how gRPC reports a peer that died differs with the moment.
absl::Status BrokenStream(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return absl::UnavailableError("the store ended the session");
    case absl::StatusCode::kUnavailable:
      if (Answered(status)) return status;
      [[fallthrough]];
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kUnknown:
    case absl::StatusCode::kInternal:
      return absl::UnavailableError(absl::StrCat("the store is gone: ", status.message()));
    default:
      return status;
  }
}

grpc::ChannelArguments MakeChannelArguments(const std::string& address) {
  grpc::ChannelArguments arguments = ProxyArguments(address);
  arguments.SetMaxReceiveMessageSize(kMaxReplyBytes);
  arguments.SetMaxSendMessageSize(-1);
  // A peer that vanished without a word (a pulled cable) is noticed within 20 s.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10000);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // A server that is just starting is found soon.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  // How long an attempt may take: TLS with a server far away is several round trips.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 500);
  // Sessions do not share a connection, so that one's large replies do not delay another's.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  return arguments;
}

// Invariants
//   1. The reader thread alone reads the stream and, when it has ended, sets ended_; whoever waits
//      wakes then.
//   2. pending_ holds what was sent and is neither forgotten and complete nor taken to its last
//      part.
class GrpcStoreClient : public retrieval::Session {
 public:
  GrpcStoreClient(const std::shared_ptr<grpc::Channel>& channel, const std::string& key,
                  absl::Duration request_timeout, const std::string& context)
      : stub_(v1::RetrievalService::NewStub(channel)), request_timeout_(request_timeout) {
    if (!key.empty()) context_.AddMetadata("authorization", "Bearer " + key);
    if (!context.empty()) {
      context_.AddMetadata(kContextMetadata, context);
      context_.AddMetadata(kContextHeader, ContextHeaderValue(context));
    }
    stream_ = stub_->Session(&context_);
    reader_ = std::thread([this] { ReadAll(); });
  }
  ~GrpcStoreClient() override {
    context_.TryCancel();
    reader_.join();
  }

  absl::Status AwaitServer(absl::Time deadline);

  absl::StatusOr<retrieval::Opened> Open(const retrieval::OpenRequest& open) override;
  absl::StatusOr<RequestId> Send(retrieval::Query query) override;
  absl::StatusOr<RequestId> Send(retrieval::Fetch fetch) override;
  absl::StatusOr<retrieval::Part> Next(RequestId id) override;
  void Forget(RequestId id) override;
  bool broken() const override {
    absl::MutexLock lock(&mu_);
    return ended_;
  }
  int64_t bytes_sent() const override {
    absl::MutexLock lock(&mu_);
    return bytes_sent_;
  }
  int64_t bytes_received() const override {
    absl::MutexLock lock(&mu_);
    return bytes_received_;
  }

 private:
  struct Pending {
    std::string what;
    Clock::time_point heard;  // when it was sent, or its last part came
    std::deque<v1::SessionReply> parts;
    bool forgotten = false;
  };

  void ReadAll();
  // False: the reply belongs to no request.
  bool Receive(v1::SessionReply reply);
  absl::StatusOr<RequestId> SendRequest(const std::string& what, v1::SessionRequest& request);
  // The next reply, and what it is to.
  absl::StatusOr<std::pair<v1::SessionReply, std::string>> NextReply(RequestId id);
  absl::Status ended() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // How much longer an answer is waited for.
  absl::Duration TimeLeft(const Pending& pending) const;
  absl::Status GiveUp(Pending& pending) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  grpc::ClientContext context_;
  const std::unique_ptr<v1::RetrievalService::Stub> stub_;
  const absl::Duration request_timeout_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::SessionRequest, v1::SessionReply>> stream_;
  RequestId next_id_ = 1;  // owned by the sending thread
  AttentionShape shape_;   // likewise: of what was opened

  mutable absl::Mutex mu_;
  absl::CondVar changed_;
  absl::flat_hash_map<RequestId, Pending> pending_ ABSL_GUARDED_BY(mu_);
  bool met_server_ ABSL_GUARDED_BY(mu_) = false;  // it has answered the call
  bool open_ ABSL_GUARDED_BY(mu_) = false;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status end_ ABSL_GUARDED_BY(mu_);  // as the stream ended, after ended_
  int64_t bytes_sent_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t bytes_received_ ABSL_GUARDED_BY(mu_) = 0;

  std::thread reader_;  // last: it uses all of the above
};

void GrpcStoreClient::ReadAll() {
  stream_->WaitForInitialMetadata();
  {
    absl::MutexLock lock(&mu_);
    met_server_ = true;
    changed_.SignalAll();
  }
  const absl::Status status = CatchThrown("replies of the store", [this]() -> absl::Status {
    for (v1::SessionReply reply; stream_->Read(&reply); reply = v1::SessionReply()) {
      const RequestId id = reply.request_id();
      if (Receive(std::move(reply))) continue;
      return absl::DataLossError(
          absl::StrCat("the store answers request ", id, ", which was not sent or is complete"));
    }
    return absl::OkStatus();
  });
  if (!status.ok()) context_.TryCancel();
  absl::Status end = FromGrpc(stream_->Finish());
  if (!end.ok() && context_.GetServerTrailingMetadata().count(kAnsweredMetadata) > 0) {
    end.SetPayload(kAnsweredUrl, absl::Cord("1"));
  }
  absl::MutexLock lock(&mu_);
  ended_ = true;
  end_ = status.ok() ? end : status;
  changed_.SignalAll();
}

bool GrpcStoreClient::Receive(v1::SessionReply reply) {
  absl::MutexLock lock(&mu_);
  bytes_received_ += static_cast<int64_t>(reply.ByteSizeLong());
  const auto it = pending_.find(reply.request_id());
  if (it == pending_.end()) return false;
  Pending& pending = it->second;
  if (!pending.parts.empty() && pending.parts.back().last()) return false;
  if (pending.forgotten) {
    if (reply.last()) pending_.erase(it);
    return true;
  }
  pending.heard = Clock::now();
  pending.parts.push_back(std::move(reply));
  changed_.SignalAll();
  return true;
}

absl::Status GrpcStoreClient::ended() const {
  // What refuses an Open keeps its code.
  const bool broken = open_ || end_.ok() || SaysServerIsGone(end_);
  return broken ? BrokenStream(end_) : end_;
}

absl::Status GrpcStoreClient::AwaitServer(absl::Time deadline) {
  absl::MutexLock lock(&mu_);
  while (!met_server_ && !ended_) {
    if (changed_.WaitWithDeadline(&mu_, deadline) && !met_server_ && !ended_) {
      return absl::UnavailableError("no answer within the deadline");
    }
  }
  return ended_ ? ended() : absl::OkStatus();
}

absl::StatusOr<RequestId> GrpcStoreClient::SendRequest(const std::string& what,
                                                       v1::SessionRequest& request) {
  const RequestId id = next_id_++;
  request.set_request_id(id);
  if (request_timeout_ != absl::InfiniteDuration()) {
    request.set_timeout_us(absl::ToInt64Microseconds(request_timeout_));
  }
  {
    absl::MutexLock lock(&mu_);
    if (ended_) return retrieval::AnnotateOnce(ended(), what);
    pending_[id].what = what;
    pending_[id].heard = Clock::now();
    bytes_sent_ += static_cast<int64_t>(request.ByteSizeLong());
  }
  if (stream_->Write(request)) return id;
  // The stream has ended; the reader learns why.
  absl::MutexLock lock(&mu_);
  pending_.erase(id);
  while (!ended_) changed_.Wait(&mu_);
  return retrieval::AnnotateOnce(ended(), what);
}

absl::StatusOr<retrieval::Opened> GrpcStoreClient::Open(const retrieval::OpenRequest& open) {
  v1::SessionRequest request;
  ToWire(open, *request.mutable_open());
  const std::string what = Describe(open);
  ASSIGN_OR_RETURN(const RequestId id, SendRequest(what, request));
  v1::SessionReply reply;
  do {  // The store brings the context: each word of it is heard, and waited on from anew.
    ASSIGN_OR_RETURN(std::tie(reply, std::ignore), NextReply(id));
  } while (reply.has_fetching() && !reply.last());
  if (reply.has_error()) return PartFromWire(std::move(reply), shape_, what).status();
  if (!reply.has_open() || !reply.last())
    return absl::DataLossError(absl::StrCat(what, ": the store answered with something else"));
  ASSIGN_OR_RETURN(retrieval::Opened opened, OpenedFromWire(reply.open()));
  shape_ = opened.context.shape;
  absl::MutexLock lock(&mu_);
  open_ = true;
  return opened;
}

absl::StatusOr<RequestId> GrpcStoreClient::Send(retrieval::Query query) {
  if (query.scan) return absl::UnimplementedError("a store elsewhere searches its index");
  v1::SessionRequest request;
  ToWire(query, shape_, *request.mutable_query());
  return SendRequest(retrieval::DescribeQuery(query.layer), request);
}

absl::StatusOr<RequestId> GrpcStoreClient::Send(retrieval::Fetch fetch) {
  v1::SessionRequest request;
  ToWire(fetch, *request.mutable_fetch_rows());
  return SendRequest(Describe(fetch), request);
}

absl::Duration GrpcStoreClient::TimeLeft(const Pending& pending) const {
  if (request_timeout_ == absl::InfiniteDuration()) return request_timeout_;
  return request_timeout_ + kTimeoutSlack - absl::FromChrono(Clock::now() - pending.heard);
}

// Its parts may come yet.
absl::Status GrpcStoreClient::GiveUp(Pending& pending) const {
  pending.forgotten = true;
  return absl::DeadlineExceededError(absl::StrCat(pending.what, ": the store says nothing for ",
                                                  absl::FormatDuration(request_timeout_)));
}

absl::StatusOr<retrieval::Part> GrpcStoreClient::Next(RequestId id) {
  ASSIGN_OR_RETURN(auto received, NextReply(id));
  const bool last = received.first.last();
  auto part = PartFromWire(std::move(received.first), shape_, received.second);
  if (!part.ok() && !last) Forget(id);
  return part;
}

absl::StatusOr<std::pair<v1::SessionReply, std::string>> GrpcStoreClient::NextReply(RequestId id) {
  absl::MutexLock lock(&mu_);
  for (;;) {
    const auto it = pending_.find(id);
    if (it == pending_.end() || it->second.forgotten) {
      return retrieval::NothingToCome(id);
    }
    Pending& pending = it->second;
    if (!pending.parts.empty()) {
      std::pair<v1::SessionReply, std::string> reply(std::move(pending.parts.front()),
                                                     pending.what);
      pending.parts.pop_front();
      if (reply.first.last()) pending_.erase(it);
      return reply;
    }
    if (ended_) return retrieval::AnnotateOnce(ended(), pending.what);
    const absl::Duration left = TimeLeft(pending);
    if (left <= absl::ZeroDuration()) return GiveUp(pending);
    changed_.WaitWithTimeout(&mu_, left);
  }
}

void GrpcStoreClient::Forget(RequestId id) {
  absl::MutexLock lock(&mu_);
  const auto it = pending_.find(id);
  if (it == pending_.end()) return;
  if (!it->second.parts.empty() && it->second.parts.back().last()) {
    pending_.erase(it);
    return;
  }
  it->second.forgotten = true;
  it->second.parts.clear();
}

bool Connects(grpc::Channel& channel, absl::Time until, bool patient) {
  const auto deadline = absl::ToChronoTime(until);
  for (auto state = channel.GetState(true); state != GRPC_CHANNEL_READY;
       state = channel.GetState(true)) {
    if (!patient && state == GRPC_CHANNEL_TRANSIENT_FAILURE) return false;
    if (!channel.WaitForStateChange(state, deadline)) return false;
  }
  return true;
}

}  // namespace

std::shared_ptr<grpc::ChannelCredentials> CredentialsOf(const ServerLogin& login) {
  if (!login.uses_tls()) return grpc::InsecureChannelCredentials();
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = login.tls.ca;
  options.pem_cert_chain = login.tls.certificate;
  options.pem_private_key = login.tls.key;
  return grpc::SslCredentials(options);
}

grpc::ChannelArguments ProxyArguments(const std::string& address) {
  grpc::ChannelArguments arguments;
  if (NeedsNoProxy(address)) arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return arguments;
}

std::string HintOf(const ServerLogin& login) {
  if (!login.uses_tls()) return ", or it wants TLS (--tls-ca)";
  if (login.tls.certificate.empty()) {
    return ", or it has no certificate of the --tls-ca for this name, or wants one (--tls-cert)";
  }
  return ", or one of both certificates is not what the other trusts (--tls-ca, --tls-cert)";
}

absl::StatusOr<std::unique_ptr<retrieval::Session>> ConnectToStore(
    const std::string& address, absl::Duration deadline, const ServerLogin& login,
    absl::Duration request_timeout, const std::string& context, bool patient) {
  const absl::Time until = absl::Now() + deadline;
  const std::shared_ptr<grpc::Channel> channel =
      grpc::CreateCustomChannel(address, CredentialsOf(login), MakeChannelArguments(address));
  if (!Connects(*channel, until, patient)) {
    return absl::UnavailableError(absl::StrCat("connect to ", address, ": no server within ",
                                               absl::FormatDuration(deadline), HintOf(login),
                                               ProxyHint(address)));
  }
  absl::StatusOr<std::unique_ptr<retrieval::Session>> client =
      OpenStoreChannel(channel, until - absl::Now(), login.key, request_timeout, context);
  if (!client.ok()) return Annotate(client.status(), absl::StrCat("connect to ", address));
  return client;
}

absl::StatusOr<std::unique_ptr<retrieval::Session>> OpenStoreChannel(
    const std::shared_ptr<grpc::Channel>& channel, absl::Duration deadline, const std::string& key,
    absl::Duration request_timeout, const std::string& context) {
  auto client = std::make_unique<GrpcStoreClient>(channel, key, request_timeout, context);
  RETURN_IF_ERROR(client->AwaitServer(absl::Now() + deadline));
  return client;
}

}  // namespace carrel::decoder
