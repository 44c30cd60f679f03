#include "http_api/http_connection.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <boost/asio/post.hpp>
#include <boost/asio/write.hpp>
#include <boost/beast/http.hpp>
#include <cerrno>
#include <sstream>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/thrown.h"
#include "http_api/api_error.h"
#include "http_api/http_message.h"

namespace carrel::http_api {
namespace {

namespace asio = boost::asio;
namespace http = boost::beast::http;
using boost::system::error_code;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr size_t kMaxHeaderBytes = 16 << 10;
constexpr size_t kReadBytes = 64 << 10;
constexpr size_t kWriteBytes = 64 << 10;  // which are taken within the server's patience
constexpr int64_t kMostUnsent = int64_t{1} << 20;
// A body comes at no less than this, after the server's patience.
constexpr int64_t kLeastBytesPerSecond = 16 << 10;
// A first request, and the headers of any, come within this time.
constexpr seconds kHeaderPatience(10);
constexpr int64_t kDrainBytes = 64 << 10;
constexpr seconds kDrainFor(1);
constexpr milliseconds kProbeEvery(100), kAnswersComeWithin(40);
constexpr int64_t kChargeBytes = 64 << 10;

std::string ErrorBody(int status, const std::string& message) {
  return ErrorOf(WithHttpStatus(absl::InvalidArgumentError(message), status)).body;
}

std::string PeerOf(int fd, bool local, std::optional<uint32_t>& uid) {
  if (local) {
    ucred credentials{};
    socklen_t bytes = sizeof(credentials);
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) != 0) return "unix:";
    uid = credentials.uid;
    return absl::StrCat("unix:uid=", credentials.uid, ",pid=", credentials.pid);
  }
  sockaddr_storage name{};
  socklen_t bytes = sizeof(name);
  if (getpeername(fd, reinterpret_cast<sockaddr*>(&name), &bytes) != 0) return "";
  char text[INET6_ADDRSTRLEN] = "";
  const bool v6 = name.ss_family == AF_INET6;
  const auto* four = reinterpret_cast<const sockaddr_in*>(&name);
  const auto* six = reinterpret_cast<const sockaddr_in6*>(&name);
  const void* from = v6 ? static_cast<const void*>(&six->sin6_addr) : &four->sin_addr;
  inet_ntop(name.ss_family, from, text, sizeof(text));
  return absl::StrCat(text, ":", ntohs(v6 ? six->sin6_port : four->sin_port));
}

// From any thread, in order.
class Reply final : public HttpReply {
 public:
  Reply(std::shared_ptr<HttpConnection> connection, int64_t turn)
      : connection_(std::move(connection)), turn_(turn) {}
  ~Reply() override {
    Post([turn = turn_](HttpConnection& c) {  // nothing, once it has begun
      // As the server stops all clients are gone to who would answer them; this one may still hear why.
      const HttpError error =
          ErrorOf(c.shared().stopped ? absl::UnavailableError("the server is stopping")
                                     : absl::InternalError("the request was dropped"));
      c.Send(turn, error.status, "application/json", error.body, {});
      c.End(turn);
    });
  }
  void Send(int status, const std::string& content_type, const std::string& body,
            const HttpFields& fields) override {
    Post(
        [=, turn = turn_](HttpConnection& c) { c.Send(turn, status, content_type, body, fields); });
  }
  void Begin(const std::string& content_type) override {
    Post([=, turn = turn_](HttpConnection& c) { c.Begin(turn, content_type); });
  }
  void Write(const std::string& piece) override {
    if (gone() || !connection_->Announce(piece.size())) return;
    Post([=, turn = turn_](HttpConnection& c) { c.Write(turn, piece); });
  }
  void End() override {
    Post([turn = turn_](HttpConnection& c) { c.End(turn); });
  }
  bool gone() const override { return connection_->gone(); }

 private:
  template <typename F>
  void Post(F work) {
    connection_->shared().Post([connection = connection_, work = std::move(work)] {
      connection->Guarded([&] { work(*connection); });
    });
  }
  const std::shared_ptr<HttpConnection> connection_;
  const int64_t turn_;
};

}  // namespace

