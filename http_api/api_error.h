// What:   statuses as HTTP's and OpenAI's errors: status, type, message, param, code. What a code of absl's does
//         not say (which field it is about, another HTTP status, when to come again) travels with the status.
// Source: OpenAI's API reference, errors.
// Threads: any.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "http_api/http_server.h"
#include "nlohmann/json_fwd.hpp"

namespace carrel::http_api {

// Codes that clients look for.
inline constexpr char kContextLengthExceeded[] = "context_length_exceeded";

// OK stays OK; what is already said stays.
absl::Status WithParam(absl::Status status, absl::string_view field);
absl::Status WithCode(absl::Status status, absl::string_view code);
// For what has no code of its own: 413, 415, 507.
absl::Status WithHttpStatus(absl::Status status, int http);
absl::Status WithRetryAfter(absl::Status status, absl::Duration after);
// Of work that no rate, queue or quota of a caller's bounds: ResourceExhausted is the machine's, a full disk 507,
// anything else (memory, descriptors) 503. Other statuses stay.
absl::Status OfMachine(absl::Status status);

// One message of a chat, or one field: "messages[3]".
std::string ParamOf(const absl::Status& status);  // empty: none

struct HttpError {
  int status = 500;
  std::string body;   // JSON in OpenAI's form
  HttpFields fields;  // Retry-After
};
HttpError ErrorOf(const absl::Status& status);
nlohmann::json JsonOfError(const absl::Status& status);  // what stands in "error"
void SendError(HttpReply& reply, const absl::Status& status);
// As a server-sent event, with its end.
std::string ErrorEvent(const absl::Status& status);

}  // namespace carrel::http_api
