#include "library/remote_store.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "common/descriptor_limit.h"
#include "common/http_proxy.h"
#include "common/routing.h"
#include "common/status.h"
#include "common/steady_time.h"
#include "decoder/client/resuming_client.h"
#include "decoder/client/store_client_grpc.h"
#include "kvstore/service/context_client.h"
#include "kvstore/service/warm_calls.h"
#include "library/server_choice.h"

namespace carrel::library {
namespace {

constexpr absl::Duration kDeadline = absl::Seconds(10);
// What only reads is asked for again where the connection broke: a replica behind a router may have ended.
constexpr char kReadAgain[] = R"({"methodConfig": [{
  "name": [{"service": "carrel.v1.ContextService", "method": "Get"},
           {"service": "carrel.v1.ContextService", "method": "List"},
           {"service": "carrel.v1.ContextService", "method": "Tokens"},
           {"service": "carrel.v1.ContextService", "method": "Locate"}],
  "retryPolicy": {"maxAttempts": 5, "initialBackoff": "0.1s", "maxBackoff": "1s", "backoffMultiplier": 2,
                  "retryableStatusCodes": ["UNAVAILABLE"]}}]})";
// Where there is another address to go to.
constexpr absl::Duration kTryFor = absl::Seconds(1);
// How long a server that does not say where it is reached is taken for one.
constexpr absl::Duration kAskWhereAgain = absl::Seconds(60);

bool Connects(grpc::Channel& channel, absl::Time until) {
  const auto deadline = absl::ToChronoTime(until);
  for (grpc_connectivity_state state = channel.GetState(true); state != GRPC_CHANNEL_READY;
       state = channel.GetState(true)) {
    if (state == GRPC_CHANNEL_TRANSIENT_FAILURE || !channel.WaitForStateChange(state, deadline)) {
      return false;
    }
  }
  return true;
}

// The addresses, and what is known of them; outlived by nothing that uses it.
class Servers {
 public:
  explicit Servers(const StoreAddress& address) : address_(address), choice_(AllOf(address)) {}

  absl::StatusOr<std::unique_ptr<retrieval::Session>> Connect(absl::Duration within,
                                                              const std::string& context,
                                                              std::string* took) {
    RETURN_IF_ERROR(CheckDescriptorsOfGrpc());
    // It broke, or it refused: not the same again at once.
    if (!took->empty()) choice_.Failed(*took);
    const absl::Time until = absl::Now() + within;
    const std::vector<std::string> order = choice_.For(context);
    absl::StatusOr<std::unique_ptr<retrieval::Session>> client;
    for (size_t i = 0; i < order.size(); ++i) {
      const bool last = i + 1 == order.size();
      const absl::Duration left = until - absl::Now();
      client = ConnectBy(order[i], last ? left : std::min(left, kTryFor), last, context);
      if (client.ok()) {
        *took = order[i];
        return client;
      }
      if (!absl::IsUnavailable(client.status())) return client;
      choice_.Failed(order[i]);
    }
    took->clear();
    return client;
  }

  // The files are read for each connection: what was renewed meanwhile is used.
  absl::StatusOr<std::unique_ptr<kvstore::ContextClient>> ClientFor(const std::string& context) {
    RETURN_IF_ERROR(CheckDescriptorsOfGrpc());
    std::string server;
    std::shared_ptr<grpc::Channel> channel;
    const std::vector<std::string> order = choice_.For(context);
    for (const std::string& one : order) {
      server = one;
      ASSIGN_OR_RETURN(channel, ChannelTo(one));
      if (order.size() == 1 || Connects(*channel, absl::Now() + kTryFor)) break;
      choice_.Failed(one);
    }
    return ClientOn(channel, server, kDeadline);
  }

  absl::StatusOr<std::shared_ptr<grpc::Channel>> ChannelTo(const std::string& server) const {
    ASSIGN_OR_RETURN(const ServerLogin login, address_.LoginTo(server));
    grpc::ChannelArguments arguments = decoder::ProxyArguments(server);
    arguments.SetServiceConfigJSON(kReadAgain);
    return grpc::CreateCustomChannel(server, decoder::CredentialsOf(login), arguments);
  }
  const StoreAddress& address() const { return address_; }
  ServerChoice& choice() { return choice_; }

