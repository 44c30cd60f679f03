#include "kvstore/service/server.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <spdlog/spdlog.h>

#include <mutex>
#include <utility>

#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "carrel/v1/retrieval.grpc.pb.h"
#include "common/status.h"
#include "kvstore/engine/engine.h"
#include "kvstore/service/context_service.h"
#include "kvstore/service/listen_address.h"
#include "kvstore/service/session_reactor.h"
#include "kvstore/service/session_registry.h"

namespace carrel::kvstore {
namespace {

// The largest request: 4,096 tokens' queries are refused by then, and 65,536 ids of FetchRows fit.
constexpr int kMaxRequestBytes = 32 << 20;
constexpr absl::Duration kCutGrace = absl::Seconds(1);

class RetrievalServiceImpl : public v1::RetrievalService::CallbackService {
 public:
  RetrievalServiceImpl(Engine* engine, SessionRegistry* registry)
      : engine_(engine), registry_(registry) {}

  grpc::ServerBidiReactor<v1::SessionRequest, v1::SessionReply>* Session(
      grpc::CallbackServerContext*) override {
    return SessionReactor::Start(engine_, registry_);
  }

 private:
  Engine* const engine_;
  SessionRegistry* const registry_;
};

class GrpcServer : public Server {
 public:
  explicit GrpcServer(Engine* engine) : retrieval_(engine, &registry_), contexts_(engine) {}
  ~GrpcServer() override { Drain(absl::Now()); }

  absl::Status Listen(const ServerConfig& config);

  const std::vector<std::string>& addresses() const override { return addresses_; }
  std::shared_ptr<grpc::Channel> InProcessChannel() override;
  void Drain(absl::Time deadline) override;

 private:
  SessionRegistry registry_;
  RetrievalServiceImpl retrieval_;
  ContextServiceImpl contexts_;
  std::vector<std::string> addresses_;
  std::unique_ptr<grpc::Server> server_;
};

void EnableHealthAndReflection() {
  static std::once_flag once;
  std::call_once(once, [] {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  });
}

absl::Status GrpcServer::Listen(const ServerConfig& config) {
  EnableHealthAndReflection();
  std::vector<ListenAddress> addresses;
  for (const std::string& text : config.listen) {
    ASSIGN_OR_RETURN(addresses.emplace_back(), ParseListenAddress(text));
    RETURN_IF_ERROR(PrepareToListen(addresses.back()));
  }
  grpc::ServerBuilder builder;
  std::vector<int> ports(addresses.size(), 0);
  for (size_t i = 0; i < addresses.size(); ++i) {
    builder.AddListeningPort(addresses[i].ToString(), grpc::InsecureServerCredentials(), &ports[i]);
  }
  builder.RegisterService(&retrieval_);
  builder.RegisterService(&contexts_);
  builder.SetMaxReceiveMessageSize(kMaxRequestBytes);
  builder.SetMaxSendMessageSize(-1);  // parts are bounded by reply_part_bytes
  // A second server on the same port would get half of the connections.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // Clients may ask every 5 s whether the connection is alive, also between requests.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  // The reflection service is synchronous; it needs no more than this.
  builder.SetSyncServerOption(grpc::ServerBuilder::NUM_CQS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MIN_POLLERS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MAX_POLLERS, 1);
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("listen ", absl::StrJoin(config.listen, ", "), ": cannot bind"));
  }
  for (size_t i = 0; i < addresses.size(); ++i) {
    if (addresses[i].unix_path.empty()) addresses[i].port = ports[i];
    addresses_.push_back(addresses[i].ToString());
  }
  for (const char* service :
       {v1::RetrievalService::service_full_name(), v1::ContextService::service_full_name()}) {
    server_->GetHealthCheckService()->SetServingStatus(service, true);
  }
  spdlog::info("serving addresses={}", absl::StrJoin(addresses_, ","));
  return absl::OkStatus();
}

std::shared_ptr<grpc::Channel> GrpcServer::InProcessChannel() {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  return server_->InProcessChannel(arguments);
}

void GrpcServer::Drain(absl::Time deadline) {
  if (server_ == nullptr) return;
  server_->GetHealthCheckService()->SetServingStatus(false);
  const auto left = registry_.Drain(deadline);
  for (const std::shared_ptr<SessionReactor>& session : left) {
    session->Cut(absl::UnavailableError("server is shutting down"));
  }
  if (!left.empty()) spdlog::warn("drain: cut sessions={}", left.size());
  server_->Shutdown(absl::ToChronoTime(absl::Now() + kCutGrace));
  server_->Wait();
  server_ = nullptr;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerConfig& config, Engine* engine) {
  auto server = std::make_unique<GrpcServer>(engine);
  RETURN_IF_ERROR(server->Listen(config));
  return server;
}

}  // namespace carrel::kvstore
