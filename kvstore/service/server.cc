#include "kvstore/service/server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/impl/server_builder_option.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server_posix.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "carrel/v1/retrieval.grpc.pb.h"
#include "common/descriptor_limit.h"
#include "common/freed_memory.h"
#include "common/status.h"
#include "common/thrown.h"
#include "kvstore/access/admission.h"
#include "kvstore/engine/engine.h"
#include "kvstore/service/context_service.h"
#include "kvstore/service/convert.h"
#include "kvstore/service/credentials.h"
#include "kvstore/service/listen_address.h"
#include "kvstore/service/listener.h"
#include "kvstore/service/session_reactor.h"
#include "kvstore/service/session_registry.h"
#include "kvstore/service/transfer_reactors.h"

namespace carrel::kvstore {
namespace {

// The largest request, whatever the context (MostRequestBytes).
constexpr int kMaxRequestBytes = 32 << 20;
constexpr absl::Duration kCutGrace = absl::Seconds(1);
// How often sessions are looked at for having run out of time.
constexpr absl::Duration kTick = absl::Milliseconds(100);
// How often whether they are still their callers' to have.
constexpr int kTicksPerRights = 10;
// Descriptors that are not connections': files of the store, gRPC's own, the reserve.
constexpr int64_t kOtherDescriptors = 128;

// A connection whose client is gone without a word, or stopped, is closed after the sum of these.
constexpr int kKeepaliveMs = 30'000, kKeepaliveTimeoutMs = 20'000;
constexpr int kIdleConnectionMs = 300'000;  // without any call
constexpr int kHandshakeMs = 10'000;
// What gRPC's buffers of all connections may take at least.
constexpr int64_t kLeastTransportBytes = int64_t{256} << 20;
// Freed memory that goes back to the kernel, at once and if nobody needed it for five looks.
constexpr int64_t kMuchFreedBytes = int64_t{32} << 20;
constexpr int64_t kLittleFreedBytes = int64_t{1} << 20;
constexpr int kTicksPerLook = 20;
// How long what is stored of each tenant is taken for so.
constexpr std::chrono::seconds kStoredFor{60};
// Of gRPC's synchronous services, of which reflection is the only one.
constexpr int kSyncThreads = 4;

class RetrievalServiceImpl
    : public v1::RetrievalService::WithRawCallbackMethod_Session<v1::RetrievalService::Service> {
 public:
  RetrievalServiceImpl(Engine* engine, ContextSource* source, SessionRegistry* registry,
                       Admission* admission)
      : engine_(engine), source_(source), registry_(registry), admission_(admission) {}

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Session(
      grpc::CallbackServerContext* context) override {
    return SessionReactor::Start(engine_, source_, registry_, admission_, context);
  }

 private:
  Engine* const engine_;
  ContextSource* const source_;
  SessionRegistry* const registry_;
  Admission* const admission_;
};

class GrpcServer : public Server {
 public:
  GrpcServer(const ServerConfig& config, Engine* engine)
      : config_(config),
        engine_(engine),
        registry_(config.limits, engine->config().max_sessions),
        admission_(config.access != nullptr ? config.access : Access::Open(config.listen.empty()),
                   config.audit),
        retrieval_(engine, config.source, &registry_, &admission_),
        transfers_(config.limits),
        contexts_(engine, &admission_, &transfers_, config.source, config.advertise),
        transport_bytes_(std::max(kLeastTransportBytes, engine->config().request_budget_bytes)) {}
  ~GrpcServer() override { Drain(absl::ZeroDuration()); }

  absl::Status Listen();

  const std::vector<std::string>& addresses() const override { return addresses_; }
  std::shared_ptr<grpc::Channel> InProcessChannel() override;
  void Drain(absl::Duration wait) override;
  void HurryUp() override { registry_.HurryUp(); }
  void SetReady() override {
    absl::MutexLock lock(&health_mu_);
    if (!draining_) server_->GetHealthCheckService()->SetServingStatus(true);
  }
  absl::Status Probe(absl::Duration limit) override;
  ServiceStatistics statistics() const override;
  std::vector<TenantUse> tenants() override;

 private:
  using Acceptor = grpc::experimental::ExternalConnectionAcceptor;

  absl::Status Guard(const std::vector<ListenAddress>& addresses);
  absl::Status Bind();
  void SetLimits(grpc::ServerBuilder& builder) const;
  void KeepTime();