HttpConnection::HttpConnection(Socket socket, bool local, std::shared_ptr<HttpShared> shared)
    : shared_(std::move(shared)),
      socket_(std::move(socket)),
      local_(local),
      deadline_(socket_.get_executor()),
      probe_(socket_.get_executor()),
      buffer_(kMaxHeaderBytes + kReadBytes),
      account_(std::make_shared<ByteBudget::Account>(&shared_->budget)) {
  ++shared_->connections;
  peer_ = PeerOf(socket_.native_handle(), local_, uid_);
}

HttpConnection::~HttpConnection() {
  GivePlaceBack();
  --shared_->connections;
}

void HttpConnection::SetState(State state) {
  state_ = state;
  since_ = Clock::now();
}

void HttpConnection::SetDeadline(Clock::duration after) {
  deadline_.expires_after(after);
  deadline_.async_wait([self = shared_from_this()](error_code error) {
    if (!error && self->deadline_.expiry() <= Clock::now()) self->Leave();
  });
}

// --- reading

void HttpConnection::WaitForRequest() {
  SetState(State::kWaiting);
  GivePlaceBack();
  parser_.emplace();
  parser_->header_limit(kMaxHeaderBytes);
  parser_->body_limit(boost::none);  // by the gate
  judged_ = head_ = old_ = chunked_ = events_ =
      false;  // begun_ and ended_ are the last turn's until the next
  charges_ = std::make_shared<std::vector<ByteBudget::Charge>>();
  charged_ = 0;
  reply_charges_.clear();
  SetDeadline(first_ ? Clock::duration(kHeaderPatience)
                     : absl::ToChronoMilliseconds(shared_->config.idle));
  if (buffer_.size() > 0) return Feed();
  ReadSome();
}

void HttpConnection::ReadSome() {
  const size_t room = std::min(kReadBytes, buffer_.max_size() - buffer_.size());
  if (room == 0) return Broken(http::error::header_limit);  // an extension of a chunk, or trailers
  socket_.async_read_some(buffer_.prepare(room),
                          [self = shared_from_this()](error_code error, size_t bytes) {
                            if (error) return self->ReadEnded(error);
                            self->Guarded([&] {
                              self->buffer_.commit(bytes);
                              self->Feed();
                            });
                          });
}

void HttpConnection::ReadEnded(error_code error) {
  if (gone_) return;
  // In the middle of a request: it will not be whole.
  if (error == asio::error::eof && state_ != State::kWaiting) {
    return RefuseWith(400, "the request ends in the middle");
  }
  Leave();
}

void HttpConnection::Feed() {
  if (gone_) return;
  if (state_ == State::kWaiting) {
    // Empty lines before a request are none (RFC 9112, section 2.2).
    const auto* bytes = static_cast<const char*>(buffer_.data().data());
    size_t skip = 0;
    while (skip < buffer_.size() && (bytes[skip] == '\r' || bytes[skip] == '\n')) ++skip;
    buffer_.consume(skip);
    if (buffer_.size() == 0) return ReadSome();
    SetState(State::kHeader);
    SetDeadline(kHeaderPatience);
  }
  for (;;) {
    error_code error;
    const size_t used = parser_->put(buffer_.data(), error);
    buffer_.consume(used);
    if (error && error != http::error::need_more) return Broken(error);
    if (!judged_ && parser_->is_header_done()) {
      if (!Judge()) return;
      error = {};
    }
    if (judged_ && !TakeBody()) return;
    if (parser_->is_done()) return Handle();
    if (error == http::error::need_more || buffer_.size() == 0) return ReadSome();
  }
}

HttpRequest HttpConnection::Head() {
  const auto& message = parser_->get();
  HttpRequest request;
  request.method = std::string(message.method_string());
  request.target = std::string(message.target());
  request.authorization = std::string(message[http::field::authorization]);
  request.content_type = std::string(message[http::field::content_type]);
  request.content_encoding = std::string(message[http::field::content_encoding]);
  request.host = std::string(message[http::field::host]);
  request.origin = std::string(message[http::field::origin]);
  request.fetch_site = std::string(message["Sec-Fetch-Site"]);
  request.fetch_mode = std::string(message["Sec-Fetch-Mode"]);
  request.fetch_dest = std::string(message["Sec-Fetch-Dest"]);
  request.peer = peer_;
  request.local = local_;
  request.uid = uid_;
  request.id = ++shared_->requests;
  return request;
}

