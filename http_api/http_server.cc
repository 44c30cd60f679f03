#include "http_api/http_server.h"

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <chrono>
#include <deque>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/status.h"
#include "kvstore/service/listen_address.h"

namespace carrel::http_api {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using asio::ip::tcp;
using boost::system::error_code;

constexpr uint32_t kMaxHeaderBytes = 16 << 10;
constexpr std::chrono::milliseconds kAcceptPause(100);

struct Shared {
  HttpServerConfig config;
  HttpHandler handler;
  std::atomic<int64_t> connections{0};
  std::atomic<bool> stopped{false};
};

// All of it runs on the server's thread.
class Connection : public std::enable_shared_from_this<Connection> {
 public:
  Connection(tcp::socket socket, Shared* shared) : stream_(std::move(socket)), shared_(shared) {
    ++shared_->connections;
    error_code error;
    const auto peer = stream_.socket().remote_endpoint(error);
    if (!error) peer_ = absl::StrCat(peer.address().to_string(), ":", peer.port());
    stream_.socket().set_option(tcp::no_delay(true), error);
  }
  ~Connection() { --shared_->connections; }

  void Read() {
    parser_.emplace();
    parser_->header_limit(kMaxHeaderBytes);
    parser_->body_limit(static_cast<uint64_t>(shared_->config.max_body_bytes));
    stream_.expires_after(absl::ToChronoMilliseconds(shared_->config.idle));
    http::async_read_header(stream_, buffer_, *parser_,
                            [self = shared_from_this()](error_code error, size_t) {
                              if (error) return self->Broken(error);
                              self->ReadBody();
                            });
  }

  // Of one reply; `turn` tells replies to earlier requests from the one that is wanted.
  void Send(int64_t turn, int status, const std::string& content_type, const std::string& body,
            const HttpFields& fields = {}) {
    if (turn != turn_ || begun_) return;
    http::response<http::string_body> response(static_cast<http::status>(status), 11);
    response.set(http::field::content_type, content_type);
    response.set("X-Content-Type-Options", "nosniff");
    for (const auto& [name, value] : fields) response.set(name, value);
    response.keep_alive(keep_alive_);
    response.body() = body;
    response.prepare_payload();
    if (head_) response.body().clear();  // its length is told all the same
    std::ostringstream text;
    text << response;
    begun_ = ended_ = true;
    Push(text.str());
  }

  void Begin(int64_t turn, const std::string& content_type) {
    if (turn != turn_ || begun_) return;
    http::response<http::empty_body> response(http::status::ok, 11);
    response.set(http::field::content_type, content_type);
    response.set(http::field::cache_control, "no-cache");
    response.keep_alive(keep_alive_);
    response.chunked(true);
    std::ostringstream text;
    text << response.base();
    begun_ = true;
    Push(text.str());
  }

  void Write(int64_t turn, const std::string& piece) {
    if (turn != turn_ || !begun_ || ended_ || piece.empty()) return;
    Push(absl::StrCat(absl::Hex(piece.size()), "\r\n", piece, "\r\n"));
  }

  void End(int64_t turn) {
    if (turn != turn_ || !begun_ || ended_) return;
    ended_ = true;
    Push("0\r\n\r\n");
  }

  bool gone() const { return gone_ || shared_->stopped; }
  beast::tcp_stream::executor_type executor() { return stream_.get_executor(); }

 private:
  void ReadBody() {
    stream_.expires_after(absl::ToChronoMilliseconds(shared_->config.patience));
    http::async_read(stream_, buffer_, *parser_,
                     [self = shared_from_this()](error_code error, size_t) {
                       if (error) return self->Broken(error);
                       self->Handle();
                     });
  }

  void Handle();