  const ServerConfig config_;
  Engine* const engine_;
  int64_t max_connections_ = 0, max_descriptors_ = 0;
  SessionRegistry registry_;
  Admission admission_;
  std::unique_ptr<ServerTls> tls_;  // null: no TLS
  RetrievalServiceImpl retrieval_;
  TransferRegistry transfers_;
  ContextServiceImpl contexts_;
  const int64_t transport_bytes_;
  std::vector<std::string> addresses_;
  std::unique_ptr<Listener> listener_;
  std::unique_ptr<Acceptor> acceptor_;  // of TCP addresses
  std::unique_ptr<grpc::Server> server_;
  absl::Mutex health_mu_;
  bool draining_ ABSL_GUARDED_BY(health_mu_) = false;
  absl::Mutex stored_mu_;
  std::vector<std::pair<std::string, int64_t>> stored_ ABSL_GUARDED_BY(stored_mu_);  // name, bytes
  std::chrono::steady_clock::time_point stored_until_ ABSL_GUARDED_BY(stored_mu_);
  absl::Notification stopped_;
  std::thread time_keeper_;
};

// Takes reflection out of one server: its library, once linked, adds it to all of the process.
class WithoutReflection : public grpc::ServerBuilderOption {
 public:
  void UpdateArguments(grpc::ChannelArguments*) override {}
  void UpdatePlugins(std::vector<std::unique_ptr<grpc::ServerBuilderPlugin>>* plugins) override {
    plugins->erase(std::remove_if(plugins->begin(), plugins->end(),
                                  [](const auto& plugin) {
                                    return plugin->name() == "proto_server_reflection";
                                  }),
                   plugins->end());
  }
};

void EnableHealthAndReflection() {
  static std::once_flag once;
  std::call_once(once, [] {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  });
}

absl::Status GrpcServer::Guard(const std::vector<ListenAddress>& addresses) {
  if (!config_.tls.certificate.empty()) {
    ASSIGN_OR_RETURN(tls_, ServerTls::Create(config_.tls));
  } else if (!config_.tls.ca.empty() || !config_.tls.key.empty()) {
    return absl::InvalidArgumentError(
        "TLS: a key or a CA of clients, but no certificate (--tls-cert)");
  }
  const Guards guards = {
      .tls = tls_ != nullptr,
      .callers_known = admission_.access().has_keys() || !config_.tls.ca.empty(),
      .insecure = config_.insecure,
  };
  for (const ListenAddress& address : addresses) RETURN_IF_ERROR(CheckExposure(address, guards));
  return absl::OkStatus();
}

absl::Status GrpcServer::Bind() {
  if (config_.socket_mode > 0777) {
    return absl::InvalidArgumentError(
        absl::StrFormat("socket mode %o is outside 0 .. 0777", config_.socket_mode));
  }
  std::vector<ListenAddress> addresses;
  for (const std::string& text : config_.listen) {
    ASSIGN_OR_RETURN(addresses.emplace_back(), ParseListenAddress(text));
  }
  RETURN_IF_ERROR(Guard(addresses));
  max_connections_ = config_.limits.max_connections;
  if (!addresses.empty()) {
    ASSIGN_OR_RETURN(max_descriptors_, RaiseDescriptorLimit());
    const int64_t most = max_descriptors_ - kOtherDescriptors;
    if (max_connections_ == 0) max_connections_ = std::min(kMostConnections, most);
    if (max_connections_ > most) {
      return absl::InvalidArgumentError(absl::StrCat("service: max_connections=", max_connections_,
                                                     " exceeds ", most, ", what the limit of ",
                                                     max_descriptors_, " file descriptors leaves"));
    }
  }
  ASSIGN_OR_RETURN(listener_, Listener::Bind(addresses, std::max<int64_t>(1, max_connections_),
                                             config_.socket_mode));
  for (const ListenAddress& address : listener_->addresses()) {
    addresses_.push_back(address.ToString());
  }
  return absl::OkStatus();
}

void GrpcServer::SetLimits(grpc::ServerBuilder& builder) const {
  builder.SetMaxReceiveMessageSize(kMaxRequestBytes);
  builder.SetMaxSendMessageSize(-1);  // parts are bounded by reply_part_bytes
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, config_.limits.max_streams);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, kIdleConnectionMs);
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, kHandshakeMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveTimeoutMs);
  // Clients may ask every 5 s whether the connection is alive, also between requests.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::NUM_CQS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MIN_POLLERS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MAX_POLLERS, 1);
  // The last resort: messages that are still coming in are gRPC's memory, and beyond this it ends
  // calls to get it back.
  builder.SetResourceQuota(grpc::ResourceQuota("kvstore")
                               .SetMaxThreads(kSyncThreads)
                               .Resize(static_cast<size_t>(transport_bytes_)));
}