bool HttpConnection::Judge() {
  judged_ = true;
  const auto& message = parser_->get();
  head_ = message.method() == http::verb::head;
  old_ = message.version() < 11;
  request_ = Head();
  SetState(State::kBody);
  SetDeadline(absl::ToChronoMilliseconds(shared_->config.patience));
  const auto refuse = [this](int status, const std::string& why) {
    RefuseWith(status, why);
    return false;
  };
  absl::StatusOr<HttpTarget> at = ParseTarget(request_.target);
  if (!at.ok()) return refuse(400, std::string(at.status().message()));
  request_.at = *std::move(at);
  const size_t hosts = message.count(http::field::host);
  if (hosts > 1 || (hosts == 0 && !old_)) return refuse(400, "a request has one Host");
  if (!request_.at.authority.empty()) request_.host = request_.at.authority;
  const std::string coding(message[http::field::transfer_encoding]);
  if (!coding.empty() && !absl::EqualsIgnoreCase(absl::StripAsciiWhitespace(coding), "chunked")) {
    return refuse(501, absl::StrCat("Transfer-Encoding: ", coding.substr(0, 100),
                                    ": only chunked is understood"));
  }
  const std::string expect(message[http::field::expect]);
  if (!expect.empty() && !absl::EqualsIgnoreCase(expect, "100-continue")) {
    return refuse(417, absl::StrCat("Expect: ", expect.substr(0, 100), ": is not understood"));
  }
  HttpVerdict verdict;
  const absl::Status judged = CatchThrown(absl::StrCat("request ", request_.id), [&] {
    verdict = shared_->gate(request_);
    return absl::OkStatus();
  });
  if (!judged.ok()) return refuse(500, std::string(judged.message()));
  if (verdict.status != 0) {
    Refuse(verdict);
    return false;
  }
  request_.passed = std::move(verdict.passed);
  may_take_long_ = verdict.may_take_long;
  body_limit_ = verdict.max_body_bytes;
  const auto length = parser_->content_length();
  if (length.has_value() && *length > static_cast<uint64_t>(body_limit_)) {
    return refuse(413, absl::StrCat("the body has ", *length, " bytes: must be at most ",
                                    body_limit_, " here"));
  }
  if (!expect.empty() && !old_ && !parser_->is_done() && buffer_.size() == 0) {
    Push("HTTP/1.1 100 Continue\r\n\r\n");
  }
  parser_->eager(true);
  return true;
}

bool HttpConnection::TakeBody() {
  const auto bytes = static_cast<int64_t>(parser_->get().body().size());
  if (bytes > body_limit_) {
    RefuseWith(413, absl::StrCat("the body has more than ", body_limit_, " bytes, the most here"));
    return false;
  }
  while (charged_ < bytes) {
    absl::StatusOr<ByteBudget::Charge> charge = account_->Take("a body", kChargeBytes);
    if (!charge.ok()) {
      RefuseWith(503, "too many bytes of requests are held already; ask again later",
                 {{"Retry-After", "1"}});
      return false;
    }
    charges_->push_back(*std::move(charge));
    charged_ += kChargeBytes;
  }
  if (!parser_->is_done()) {
    const auto patience = absl::ToChronoMilliseconds(shared_->config.patience) +
                          seconds(bytes / kLeastBytesPerSecond);
    SetDeadline(since_ + patience - Clock::now());
  }
  return true;
}

bool HttpConnection::TakePlace() {
  if (!may_take_long_) return true;
  has_place_ = ++shared_->long_answers <= shared_->most_long;
  if (!has_place_) --shared_->long_answers;
  return has_place_;
}

void HttpConnection::GivePlaceBack() {
  if (std::exchange(has_place_, false)) --shared_->long_answers;
}

void HttpConnection::Handle() {
  if (!TakePlace()) {
    return RefuseWith(503, "too many answers are on their way already; ask again later",
                      {{"Retry-After", "1"}});
  }
  StartTurn(parser_->get().keep_alive() && !old_);
  deadline_.cancel();
  SetState(State::kAnswering);
  request_.body = std::move(parser_->get().body());
  request_.held = std::move(charges_);
  Watch();
  const std::string what = absl::StrCat("request ", request_.id);
  const absl::Status handled = CatchThrown(what, [&] {
    shared_->handler(std::move(request_), std::make_shared<Reply>(shared_from_this(), turn_));
    return absl::OkStatus();
  });
  if (!handled.ok()) {
    Send(turn_, 500, "application/json", ErrorBody(500, std::string(handled.message())), {});
  }
}

