#include "http_api/api_client.h"

#include <boost/asio/connect.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/read.hpp>
#include <boost/beast/http/string_body.hpp>
#include <boost/beast/http/write.hpp>
#include <chrono>
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

namespace asio = boost::asio;
namespace http = boost::beast::http;
using asio::ip::tcp;

constexpr size_t kMaxHead = 64 << 10, kMaxLine = 16 << 20, kMaxAnswer = 64 << 20,
                 kMaxMessage = 4000;
// How often it is asked whether the answer is still wanted.
constexpr std::chrono::milliseconds kLook{50};

absl::Status BrokeOff() { return absl::DataLossError("the server's answer broke off"); }

using Sink = absl::FunctionRef<absl::Status(absl::string_view)>;
using Parser = http::response_parser<GrowingBody>;

// A connected socket.
class Connection {
 public:
  explicit Connection(const std::function<bool()>& wanted) : wanted_(wanted) {}

  absl::Status Connect(const std::string& host, const std::string& port) {
    boost::system::error_code error;
    const auto found = tcp::resolver(io_).resolve(host, port, error);
    if (error) return absl::UnavailableError(absl::StrCat("http://", host, ": ", error.message()));
    asio::connect(socket_, found, error);
    if (!error) return absl::OkStatus();
    return absl::UnavailableError(absl::StrCat("nobody answers at http://", host, ":", port, " (",
                                               error.message(), "): does carrel api run there?"));
  }

  absl::Status Send(const http::request<http::string_body>& request) {
    boost::system::error_code failed;
    http::async_write(socket_, request,
                      [&](const boost::system::error_code& error, size_t) { failed = error; });
    RETURN_IF_ERROR(Wait());
    return failed ? BrokeOff() : absl::OkStatus();
  }

  // All of the reply, whose body goes to the sink as it comes.
  absl::Status Read(Parser& parser, Sink sink) {
    parser.header_limit(kMaxHead);
    parser.body_limit(boost::none);  // the sink's to say
    parser.eager(true);
    for (boost::beast::flat_buffer buffer; !parser.is_done();) {
      boost::system::error_code failed;
      http::async_read_some(
          socket_, buffer, parser,
          [&](const boost::system::error_code& error, size_t) { failed = error; });
      RETURN_IF_ERROR(Wait());
      if (std::string piece = std::exchange(parser.get().body(), ""); !piece.empty()) {
        RETURN_IF_ERROR(sink(piece));
      }
      if (!failed) continue;
      const bool of_http =
          failed.category() == make_error_code(http::error::bad_version).category();
      const bool cut_off =
          failed == http::error::end_of_stream || failed == http::error::partial_message;
      return of_http && !cut_off ? absl::DataLossError("the answer is not HTTP") : BrokeOff();
    }
    return absl::OkStatus();
  }

 private:
  // Until what was begun has ended.
  absl::Status Wait() {
    for (io_.restart(); !io_.stopped(); io_.run_for(kLook)) {
      if (wanted_ && !wanted_()) return absl::CancelledError("nobody wants the answer any more");
    }
    return absl::OkStatus();
  }

  const std::function<bool()>& wanted_;
  asio::io_context io_;
  tcp::socket socket_{io_};
};

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
  http::request<http::string_body> request(body.empty() ? http::verb::get : http::verb::post,
                                           target, 11, body);
  request.set(http::field::host, address());
  request.set(http::field::connection, "close");
  if (!key_.empty()) request.set(http::field::authorization, absl::StrCat("Bearer ", key_));
  if (!context_.empty()) request.set(kContextHeader, ContextHeaderValue(context_));
  if (!body.empty()) {
    request.set(http::field::content_type, "application/json");
    request.prepare_payload();
  }
  RETURN_IF_ERROR(connection.Send(request));
  Parser parser;
  std::string refusal;
  const absl::Status read = connection.Read(parser, [&](absl::string_view piece) {
    if (parser.get().result_int() / 100 == 2) return sink(piece);
    absl::StrAppend(&refusal, piece);
    return refusal.size() < kMaxHead ? absl::OkStatus() : BrokeOff();
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
  return done ? absl::OkStatus() : BrokeOff();
}

}  // namespace carrel::http_api