  // A request that is none is answered, as far as there is somebody.
  void Broken(error_code error) {
    int status = 0;
    if (error == http::error::body_limit) status = 413;
    if (error == http::error::header_limit) status = 431;
    if (status == 0 && error != http::error::end_of_stream &&
        error != http::error::partial_message &&
        error.category() == make_error_code(http::error::bad_method).category()) {
      status = 400;
    }
    if (status == 0) return Leave();
    StartTurn(/*keep_alive=*/false);
    std::string said(http::obsolete_reason(static_cast<http::status>(status)));
    if (status == 413) {
      absl::StrAppend(&said, ": a request may have at most ", shared_->config.max_body_bytes,
                      " bytes");
    }
    Send(turn_, status, "application/json",
         absl::StrCat(R"({"error":{"message":")", said,
                      R"(","type":"invalid_request_error","param":null,"code":null}})"));
  }

  void StartTurn(bool keep_alive) {
    ++turn_;
    begun_ = ended_ = false;
    keep_alive_ = keep_alive;
  }

  // The client says nothing while it waits: what can be read then is its end, or its next request.
  void Watch() {
    stream_.socket().async_wait(tcp::socket::wait_read,
                                [self = shared_from_this(), turn = turn_](error_code error) {
                                  if (error || turn != self->turn_ || self->ended_) return;
                                  error_code failed;
                                  if (self->stream_.socket().available(failed) == 0 || failed)
                                    self->Leave();
                                });
  }

  void Push(std::string bytes) {
    if (gone_) return;
    out_.push_back(std::move(bytes));
    if (out_.size() == 1) Pump();
  }

  void Pump() {
    stream_.expires_after(absl::ToChronoMilliseconds(shared_->config.patience));
    asio::async_write(stream_, asio::buffer(out_.front()),
                      [self = shared_from_this()](error_code error, size_t) {
                        if (error || self->gone_) return self->Leave();
                        self->out_.pop_front();
                        if (!self->out_.empty()) return self->Pump();
                        self->stream_.expires_never();
                        if (self->ended_) self->Next();
                      });
  }

  void Next() {
    if (keep_alive_) return Read();
    error_code ignored;
    stream_.socket().shutdown(tcp::socket::shutdown_send, ignored);
    Drain();
  }

  // What a client still sends is read for a moment, so that the kernel does not throw away the answer
  // with it.
  void Drain() {
    stream_.expires_after(std::chrono::seconds(1));
    stream_.async_read_some(buffer_.prepare(65536),
                            [self = shared_from_this()](error_code error, size_t) {
                              if (!error) self->Drain();
                            });
  }

  void Leave() {
    gone_ = true;  // what is in out_ may be on its way: its write ends first
    error_code ignored;
    stream_.socket().close(ignored);
  }

  beast::tcp_stream stream_;
  beast::flat_buffer buffer_;
  std::optional<http::request_parser<http::string_body>> parser_;
  std::deque<std::string> out_;  // the first is on its way
  std::string peer_;
  int64_t turn_ = 0;
  bool begun_ = false, ended_ = false, keep_alive_ = false;
  bool head_ = false;  // the request is HEAD, whose answer has no body
  std::atomic<bool> gone_{false};
  Shared* const shared_;
};

// From any thread, in order.
class Reply final : public HttpReply {
 public:
  Reply(std::shared_ptr<Connection> connection, int64_t turn)
      : connection_(std::move(connection)), turn_(turn) {}
  ~Reply() override {
    Post([turn = turn_](Connection& c) {
      c.Send(turn, 500, "text/plain", "500 Internal Server Error\n");  // nothing, once it has begun
      c.End(turn);
    });
  }
  void Send(int status, const std::string& content_type, const std::string& body,
            const HttpFields& fields) override {
    Post([=, turn = turn_](Connection& c) { c.Send(turn, status, content_type, body, fields); });
  }
  void Begin(const std::string& content_type) override {
    Post([=, turn = turn_](Connection& c) { c.Begin(turn, content_type); });
  }
  void Write(const std::string& piece) override {
    Post([=, turn = turn_](Connection& c) { c.Write(turn, piece); });
  }
  void End() override {
    Post([turn = turn_](Connection& c) { c.End(turn); });
  }
  bool gone() const override { return connection_->gone(); }

 private:
  template <typename F>
  void Post(F work) {
    asio::post(connection_->executor(),
               [connection = connection_, work = std::move(work)] { work(*connection); });
  }
  const std::shared_ptr<Connection> connection_;
  const int64_t turn_;
};