absl::Status GrpcServer::Listen() {
  RETURN_IF_ERROR(ValidateServiceLimits(config_.limits));
  RETURN_IF_ERROR(ValidateAdvertised(config_.advertise));
  EnableHealthAndReflection();
  RETURN_IF_ERROR(Bind());
  grpc::ServerBuilder builder;
  if (!addresses_.empty()) {
    acceptor_ = builder.experimental().AddExternalConnectionAcceptor(
        grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
        tls_ != nullptr ? tls_->credentials() : grpc::InsecureServerCredentials());
  }
  builder.RegisterService(&retrieval_);
  builder.RegisterService(&contexts_);
  if (!config_.reflection) builder.SetOption(std::make_unique<WithoutReflection>());
  SetLimits(builder);
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) {
    return absl::InternalError(
        absl::StrCat("listen ", absl::StrJoin(config_.listen, ", "), ": gRPC does not start"));
  }
  for (const char* service :
       {v1::RetrievalService::service_full_name(), v1::ContextService::service_full_name()}) {
    server_->GetHealthCheckService()->SetServingStatus(service, true);
  }
  if (config_.ready_later) server_->GetHealthCheckService()->SetServingStatus(false);
  listener_->Start([this](const Connection& connection) {
    if (!listener_->addresses()[connection.address].unix_path.empty()) {
      // gRPC then calls the peer "fd:N", by which its user is known (CallerOf).
      return grpc::AddInsecureChannelFromFd(server_.get(), connection.fd);
    }
    Acceptor::NewConnectionParameters parameters;
    parameters.listener_fd = connection.listening_fd;
    parameters.fd = connection.fd;
    acceptor_->HandleNewConnection(&parameters);
  });
  time_keeper_ = std::thread([this] { KeepTime(); });
  spdlog::info("serving addresses={} max_connections={}", absl::StrJoin(addresses_, ","),
               max_connections_);
  return absl::OkStatus();
}

void GrpcServer::KeepTime() {
  FreedMemory freed(kMuchFreedBytes, kLittleFreedBytes);
  for (int64_t tick = 1; !stopped_.HasBeenNotified(); ++tick) {
    absl::SleepFor(kTick);  // by the steady clock, as waiting with a timeout is not
    CatchThrown("what is overdue", [&] {
      registry_.EndOverdue();
      if (tick % kTicksPerRights == 0) {
        registry_.EndWithdrawn();
        transfers_.EndThoseThatAreOver();
      }
      if (tick % kTicksPerLook == 0) freed.Look();
      return absl::OkStatus();
    }).IgnoreError();
  }
}

absl::Status GrpcServer::Probe(absl::Duration limit) {
  RETURN_IF_ERROR(listener_->Probe(limit));
  grpc::GenericStub stub(InProcessChannel());
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + absl::ToChronoMilliseconds(limit));
  grpc::ByteBuffer reply;
  grpc::Status status;
  grpc::Slice empty;
  const auto call = stub.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check",
                                          grpc::ByteBuffer(&empty, 1), &queue);
  call->StartCall();
  call->Finish(&reply, &status, &queue);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  if (status.ok()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat("probe: health check: ", status.error_message()));
}

ServiceStatistics GrpcServer::statistics() const {
  ServiceStatistics statistics;
  const Listener::Counters counters = listener_->counters();
  statistics.connections = counters.open;
  statistics.connections_accepted = counters.accepted;
  statistics.connections_refused = counters.refused;
  statistics.connections_silent = counters.silent;
  statistics.max_connections = max_connections_;
  statistics.max_descriptors = max_descriptors_;
  registry_.AddTo(&statistics);
  statistics.transfers = transfers_.size();
  return statistics;
}

std::vector<TenantUse> GrpcServer::tenants() {
  std::vector<TenantUse> tenants;
  const auto uses = admission_.access().tenant_uses();
  if (uses.empty()) return tenants;
  absl::MutexLock lock(&stored_mu_);
  if (const auto now = std::chrono::steady_clock::now(); now >= stored_until_) {
    std::vector<absl::Status> unreadable;
    if (const auto manifests = engine_->List(&unreadable); manifests.ok()) {
      stored_.clear();
      for (const v1::Manifest& manifest : *manifests) {
        stored_.emplace_back(manifest.name(), FactsOf(manifest).bytes);
      }
    }
    stored_until_ = now + kStoredFor;
  }
  for (const auto& [use, prefix] : uses) {
    tenants.push_back(use);
    for (const auto& [name, bytes] : stored_) {
      if (!absl::StartsWith(name, prefix)) continue;
      ++tenants.back().stored_contexts;
      tenants.back().stored_bytes += bytes;
    }
  }
  return tenants;
}

std::shared_ptr<grpc::Channel> GrpcServer::InProcessChannel() {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  return server_->InProcessChannel(arguments);
}

void GrpcServer::Drain(absl::Duration wait) {
  if (server_ == nullptr) return;
  {
    absl::MutexLock lock(&health_mu_);
    draining_ = true;
    server_->GetHealthCheckService()->SetServingStatus(false);
  }
  const auto left = registry_.Drain(wait);
  for (const std::shared_ptr<SessionReactor>& session : left) {
    session->Cut(absl::UnavailableError("server is shutting down"));
  }
  if (!left.empty()) spdlog::warn("drain: cut sessions={}", left.size());
  stopped_.Notify();
  time_keeper_.join();
  listener_->Stop();
  server_->Shutdown(std::chrono::system_clock::now() + absl::ToChronoMilliseconds(kCutGrace));
  server_->Wait();
  server_ = nullptr;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerConfig& config, Engine* engine) {
  auto server = std::make_unique<GrpcServer>(config, engine);
  RETURN_IF_ERROR(server->Listen());
  return server;
}

}  // namespace carrel::kvstore
