// What:   HTTP/1.1 on TCP: requests whole, replies whole or in pieces as they come to be, each connection
//         one request after the other; a client that leaves is noticed while its reply is made.
// Source: Boost.Beast (decision 059).
// Errors: of Start: InvalidArgument an address; FailedPrecondition one that cannot be bound.
// Bounds: HttpServerConfig; headers 16 KiB. What exceeds them is answered 413, 431 or 503, or cut.
// Threads: one of the server's own; the handler is called on it and must not block. An HttpReply may be
//         used from any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace carrel::http_api {

struct HttpRequest {
  std::string method;  // "GET", ..
  std::string target;  // "/v1/models"
  std::string body;
  // Headers; empty: none.
  std::string authorization, content_type, content_encoding, host, origin, fetch_site;
  std::string peer;  // address
};

// More headers of an answer.
using HttpFields = std::vector<std::pair<std::string, std::string>>;

// The answer to one request: Send, or Begin, Write .. and End. Dropped without: 500.
class HttpReply {
 public:
  virtual ~HttpReply() = default;
  virtual void Send(int status, const std::string& content_type, const std::string& body,
                    const HttpFields& fields = {}) = 0;
  virtual void Begin(const std::string& content_type) = 0;  // status 200
  virtual void Write(const std::string& piece) = 0;
  virtual void End() = 0;
  virtual bool gone() const = 0;  // nobody reads it any more
};

using HttpHandler = std::function<void(HttpRequest, std::shared_ptr<HttpReply>)>;

struct HttpServerConfig {
  std::vector<std::string> listen;  // numeric "HOST:PORT" each; port 0: any free one
  int64_t max_connections = 1024;
  int64_t max_body_bytes = int64_t{64} << 20;
  absl::Duration idle = absl::Seconds(75);  // between requests
  absl::Duration patience =
      absl::Seconds(30);  // for a request to arrive, and for a piece to be taken
};

class HttpServer {
 public:
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const HttpServerConfig& config,
                                                           HttpHandler handler);
  virtual ~HttpServer() = default;  // as Stop
  // Cuts what is open; the handler is not called any more. An HttpReply may be used and let go of until
  // the server is destroyed.
  virtual void Stop() = 0;
  virtual const std::vector<std::string>& addresses() const = 0;  // with the ports that were bound
  virtual int64_t connections() const = 0;
};

}  // namespace carrel::http_api