// A request that is none is answered, as far as there is somebody.
void HttpConnection::Broken(error_code error) {
  if (error == http::error::header_limit) {
    return RefuseWith(431, absl::StrCat("headers may have ", kMaxHeaderBytes, " bytes"));
  }
  if (error != http::error::end_of_stream &&
      error.category() == make_error_code(http::error::bad_method).category()) {
    return RefuseWith(400, absl::StrCat("this is no HTTP request: ", error.message()));
  }
  Leave();
}

void HttpConnection::RefuseWith(int status, const std::string& message, HttpFields fields) {
  HttpVerdict verdict;
  verdict.status = status;
  verdict.content_type = "application/json";
  verdict.body = ErrorBody(status, message);
  verdict.fields = std::move(fields);
  Refuse(verdict);
}

void HttpConnection::Refuse(const HttpVerdict& verdict) {
  // What follows of the request is not read.
  StartTurn(judged_ && parser_->is_done() && parser_->get().keep_alive() && !old_);
  SetState(State::kAnswering);
  Send(turn_, verdict.status, verdict.content_type, verdict.body, verdict.fields);
}

void HttpConnection::StartTurn(bool keep_alive) {
  ++turn_;
  first_ = begun_ = ended_ = false;
  keep_alive_ = keep_alive;
}

// --- whether the client is there

// It says nothing while it waits: what can be read then is its end, or its next request, behind which its end is
// looked for.
void HttpConnection::Watch() {
  half_closed_ = false;
  socket_.async_wait(
      Socket::wait_read, [self = shared_from_this(), turn = turn_](error_code error) {
        if (error || self->gone_ || turn != self->turn_ || self->ended_) return;
        char byte;
        const ssize_t read = recv(self->socket_.native_handle(), &byte, 1, MSG_PEEK | MSG_DONTWAIT);
        if (read == 0) return self->SeenEnd();
        if (read < 0 && errno != EAGAIN && errno != EINTR) return self->Leave();
        self->Probe();
      });
}

// It may have shut its sending side only, which is allowed. Where the answer does not come soon, something is written
// that changes none (an interim response, a comment of a stream): a socket that was closed answers with a reset.
void HttpConnection::SeenEnd() {
  half_closed_ = true;
  probe_.expires_after(kAnswersComeWithin);
  probe_.async_wait([self = shared_from_this(), turn = turn_](error_code error) {
    if (!error && turn == self->turn_) self->AskWhetherThere();
  });
}

void HttpConnection::AskWhetherThere() {
  if (gone_ || ended_) return;
  if (!begun_ && !old_) {
    Push("HTTP/1.1 100 Continue\r\n\r\n");
  } else if (events_ && !ended_) {
    PushPiece(":\n\n");
  }
  Probe();
}

void HttpConnection::Probe() {
  if (gone_ || ended_) return;
  if (Dead()) return Leave();
  if (!half_closed_ && Ended()) return SeenEnd();
  probe_.expires_after(kProbeEvery);
  probe_.async_wait([self = shared_from_this()](error_code error) {
    if (!error) self->Probe();
  });
}

bool HttpConnection::Dead() {
  const int fd = socket_.native_handle();
  if (local_) {
    pollfd poll_for = {fd, 0, 0};
    return poll(&poll_for, 1, 0) > 0 && (poll_for.revents & (POLLHUP | POLLERR)) != 0;
  }
  tcp_info info{};
  socklen_t bytes = sizeof(info);
  return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0 || info.tcpi_state == TCP_CLOSE;
}

// Whether it sends no more, whatever of it was not read yet.
bool HttpConnection::Ended() {
  pollfd poll_for = {socket_.native_handle(), POLLRDHUP, 0};
  return poll(&poll_for, 1, 0) > 0 && (poll_for.revents & POLLRDHUP) != 0;
}

// --- writing

void HttpConnection::Send(int64_t turn, int status, const std::string& content_type,
                          std::string body, const HttpFields& fields) {
  if (turn != turn_ || begun_) return;
  HttpFields more = fields;
  if (static_cast<int64_t>(body.size()) > kChargeBytes) {
    auto charge = account_->Take("a reply", static_cast<int64_t>(body.size()));
    if (charge.ok()) {
      reply_charges_.push_back(*std::move(charge));
    } else {
      status = 503;
      body = ErrorBody(503, "too many bytes of replies wait to be read; ask again later");
      more = {{"Retry-After", "1"}};
    }
  }
  http::response<http::string_body> response(static_cast<http::status>(status), 11);
  response.set(http::field::content_type, content_type);
  response.set("X-Content-Type-Options", "nosniff");
  for (const auto& [name, value] : more) response.set(name, value);
  response.keep_alive(keep_alive_);
  response.body() = std::move(body);
  response.prepare_payload();
  if (head_) response.body().clear();  // its length is told all the same
  std::ostringstream text;
  text << response;
  begun_ = ended_ = true;
  Push(std::move(text).str());
}

