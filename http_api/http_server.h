// What:   HTTP/1.1 and 1.0 on TCP and Unix sockets: requests whole, replies whole or in pieces as they come to be,
//         each connection one request after the other; a client that leaves is noticed while its reply is made.
//         What a request is about is judged by its headers, before its body is read.
// Source: RFC 9110, RFC 9112; Boost.Beast parses (decision 059), kvstore's listener accepts (decision 038).
// Errors: of Start: those of the listener; InvalidArgument an address; FailedPrecondition one that cannot be bound.
// Bounds: HttpServerConfig; headers 16 KiB in 10 s; a body what the gate allows, in `patience` and a second for each
//         16 KiB; 64 KiB of a reply are taken in `patience`; a client that leaves 1 MiB of a stream unread is left;
//         one that waits for its answer and shuts its sending side down has it (a half-close), one that is gone is
//         noticed at once, of HTTP/1.0 within a minute. Bodies and replies are charged to one budget. Beyond
//         max_connections the one that keeps the server waiting for the longest goes; answers that may take long have
//         seven eighths of them, and one more is refused. What exceeds a bound is answered 413, 431 or 503 with a
//         reason, or cut.
// Threads: one of the server's own; gate and handler are called on it and must not block. What they throw is that
//         request's 500. An HttpReply may be used from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "http_api/http_message.h"

namespace carrel::http_api {

// More headers of an answer.
using HttpFields = std::vector<std::pair<std::string, std::string>>;

struct HttpRequest {
  std::string method;  // "GET", ..
  std::string target;  // as it came
  HttpTarget at;       // the same, understood
  std::string body;
  // Headers; empty: none.
  std::string authorization, content_type, content_encoding, host, origin;
  std::string fetch_site, fetch_mode, fetch_dest;  // Sec-Fetch-..: what a browser says of it
  std::string peer;                                // address
  bool local = false;                              // over a Unix socket
  std::optional<uint32_t> uid;                     // of the process at its other end
  int64_t id = 0;                                  // of this request, for logs
  std::shared_ptr<void> passed;                    // what the gate gave
  std::shared_ptr<void> held;                      // the body's place in the budget
};

// The answer to one request: Send, or Begin, Write .. and End. Dropped without: 500.
class HttpReply {
 public:
  virtual ~HttpReply() = default;
  virtual void Send(int status, const std::string& content_type, const std::string& body,
                    const HttpFields& fields = {}) = 0;
  virtual void Begin(const std::string& content_type) = 0;  // status 200
  virtual void Write(const std::string& piece) = 0;
  virtual void End() = 0;
  virtual bool gone() const = 0;  // the client has left
};

// What becomes of a request whose headers have come.
struct HttpVerdict {
  int64_t max_body_bytes = 0;
  bool may_take_long = false;  // its answer; an eighth of the connections is left to others
  std::shared_ptr<void> passed;
  // Not 0: it is refused with this answer, and its body is not read.
  int status = 0;
  std::string content_type, body;
  HttpFields fields;
};

using HttpGate = std::function<HttpVerdict(const HttpRequest& head)>;
using HttpHandler = std::function<void(HttpRequest, std::shared_ptr<HttpReply>)>;

struct HttpServerConfig {
  std::vector<std::string> listen;  // "HOST:PORT" (port 0: any free one) or "unix:PATH" each
  int64_t max_connections = 1024;   // that have said something
  int64_t budget_bytes = int64_t{256} << 20;
  uint32_t socket_mode = 0600;                  // of Unix sockets' files
  absl::Duration idle = absl::Seconds(75);      // between requests
  absl::Duration patience = absl::Seconds(30);  // for a body to arrive, and for a piece to be taken
};

class HttpServer {
 public:
  struct Counters {
    int64_t connections = 0;  // now, of those that have said something
    int64_t evicted = 0, slow = 0, refused_bytes = 0;
    int64_t held_bytes = 0;  // of the budget
  };

  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const HttpServerConfig& config,
                                                           HttpGate gate, HttpHandler handler);
  virtual ~HttpServer() = default;  // as Stop
  // Cuts what is open; the handler is not called any more. An HttpReply may be used and let go of until
  // the server is destroyed.
  virtual void Stop() = 0;
  virtual const std::vector<std::string>& addresses() const = 0;  // with the ports that were bound
  virtual Counters counters() const = 0;
};

}  // namespace carrel::http_api