 private:
  static std::vector<std::string> AllOf(const StoreAddress& address) {
    std::vector<std::string> all = {address.server};
    all.insert(all.end(), address.other_servers.begin(), address.other_servers.end());
    return all;
  }

  absl::StatusOr<std::unique_ptr<kvstore::ContextClient>> ClientOn(
      std::shared_ptr<grpc::Channel> channel, const std::string& server,
      absl::Duration deadline) const {
    ASSIGN_OR_RETURN(const ServerLogin login, address_.LoginTo(server));
    return std::make_unique<kvstore::ContextClient>(
        std::move(channel), server, deadline, login.key,
        kvstore::ConnectionHints{.plain = !login.uses_tls(), .proxy = ProxyHint(server)});
  }

  // patient: a server that does not answer now may come within the time.
  absl::StatusOr<std::unique_ptr<retrieval::Session>> ConnectBy(const std::string& server,
                                                                absl::Duration within, bool patient,
                                                                const std::string& context) {
    const absl::Time until = absl::Now() + within;
    if (const std::string itself = Located(server, within, context);
        !itself.empty() && itself != server) {
      auto direct = ConnectTo(itself, std::min(until - absl::Now(), kTryFor), false, context);
      if (direct.ok()) return direct;
      // Gone, or not reachable from here: whoever chooses finds another.
    }
    return ConnectTo(server, until - absl::Now(), patient, context);
  }

  absl::StatusOr<std::unique_ptr<retrieval::Session>> ConnectTo(const std::string& server,
                                                                absl::Duration within, bool patient,
                                                                const std::string& context) {
    ASSIGN_OR_RETURN(const ServerLogin login, address_.LoginTo(server));
    return decoder::ConnectToStore(server, within, login, address_.request_timeout, context,
                                   patient);
  }

  // Asked once for a session; empty: it does not say, or cannot be asked now.
  std::string Located(const std::string& server, absl::Duration within,
                      const std::string& context) {
    {
      absl::MutexLock lock(&mu_);
      const auto silent = silent_.find(server);
      if (silent != silent_.end() && SteadyNow() - silent->second < kAskWhereAgain) return "";
    }
    const absl::StatusOr<std::shared_ptr<grpc::Channel>> channel = ChannelTo(server);
    if (!channel.ok() || !Connects(**channel, absl::Now() + std::min(within, kTryFor))) return "";
    const auto client = ClientOn(*channel, server, std::min(within, kDeadline));
    if (!client.ok()) return "";
    const absl::StatusOr<std::string> said = (*client)->Locate(context);
    absl::MutexLock lock(&mu_);
    if (absl::IsUnimplemented(said.status()) || (said.ok() && said->empty())) {
      silent_[server] = SteadyNow();
    }
    return said.ok() ? *said : "";
  }

  const StoreAddress address_;
  ServerChoice choice_;
  absl::Mutex mu_;
  std::map<std::string, absl::Time> silent_ ABSL_GUARDED_BY(mu_);  // servers that say nothing
};

// Who waits for a context, through one server after the other.
class Bringing : public std::enable_shared_from_this<Bringing> {
 public:
  // calls: outlives what it calls back.
  Bringing(std::shared_ptr<Servers> servers, kvstore::WarmCalls* calls, std::string name,
           kvstore::ContextWaiter waiter)
      : servers_(std::move(servers)),
        calls_(calls),
        name_(std::move(name)),
        waiter_(std::move(waiter)) {
    order_ = servers_->choice().For(name_);
  }

