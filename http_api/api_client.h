// What:   a client of a running `carrel api`, for the program itself: requests as JSON, answers whole or as
//         they come.
// Errors: InvalidArgument a URL that is none of HTTP; Unavailable no server answers; what the server
//         refuses, by its words; DataLoss an answer that breaks off, or is longer than 64 MiB; Cancelled.
// Trust:  none in what a server sends: all is bounded, and parsed with bounds.
// Threads: one. Each call has a connection of its own.
#pragma once

#include <functional>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace carrel::http_api {

class ApiClient {
 public:
  // url: http://HOST[:PORT], with or without /v1.
  static absl::StatusOr<ApiClient> Create(const std::string& url);
  // Presented to the server, in the clear.
  void set_key(std::string key) { key_ = std::move(key); }
  // The context that is asked, for proxies that choose a server by it (common/routing.h); empty: nothing.
  void set_context(std::string context) { context_ = std::move(context); }
  // Asked several times a second while the server is waited for; false: Cancelled. null: always.
  void set_wanted(std::function<bool()> wanted) { wanted_ = std::move(wanted); }
  std::string address() const;  // HOST:PORT

  // The body of the answer. body: empty: GET, otherwise POST.
  absl::StatusOr<std::string> Call(const std::string& target, const std::string& body) const;
  // Each server-sent event's data as it comes, up to [DONE]; an error of `event` ends it.
  absl::Status Stream(const std::string& target, const std::string& body,
                      absl::FunctionRef<absl::Status(absl::string_view data)> event) const;

 private:
  absl::Status Exchange(const std::string& target, const std::string& body,
                        absl::FunctionRef<absl::Status(absl::string_view piece)> sink) const;

  std::string host_, port_, key_, context_;
  std::function<bool()> wanted_;
};

}  // namespace carrel::http_api
