#include "http_api/api_client.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <boost/asio/buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/json.h"
#include "common/routing.h"
#include "common/shown.h"
#include "common/status.h"
#include "http_api/http_connection.h"

namespace carrel::http_api {
namespace {

namespace http = boost::beast::http;

constexpr size_t kMaxHead = 64 << 10, kMaxLine = 16 << 20, kMaxAnswer = 64 << 20,
                 kMaxMessage = 4000;
constexpr int kLookMs = 50;  // how often it is asked whether the answer is still wanted

// A connected socket.
class Connection {
 public:
  explicit Connection(const std::function<bool()>& wanted) : wanted_(wanted) {}
  ~Connection() {
    if (fd_ >= 0) close(fd_);
  }

  absl::Status Connect(const std::string& host, const std::string& port) {
    addrinfo hints = {}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    const int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &found);
    if (error != 0) {
      return absl::UnavailableError(absl::StrCat("http://", host, ": ", gai_strerror(error)));
    }
    int last = 0;
    for (const addrinfo* one = found; one != nullptr && fd_ < 0; one = one->ai_next) {
      fd_ = socket(one->ai_family, one->ai_socktype | SOCK_CLOEXEC, one->ai_protocol);
      if (fd_ >= 0 && connect(fd_, one->ai_addr, one->ai_addrlen) == 0) break;
      last = errno;
      if (fd_ >= 0) close(fd_);
      fd_ = -1;
    }
    freeaddrinfo(found);
    if (fd_ >= 0) return absl::OkStatus();
    return absl::UnavailableError(absl::StrCat("nobody answers at http://", host, ":", port, " (",
                                               strerror(last), "): does carrel api run there?"));
  }

  absl::Status Send(absl::string_view bytes) {
    while (!bytes.empty()) {
      RETURN_IF_ERROR(Wait(POLLOUT));
      const ssize_t n = send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n < 0 && errno != EINTR && errno != EAGAIN) return BrokeOff();
      if (n > 0) bytes.remove_prefix(static_cast<size_t>(n));
    }
    return absl::OkStatus();
  }

  // More bytes at the end of `to`; false: there are none.
  absl::StatusOr<bool> More(std::string& to) {
    for (;;) {
      RETURN_IF_ERROR(Wait(POLLIN));
      char bytes[16384];
      const ssize_t n = recv(fd_, bytes, sizeof(bytes), MSG_DONTWAIT);
      if (n > 0) to.append(bytes, static_cast<size_t>(n));
      if (n >= 0) return n > 0;
      if (errno != EINTR && errno != EAGAIN) return BrokeOff();
    }
  }

  static absl::Status BrokeOff() { return absl::DataLossError("the server's answer broke off"); }

 private:
  absl::Status Wait(short events) {
    for (;;) {
      if (wanted_ && !wanted_()) return absl::CancelledError("nobody wants the answer any more");
      pollfd one = {fd_, events, 0};
      const int n = poll(&one, 1, kLookMs);
      if (n > 0) return absl::OkStatus();
      if (n < 0 && errno != EINTR) return BrokeOff();
    }
  }

  const std::function<bool()>& wanted_;
  int fd_ = -1;
};

using Sink = absl::FunctionRef<absl::Status(absl::string_view)>;
using Parser = http::response_parser<GrowingBody>;

// All of the reply, whose body goes to the sink as it comes.
absl::Status Read(Connection& connection, Parser& parser, Sink sink) {
  parser.header_limit(kMaxHead);
  parser.body_limit(boost::none);  // the sink's to say
  parser.eager(true);
  for (std::string held; !parser.is_done();) {
    ASSIGN_OR_RETURN(const bool more, connection.More(held));
    boost::system::error_code error;
    if (more) {
      held.erase(0, parser.put(boost::asio::buffer(held), error));
      if (error && error != http::error::need_more) {
        return absl::DataLossError("the answer is not HTTP");
      }
    } else {
      if (parser.got_some()) parser.put_eof(error);  // the end of a body without a length
      if (error || !parser.is_done()) return Connection::BrokeOff();
    }
    if (std::string piece = std::exchange(parser.get().body(), ""); !piece.empty()) {
      RETURN_IF_ERROR(sink(piece));
    }
  }
  return absl::OkStatus();
}

absl::StatusCode CodeOf(int status) {
  static constexpr std::pair<int, absl::StatusCode> kCodes[] = {
      {400, absl::StatusCode::kInvalidArgument},    {401, absl::StatusCode::kUnauthenticated},
      {403, absl::StatusCode::kPermissionDenied},   {404, absl::StatusCode::kNotFound},
      {409, absl::StatusCode::kFailedPrecondition}, {413, absl::StatusCode::kInvalidArgument},
      {415, absl::StatusCode::kInvalidArgument},    {429, absl::StatusCode::kResourceExhausted},
      {503, absl::StatusCode::kUnavailable},        {504, absl::StatusCode::kDeadlineExceeded}};
  for (const auto& [known, code] : kCodes) {
    if (known == status) return code;
  }
  return absl::StatusCode::kInternal;
}

