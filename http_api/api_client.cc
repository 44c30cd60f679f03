#include "http_api/api_client.h"

#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/json.h"
#include "common/routing.h"
#include "common/shown.h"
#include "common/status.h"

namespace carrel::http_api {
namespace {

constexpr size_t kMaxHead = 64 << 10, kMaxLine = 16 << 20, kMaxAnswer = 64 << 20,
                 kMaxMessage = 4000;
constexpr int kLookMs = 50;  // how often it is asked whether the answer is still wanted

// A connected socket that is read byte by byte, or in pieces.
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

  // More bytes at the end of buffer(); false: there are none.
  absl::StatusOr<bool> More() {
    for (;;) {
      RETURN_IF_ERROR(Wait(POLLIN));
      char bytes[16384];
      const ssize_t n = recv(fd_, bytes, sizeof(bytes), MSG_DONTWAIT);
      if (n > 0) buffer_.append(bytes, static_cast<size_t>(n));
      if (n > 0) return true;
      if (n == 0) return false;
      if (errno != EINTR && errno != EAGAIN) return BrokeOff();
    }
  }

  // Up to and without `end`, which goes too.
  absl::StatusOr<std::string> Until(const std::string& end, size_t most) {
    for (size_t from = 0;;) {
      const size_t at = buffer_.find(end, from);
      if (at != std::string::npos) {
        std::string before = buffer_.substr(0, at);
        buffer_.erase(0, at + end.size());
        return before;
      }
      if (buffer_.size() > most) return absl::DataLossError("the answer is not HTTP");
      from = buffer_.size() < end.size() ? 0 : buffer_.size() - end.size();
      ASSIGN_OR_RETURN(const bool more, More());
      if (!more) return BrokeOff();
    }
  }

  std::string& buffer() { return buffer_; }
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
  std::string buffer_;
};

struct Head {
  int status = 0;
  bool chunked = false;
  int64_t length = -1;  // -1: to the end of the connection
};

absl::StatusOr<Head> ReadHead(Connection& connection) {
  ASSIGN_OR_RETURN(const std::string text, connection.Until("\r\n\r\n", kMaxHead));
  Head head;
  if (text.size() < 12 || !absl::StartsWith(text, "HTTP/1.") ||
      !absl::SimpleAtoi(text.substr(9, 3), &head.status)) {
    return absl::DataLossError("the answer is not HTTP");
  }
  const std::string lower = absl::AsciiStrToLower(text);
  head.chunked = absl::StrContains(lower, "\r\ntransfer-encoding: chunked");
  const std::string length_name = "\r\ncontent-length:";
  if (const size_t at = lower.find(length_name); at != std::string::npos) {
    const absl::string_view rest = absl::string_view(lower).substr(at + length_name.size());
    if (!absl::SimpleAtoi(absl::StripAsciiWhitespace(rest.substr(0, rest.find('\r'))),
                          &head.length)) {
      return absl::DataLossError("the answer is not HTTP");
    }
  }
  return head;
}

using Sink = absl::FunctionRef<absl::Status(absl::string_view)>;

absl::Status ReadPart(Connection& connection, int64_t bytes, Sink sink) {
  while (bytes > 0) {
    std::string& buffer = connection.buffer();
    if (buffer.empty()) {
      ASSIGN_OR_RETURN(const bool more, connection.More());
      if (!more) return Connection::BrokeOff();
    }
    const size_t n = std::min(buffer.size(), static_cast<size_t>(bytes));
    RETURN_IF_ERROR(sink(absl::string_view(buffer).substr(0, n)));
    buffer.erase(0, n);
    bytes -= static_cast<int64_t>(n);
  }
  return absl::OkStatus();
}

absl::Status ReadBody(Connection& connection, const Head& head, Sink sink) {
  if (!head.chunked && head.length >= 0) return ReadPart(connection, head.length, sink);
  if (!head.chunked) {
    for (;;) {
      RETURN_IF_ERROR(sink(std::exchange(connection.buffer(), "")));
      ASSIGN_OR_RETURN(const bool more, connection.More());
      if (!more) return absl::OkStatus();
    }
  }
  for (;;) {
    ASSIGN_OR_RETURN(const std::string size, connection.Until("\r\n", kMaxHead));
    uint64_t bytes = 0;
    if (!absl::SimpleHexAtoi(size.substr(0, size.find(';')), &bytes) || bytes > (1u << 30)) {
      return absl::DataLossError("the answer is not HTTP");
    }
    RETURN_IF_ERROR(ReadPart(connection, static_cast<int64_t>(bytes), sink));
    RETURN_IF_ERROR(connection.Until("\r\n", kMaxHead).status());
    if (bytes == 0) return absl::OkStatus();
  }
}

absl::StatusCode CodeOf(int status) {
  switch (status) {
    case 400:
      return absl::StatusCode::kInvalidArgument;
    case 401:
      return absl::StatusCode::kUnauthenticated;
    case 403:
      return absl::StatusCode::kPermissionDenied;
    case 404:
      return absl::StatusCode::kNotFound;
    case 409:
      return absl::StatusCode::kFailedPrecondition;
    case 429:
      return absl::StatusCode::kResourceExhausted;
    case 413:
    case 415:
      return absl::StatusCode::kInvalidArgument;
    case 503:
      return absl::StatusCode::kUnavailable;
    case 504:
      return absl::StatusCode::kDeadlineExceeded;
    default:
      return absl::StatusCode::kInternal;
  }
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
  ASSIGN_OR_RETURN(const Head head, ReadHead(connection));
  if (head.status / 100 == 2) return ReadBody(connection, head, sink);
  std::string refusal;
  const absl::Status read = ReadBody(connection, head, [&](absl::string_view piece) {
    absl::StrAppend(&refusal, piece);
    return refusal.size() < kMaxHead ? absl::OkStatus() : Connection::BrokeOff();
  });
  if (!read.ok() && !absl::IsDataLoss(read)) return read;
  return absl::Status(CodeOf(head.status), MessageOf(refusal, head.status));
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
