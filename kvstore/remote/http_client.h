// What:   one HTTP request and its reply, over connections that are kept. The only place that knows libcurl.
// Errors: Unavailable no connection, one that broke, or one on which nothing moved for a while;
//         DeadlineExceeded; PermissionDenied the server's certificate is not of the authorities; Cancelled;
//         ResourceExhausted a reply larger than its bound; what the sink returned. Each names method,
//         host and path, and never a query: signatures stand there.
// Edge:   a status of HTTP is no error here. Redirects are not followed: what is signed is for one host.
// Threads: any; each request has a connection of its own meanwhile.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kvstore/remote/signature.h"

namespace carrel::kvstore {

inline constexpr int64_t kMostReplyBytes = int64_t{16} << 20;

struct HttpRequest {
  std::string method;
  std::string url;
  NameValues headers;
  absl::string_view body;  // stays until the reply
  // Told the bytes of a reply of status 2xx as they come; null: they are kept in the reply.
  std::function<absl::Status(absl::string_view)> sink;
  int64_t most_bytes = kMostReplyBytes;  // of what is kept
  absl::Duration deadline = absl::Minutes(5);
  absl::Duration stall = absl::Seconds(30);  // without a byte
  const std::atomic<bool>* cancelled = nullptr;
};

struct HttpReply {
  int status = 0;
  NameValues headers;  // names in lower case
  std::string body;
  absl::string_view Header(absl::string_view name) const;  // empty: there is none
};

class HttpClient {
 public:
  // ca_file: PEM of the authorities to trust; empty: the system's. It is read by each connection.
  explicit HttpClient(std::string ca_file = "");

  absl::StatusOr<HttpReply> Send(const HttpRequest& request);

 private:
  using Handle = std::unique_ptr<void, void (*)(void*)>;  // libcurl's
  Handle Take();
  void GiveBack(Handle handle);

  const std::string ca_file_;
  absl::Mutex mu_;
  std::vector<Handle> idle_ ABSL_GUARDED_BY(mu_);
};

// Without query and fragment, for messages.
std::string ShownUrl(absl::string_view url);

}  // namespace carrel::kvstore
