#include "kvstore/service/metrics_listener.h"

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <chrono>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "common/thrown.h"
#include "kvstore/service/listen_address.h"

namespace carrel::kvstore {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using asio::ip::tcp;
using boost::system::error_code;

constexpr uint32_t kMaxHeaderBytes = 8 << 10;
constexpr std::chrono::seconds kPatience(5);
constexpr std::chrono::milliseconds kAcceptPause(100);
constexpr int kMaxConnections = 16;

// One connection: reads one request, answers, closes.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(tcp::socket socket, const std::function<std::string()>* text, int* open)
      : stream_(std::move(socket)), text_(text), open_(open) {
    ++*open_;
    parser_.header_limit(kMaxHeaderBytes);
    parser_.body_limit(0);
  }
  ~Connection() { --*open_; }

  void Run() {
    stream_.expires_after(kPatience);
    http::async_read(
        stream_, buffer_, parser_, [self = shared_from_this()](error_code error, size_t) {
          if (!error) return self->Answer(http::status::ok);
          if (error == http::error::header_limit) {
            self->Answer(http::status::request_header_fields_too_large);
          } else if (error.category() == make_error_code(http::error::bad_method).category() &&
                     error != http::error::end_of_stream) {
            self->Answer(http::status::bad_request);
          }
        });
  }

 private:
  void Answer(http::status status) {
    const auto& request = parser_.get();
    const bool head = request.method() == http::verb::head;
    if (status == http::status::ok && request.method() != http::verb::get && !head) {
      status = http::status::method_not_allowed;
      reply_.set(http::field::allow, "GET, HEAD");
    } else if (status == http::status::ok && request.target() != "/metrics") {
      status = http::status::not_found;
    }
    const bool ok = status == http::status::ok;
    reply_.result(status);
    reply_.set(http::field::content_type,
               ok ? "text/plain; version=0.0.4; charset=utf-8" : "text/plain");
    reply_.body() = ok ? (*text_)()
                       : absl::StrCat(static_cast<unsigned>(status), " ",
                                      std::string(http::obsolete_reason(status)), "\n");
    reply_.prepare_payload();  // says how long the body is, also where it is not sent
    if (ok && head) reply_.body().clear();
    reply_.keep_alive(false);
    stream_.expires_after(kPatience);
    http::async_write(stream_, reply_, [self = shared_from_this()](error_code, size_t) {
      error_code ignored;
      self->stream_.socket().shutdown(tcp::socket::shutdown_send, ignored);
    });
  }

  beast::tcp_stream stream_;
  beast::flat_buffer buffer_;
  http::request_parser<http::empty_body> parser_;
  http::response<http::string_body> reply_;
  const std::function<std::string()>* const text_;
  int* const open_;  // of the listener's thread
};

class BeastListener : public MetricsListener {
 public:
  explicit BeastListener(std::function<std::string()> text) : text_(std::move(text)) {}
  ~BeastListener() override {
    io_.stop();
    if (thread_.joinable()) thread_.join();
  }
  const std::string& address() const override { return address_; }

  absl::Status Listen(const std::string& given);

 private:
  void Accept();
  void AcceptLater();

  // Declared before the sockets and handlers of io_ that use them.
  const std::function<std::string()> text_;
  int open_ = 0;
  asio::io_context io_{1};
  tcp::acceptor acceptor_{io_};
  asio::steady_timer pause_{io_};
  std::string address_;
  std::thread thread_;
};

absl::Status BeastListener::Listen(const std::string& given) {
  int port = 0;
  const std::string text =
      absl::SimpleAtoi(given, &port) ? absl::StrCat("127.0.0.1:", given) : given;
  ASSIGN_OR_RETURN(const ListenAddress address, ParseListenAddress(text));
  error_code error;
  const auto host = asio::ip::make_address(address.host, error);
  if (!address.unix_path.empty() || error) {
    return absl::InvalidArgumentError(
        absl::StrCat("metrics address \"", given, "\" must be a PORT or a numeric HOST:PORT"));
  }
  const tcp::endpoint endpoint(host, static_cast<uint16_t>(address.port));
  acceptor_.open(endpoint.protocol(), error);
  if (!error) acceptor_.set_option(asio::socket_base::reuse_address(true), error);
  if (!error) acceptor_.bind(endpoint, error);
  if (!error) acceptor_.listen(kMaxConnections, error);
  if (error) {
    return absl::FailedPreconditionError(
        absl::StrCat("listen ", text, " for metrics: ", error.message()));
  }
  address_ =
      ListenAddress{.host = address.host, .port = acceptor_.local_endpoint().port()}.ToString();
  Accept();
  thread_ = std::thread([this] {
    while (!io_.stopped()) {
      CatchThrown("metrics", [this] {
        io_.run();
        return absl::OkStatus();
      }).IgnoreError();
    }
  });
  return absl::OkStatus();
}

void BeastListener::Accept() {
  if (open_ >= kMaxConnections) return AcceptLater();
  acceptor_.async_accept([this](error_code error, tcp::socket socket) {
    if (error == asio::error::operation_aborted) return;
    if (error) return AcceptLater();  // no descriptor is left, say
    std::make_shared<Connection>(std::move(socket), &text_, &open_)->Run();
    Accept();
  });
}

void BeastListener::AcceptLater() {
  pause_.expires_after(kAcceptPause);
  pause_.async_wait([this](error_code error) {
    if (!error) Accept();
  });
}

}  // namespace

absl::StatusOr<std::unique_ptr<MetricsListener>> MetricsListener::Start(
    const std::string& address, std::function<std::string()> text) {
  auto listener = std::make_unique<BeastListener>(std::move(text));
  RETURN_IF_ERROR(listener->Listen(address));
  return listener;
}

}  // namespace carrel::kvstore
