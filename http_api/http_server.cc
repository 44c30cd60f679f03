#include "http_api/http_server.h"

#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/post.hpp>
#include <thread>
#include <utility>

#include "common/descriptor_limit.h"
#include "common/status.h"
#include "common/thrown.h"
#include "http_api/http_connection.h"
#include "kvstore/service/listener.h"

namespace carrel::http_api {
namespace {

namespace asio = boost::asio;

// Connections that have said nothing yet, beside those that have.
constexpr int64_t kSilentConnections = 3072;
// Descriptors that are not connections': the store's, a prefill's, templates', the reserve.
constexpr int64_t kOtherDescriptors = 192;

class BeastServer final : public HttpServer {
 public:
  BeastServer(const HttpServerConfig& config, HttpGate gate, HttpHandler handler)
      : shared_(std::make_shared<HttpShared>(config, std::move(gate), std::move(handler))) {}
  ~BeastServer() override {
    Stop();
    guard_.reset();
    shared_->End();
  }

  void Stop() override {
    shared_->stopped = true;
    if (listener_ != nullptr) listener_->Stop();
    shared_->io.stop();
    if (thread_.joinable()) thread_.join();
  }

  const std::vector<std::string>& addresses() const override { return addresses_; }

  Counters counters() const override {
    return {.connections = shared_->connections,
            .evicted = shared_->evicted,
            .slow = shared_->slow,
            .refused_bytes = shared_->budget.refused(),
            .held_bytes = shared_->budget.used_bytes()};
  }

  absl::Status Listen() {
    if (shared_->config.listen.empty()) {
      return absl::InvalidArgumentError("listen: no address is given");
    }
    std::vector<kvstore::ListenAddress> addresses;
    for (const std::string& text : shared_->config.listen) {
      ASSIGN_OR_RETURN(addresses.emplace_back(), kvstore::ParseListenAddress(text));
    }
    ASSIGN_OR_RETURN(const int64_t descriptors, RaiseDescriptorLimit());
    most_ = std::clamp<int64_t>(shared_->config.max_connections, 1,
                                std::max<int64_t>(1, descriptors - kOtherDescriptors));
    shared_->most_long = std::max<int64_t>(1, most_ - most_ / 8);
    const int64_t accepted =
        std::clamp<int64_t>(descriptors - kOtherDescriptors, 1, most_ + kSilentConnections);
    ASSIGN_OR_RETURN(listener_,
                     kvstore::Listener::Bind(addresses, accepted, shared_->config.socket_mode));
    for (const kvstore::ListenAddress& address : listener_->addresses()) {
      addresses_.push_back(address.ToString());
    }
    return CatchThrown("listen", [this] {
      thread_ = std::thread([this] { Work(); });
      listener_->Start([this](const kvstore::Connection& connection) {
        asio::post(shared_->io, [this, connection] { Take(connection); });
      });
      return absl::OkStatus();
    });
  }

 private:
  void Work() {
    while (!shared_->stopped) {
      CatchThrown("http", [this] {
        shared_->io.run();
        return absl::OkStatus();
      }).IgnoreError();
    }
  }

  void Take(const kvstore::Connection& taken) {
    const bool local = !listener_->addresses()[taken.address].unix_path.empty();
    sockaddr_storage name{};
    socklen_t bytes = sizeof(name);
    getsockname(taken.fd, reinterpret_cast<sockaddr*>(&name), &bytes);
    if (!HasRoom()) {
      close(taken.fd);
      return;
    }
    HttpConnection::Socket socket(shared_->io);
    boost::system::error_code error;
    socket.assign(asio::generic::stream_protocol(name.ss_family, 0), taken.fd, error);
    if (error) {
      close(taken.fd);
      return;
    }
    auto connection = std::make_shared<HttpConnection>(std::move(socket), local, shared_);
    connections_.push_back(connection);
    connection->Start();
  }

  // Beyond the bound the one goes that keeps the server waiting for the longest: one that is being drained first, then
  // headers that do not end, then idle ones, then bodies. One that waits for its answer never does.
  bool HasRoom() {
    if (static_cast<int64_t>(connections_.size()) < most_) return true;
    std::erase_if(connections_, [](const auto& weak) {
      const auto connection = weak.lock();
      return connection == nullptr || connection->gone();
    });
    if (static_cast<int64_t>(connections_.size()) < most_) return true;
    std::shared_ptr<HttpConnection> worst;
    for (const auto& weak : connections_) {
      const auto connection = weak.lock();
      if (connection == nullptr || connection->state() == HttpConnection::State::kAnswering)
        continue;
      if (worst == nullptr || connection->state() < worst->state() ||
          (connection->state() == worst->state() && connection->since() < worst->since())) {
        worst = connection;
      }
    }
    ++shared_->evicted;
    if (const auto now = HttpConnection::Clock::now(); now - told_ > std::chrono::seconds(10)) {
      told_ = now;
      spdlog::warn("http: {} connections are open: the one that waits longest goes (so far {})",
                   most_, shared_->evicted.load());
    }
    if (worst == nullptr) return false;
    worst->Leave();
    return true;
  }

  const std::shared_ptr<HttpShared> shared_;
  asio::executor_work_guard<asio::io_context::executor_type> guard_{shared_->io.get_executor()};
  std::unique_ptr<kvstore::Listener> listener_;
  int64_t most_ = 1;
  std::vector<std::weak_ptr<HttpConnection>> connections_;  // of the server's thread
  HttpConnection::Clock::time_point told_{};
  std::vector<std::string> addresses_;
  std::thread thread_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const HttpServerConfig& config,
                                                              HttpGate gate, HttpHandler handler) {
  auto server = std::make_unique<BeastServer>(config, std::move(gate), std::move(handler));
  RETURN_IF_ERROR(server->Listen());
  return server;
}

}  // namespace carrel::http_api