void Connection::Handle() {
  auto& message = parser_->get();
  StartTurn(message.keep_alive());
  head_ = message.method() == http::verb::head;
  stream_.expires_never();
  HttpRequest request;
  request.method = std::string(message.method_string());
  request.target = std::string(message.target());
  request.authorization = std::string(message[http::field::authorization]);
  request.content_type = std::string(message[http::field::content_type]);
  request.host = std::string(message[http::field::host]);
  request.origin = std::string(message[http::field::origin]);
  request.fetch_site = std::string(message["Sec-Fetch-Site"]);
  request.body = std::move(message.body());
  request.peer = peer_;
  Watch();
  shared_->handler(std::move(request), std::make_shared<Reply>(shared_from_this(), turn_));
}

class BeastServer final : public HttpServer {
 public:
  BeastServer(const HttpServerConfig& config, HttpHandler handler)
      : shared_{config, std::move(handler)} {}
  ~BeastServer() override { Stop(); }
  void Stop() override {
    shared_.stopped = true;
    io_.stop();
    if (thread_.joinable()) thread_.join();
  }
  const std::vector<std::string>& addresses() const override { return addresses_; }
  int64_t connections() const override { return shared_.connections; }

  absl::Status Listen() {
    if (shared_.config.listen.empty())
      return absl::InvalidArgumentError("listen: no address is given");
    for (const std::string& text : shared_.config.listen) RETURN_IF_ERROR(ListenOn(text));
    for (auto& acceptor : acceptors_) Accept(*acceptor);
    thread_ = std::thread([this] { io_.run(); });
    return absl::OkStatus();
  }

 private:
  absl::Status ListenOn(const std::string& text) {
    ASSIGN_OR_RETURN(const kvstore::ListenAddress address, kvstore::ParseListenAddress(text));
    error_code error;
    const auto host = asio::ip::make_address(address.host, error);
    if (!address.unix_path.empty() || error) {
      return absl::InvalidArgumentError(
          absl::StrCat("listen=", text, " is no numeric HOST:PORT, such as 127.0.0.1:8080"));
    }
    const tcp::endpoint endpoint(host, static_cast<uint16_t>(address.port));
    auto acceptor = std::make_unique<tcp::acceptor>(io_);
    acceptor->open(endpoint.protocol(), error);
    if (!error) acceptor->set_option(asio::socket_base::reuse_address(true), error);
    if (!error) acceptor->bind(endpoint, error);
    if (!error) acceptor->listen(asio::socket_base::max_listen_connections, error);
    if (error) {
      return absl::FailedPreconditionError(absl::StrCat("listen=", text, ": ", error.message()));
    }
    addresses_.push_back(
        kvstore::ListenAddress{.host = address.host, .port = acceptor->local_endpoint().port()}
            .ToString());
    acceptors_.push_back(std::move(acceptor));
    return absl::OkStatus();
  }

  void Accept(tcp::acceptor& acceptor) {
    if (shared_.connections >= shared_.config.max_connections) return AcceptLater(acceptor);
    acceptor.async_accept([this, &acceptor](error_code error, tcp::socket socket) {
      if (error == asio::error::operation_aborted) return;
      if (error) return AcceptLater(acceptor);  // no descriptor is left, say
      std::make_shared<Connection>(std::move(socket), &shared_)->Read();
      Accept(acceptor);
    });
  }

  void AcceptLater(tcp::acceptor& acceptor) {
    auto pause = std::make_shared<asio::steady_timer>(io_, kAcceptPause);
    pause->async_wait([this, &acceptor, pause](error_code error) {
      if (!error) Accept(acceptor);
    });
  }

  // Declared before the sockets and handlers of io_ that use it.
  Shared shared_;
  asio::io_context io_{1};
  std::vector<std::unique_ptr<tcp::acceptor>> acceptors_;
  std::vector<std::string> addresses_;
  std::thread thread_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const HttpServerConfig& config,
                                                              HttpHandler handler) {
  auto server = std::make_unique<BeastServer>(config, std::move(handler));
  RETURN_IF_ERROR(server->Listen());
  return server;
}

}  // namespace carrel::http_api