void HttpConnection::Begin(int64_t turn, const std::string& content_type) {
  if (turn != turn_ || begun_) return;
  http::response<http::empty_body> response(http::status::ok, 11);
  response.set(http::field::content_type, content_type);
  response.set(http::field::cache_control, "no-cache");
  response.set("X-Accel-Buffering", "no");  // proxies hand pieces on
  chunked_ = !old_;                         // an HTTP/1.0 client reads to the end
  response.keep_alive(keep_alive_);
  response.chunked(chunked_);
  events_ = absl::StartsWith(content_type, "text/event-stream");
  std::ostringstream text;
  text << response.base();
  begun_ = true;
  Push(std::move(text).str());
}

void HttpConnection::PushPiece(const std::string& piece) {
  Push(chunked_ ? absl::StrCat(absl::Hex(piece.size()), "\r\n", piece, "\r\n") : piece);
}

void HttpConnection::Write(int64_t turn, std::string piece) {
  const auto bytes = static_cast<int64_t>(piece.size());
  if (turn == turn_ && begun_ && !ended_ && !piece.empty() && !head_) PushPiece(piece);
  unsent_ -= bytes;
}

void HttpConnection::End(int64_t turn) {
  if (turn != turn_ || !begun_ || ended_) return;
  ended_ = true;
  if (chunked_ && !head_) return Push("0\r\n\r\n");
  if (out_.empty()) Next();
}

bool HttpConnection::Announce(size_t bytes) {
  if ((unsent_ += static_cast<int64_t>(bytes)) <= kMostUnsent) return true;
  if (!gone_.exchange(true)) ++shared_->slow;
  shared_->Post([self = shared_from_this()] { self->Leave(); });
  return false;
}

void HttpConnection::Push(std::string bytes) {
  if (gone_) return;
  unsent_ += static_cast<int64_t>(bytes.size());
  out_.push_back(std::move(bytes));
  if (out_.size() == 1) Pump();
}

void HttpConnection::Pump() {
  SetDeadline(absl::ToChronoMilliseconds(shared_->config.patience));
  asio::async_write(socket_, asio::buffer(asio::buffer(out_.front()) + written_, kWriteBytes),
                    [self = shared_from_this()](error_code error, size_t bytes) {
                      if (error || self->gone_) return self->Leave();
                      self->Guarded([&] { self->Pumped(bytes); });
                    });
}

void HttpConnection::Pumped(size_t bytes) {
  written_ += bytes;
  if (written_ < out_.front().size()) return Pump();
  written_ = 0;
  unsent_ -= static_cast<int64_t>(out_.front().size());
  out_.pop_front();
  if (!out_.empty()) return Pump();
  if (state_ != State::kAnswering) return;  // 100 Continue
  deadline_.cancel();
  if (ended_) Next();
}

void HttpConnection::Next() {
  if (keep_alive_ && !gone_) return WaitForRequest();
  error_code ignored;
  socket_.shutdown(Socket::shutdown_send, ignored);
  SetState(State::kDraining);
  GivePlaceBack();
  SetDeadline(kDrainFor);
  Drain(kDrainBytes);
}

// What a client still sends is read for a moment, so that the kernel does not throw away the answer with it.
void HttpConnection::Drain(int64_t left) {
  buffer_.clear();
  socket_.async_read_some(buffer_.prepare(kReadBytes),
                          [self = shared_from_this(), left](error_code error, size_t bytes) {
                            const int64_t rest = left - static_cast<int64_t>(bytes);
                            if (error || rest <= 0) return self->Leave();
                            self->Drain(rest);
                          });
}

void HttpConnection::Leave() {
  gone_ = true;  // what is in out_ may be on its way: its write ends first
  GivePlaceBack();
  deadline_.cancel();
  probe_.cancel();
  error_code ignored;
  socket_.close(ignored);
}

}  // namespace carrel::http_api