// In OpenAI's form, if it is that.
std::string MessageOf(const std::string& body, int status) {
  const auto said = ParseJson(body, "the server's answer", kMessageBounds);
  const auto* const message = said.ok() ? JsonAt(*said, {"error", "message"}) : nullptr;
  const std::string words = Shown(JsonText(message), kMaxMessage);
  return words.empty() ? absl::StrCat("the server answers with HTTP status ", status) : words;
}

}  // namespace

absl::StatusOr<ApiClient> ApiClient::Create(const std::string& url) {
  absl::string_view rest = url;
  if (!absl::ConsumePrefix(&rest, "http://")) {
    return absl::InvalidArgumentError(
        absl::StrCat("api=", url, ": must be http://HOST[:PORT]",
                     absl::StartsWith(url, "https:") ? "; TLS is not spoken here" : ""));
  }
  absl::ConsumeSuffix(&rest, "/");
  absl::ConsumeSuffix(&rest, "/v1");
  ApiClient client;
  const size_t colon = rest.rfind(':');
  const bool has_port = colon != absl::string_view::npos && rest.find(']', colon) == rest.npos;
  client.host_ = std::string(rest.substr(0, has_port ? colon : rest.size()));
  client.port_ = has_port ? std::string(rest.substr(colon + 1)) : "80";
  int port = 0;
  if (client.host_.empty() || absl::StrContains(rest, "/") ||
      !absl::SimpleAtoi(client.port_, &port) || port < 1 || port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat("api=", url, ": must be http://HOST[:PORT]"));
  }
  if (client.host_.front() == '[' && client.host_.back() == ']') {  // an IPv6 address
    client.host_ = client.host_.substr(1, client.host_.size() - 2);
  }
  return client;
}

std::string ApiClient::address() const {
  const bool ipv6 = absl::StrContains(host_, ":");
  return absl::StrCat(ipv6 ? "[" : "", host_, ipv6 ? "]:" : ":", port_);
}

absl::Status ApiClient::Exchange(const std::string& target, const std::string& body,
                                 Sink sink) const {
  Connection connection(wanted_);
  RETURN_IF_ERROR(connection.Connect(host_, port_));
  std::string request = absl::StrCat(body.empty() ? "GET " : "POST ", target,
                                     " HTTP/1.1\r\nHost: ", address(), "\r\nConnection: close\r\n");
  if (!key_.empty()) absl::StrAppend(&request, "Authorization: Bearer ", key_, "\r\n");
  if (!context_.empty()) {
    absl::StrAppend(&request, kContextHeader, ": ", ContextHeaderValue(context_), "\r\n");
  }
  if (!body.empty()) {
    absl::StrAppend(&request, "Content-Type: application/json\r\nContent-Length: ", body.size(),
                    "\r\n");
  }
  RETURN_IF_ERROR(connection.Send(absl::StrCat(request, "\r\n", body)));
  Parser parser;
  std::string refusal;
  const absl::Status read = Read(connection, parser, [&](absl::string_view piece) {
    if (parser.get().result_int() / 100 == 2) return sink(piece);
    absl::StrAppend(&refusal, piece);
    return refusal.size() < kMaxHead ? absl::OkStatus() : Connection::BrokeOff();
  });
  const int status = parser.is_header_done() ? static_cast<int>(parser.get().result_int()) : 0;
  if (status == 0 || status / 100 == 2 || (!read.ok() && !absl::IsDataLoss(read))) return read;
  return absl::Status(CodeOf(status), MessageOf(refusal, status));
}

absl::StatusOr<std::string> ApiClient::Call(const std::string& target,
                                            const std::string& body) const {
  std::string answer;
  RETURN_IF_ERROR(Exchange(target, body, [&](absl::string_view piece) {
    absl::StrAppend(&answer, piece);
    if (answer.size() <= kMaxAnswer) return absl::OkStatus();
    return absl::DataLossError(
        absl::StrCat("the server's answer has more than ", kMaxAnswer, " bytes"));
  }));
  return answer;
}

absl::Status ApiClient::Stream(const std::string& target, const std::string& body,
                               absl::FunctionRef<absl::Status(absl::string_view)> event) const {
  std::string held;
  bool done = false;
  RETURN_IF_ERROR(Exchange(target, body, [&](absl::string_view piece) -> absl::Status {
    size_t from = held.empty() ? 0 : held.size() - 1;
    absl::StrAppend(&held, piece);
    for (size_t end; (end = held.find("\n\n", from)) != std::string::npos; from = 0) {
      const std::string one = held.substr(0, end);
      held.erase(0, end + 2);
      absl::string_view data = one;
      if (!absl::ConsumePrefix(&data, "data: ")) continue;  // a comment: somebody still works
      if (data == "[DONE]") {
        done = true;
      } else {
        RETURN_IF_ERROR(event(data));
      }
    }
    if (held.size() > kMaxLine) return absl::DataLossError("the answer is not a stream of events");
    return absl::OkStatus();
  }));
  return done ? absl::OkStatus() : Connection::BrokeOff();
}

}  // namespace carrel::http_api