  void Try() {
    size_t attempt;
    {
      absl::MutexLock lock(&mu_);
      if (dropped_) return;
      attempt = tried_++;
    }
    const std::string& server = order_[attempt];
    const absl::StatusOr<ServerLogin> login = servers_->address().LoginTo(server);
    const absl::StatusOr<std::shared_ptr<grpc::Channel>> channel = servers_->ChannelTo(server);
    if (!login.ok() || !channel.ok()) {
      return waiter_.done(login.ok() ? channel.status() : login.status());
    }
    std::shared_ptr<void> handle =
        calls_->Start(*channel, login->key, name_,
                      {.progress =
                           [self = shared_from_this()](const kvstore::ContextComes& comes) {
                             if (self->waiter_.progress) self->waiter_.progress(comes);
                           },
                       .done = [self = shared_from_this(), attempt](
                                   const absl::Status& here) { self->Ended(attempt, here); }});
    absl::MutexLock lock(&mu_);
    // The next attempt may have begun, and ended, before this one had its handle.
    if (!dropped_ && tried_ == attempt + 1) handle_.swap(handle);
  }

  void Drop() {
    std::shared_ptr<void> handle;  // goes without the lock
    absl::MutexLock lock(&mu_);
    dropped_ = true;
    handle.swap(handle_);
  }

 private:
  void Ended(size_t attempt, const absl::Status& here) {
    const bool lost = absl::IsUnavailable(here) && !here.GetPayload(kAnsweredUrl).has_value();
    if (lost) servers_->choice().Failed(order_[attempt]);
    if (lost && attempt + 1 < order_.size()) return Try();
    {
      absl::MutexLock lock(&mu_);
      if (dropped_) return;
    }
    waiter_.done(lost ? absl::UnavailableError(
                            absl::StrCat("server ", order_[attempt], ": ", here.message()))
                      : here);
  }

  const std::shared_ptr<Servers> servers_;
  kvstore::WarmCalls* const calls_;
  const std::string name_;
  const kvstore::ContextWaiter waiter_;
  std::vector<std::string> order_;
  absl::Mutex mu_;
  size_t tried_ ABSL_GUARDED_BY(mu_) = 0;
  std::shared_ptr<void> handle_ ABSL_GUARDED_BY(mu_);
  bool dropped_ ABSL_GUARDED_BY(mu_) = false;
};

class RemoteStore final : public StoreAccess {
 public:
  explicit RemoteStore(const StoreAddress& address)
      : servers_(std::make_shared<Servers>(address)) {}

  absl::StatusOr<std::unique_ptr<retrieval::Session>> NewClient(ThreadPool*) override {
    const StoreAddress& address = servers_->address();
    return decoder::MakeResumingClient(
        {.connect =
             [servers = servers_, took = std::make_shared<std::string>()](
                 absl::Duration within, const std::string& context) {
               return servers->Connect(within, context, took.get());
             },
         .retry_for = address.retry_for,
         .open_within = kDeadline,
         .tell = address.tell});
  }
  absl::StatusOr<std::unique_ptr<kvstore::ContextClient>> NewContextClient(
      const std::string& context) override {
    return servers_->ClientFor(context);
  }
  absl::StatusOr<std::vector<TokenId>> DocumentTokens(const std::string& context,
                                                      const std::string& content_id) override {
    ASSIGN_OR_RETURN(const auto client, servers_->ClientFor(context));
    return client->Tokens(context, content_id);
  }
  bool brings() const override { return true; }
  std::shared_ptr<void> Bring(const std::string& name, kvstore::ContextWaiter waiter) override {
    const absl::Status begins = CheckDescriptorsOfGrpc();
    if (!begins.ok()) {
      waiter.done(begins);
      return nullptr;
    }
    auto bringing = std::make_shared<Bringing>(servers_, &warm_calls_, name, std::move(waiter));
    bringing->Try();
    return std::shared_ptr<void>(nullptr, [bringing](void*) { bringing->Drop(); });
  }

 private:
  const std::shared_ptr<Servers> servers_;
  kvstore::WarmCalls warm_calls_;
};

}  // namespace

absl::Status CheckDescriptorsOfGrpc() {
  constexpr int64_t kItsOwn = 16;
  static std::atomic<bool> begun{false};
  if (begun) return absl::OkStatus();
  RETURN_IF_ERROR(CheckFreeDescriptors(kItsOwn));
  begun = true;
  return absl::OkStatus();
}

std::unique_ptr<StoreAccess> OpenRemoteStore(const StoreAddress& address) {
  return std::make_unique<RemoteStore>(address);
}

}  // namespace carrel::library
