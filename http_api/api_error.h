// What:   statuses as HTTP's and OpenAI's errors: status, type, message, param, code. What a code of absl's does
//         not say (which field it is about, another HTTP status, when to come again) travels with the status
//         (serving/status_details.h). What the machine lacks is 507 (a full disk) or 503 (anything else).
// Source: OpenAI's API reference, errors.
// Threads: any.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "http_api/http_server.h"
#include "nlohmann/json_fwd.hpp"
#include "serving/status_details.h"

namespace carrel::http_api {

using serving::kContextLengthExceeded;
using serving::ParamOf;
using serving::WithCode;
using serving::WithParam;
using serving::WithRetryAfter;

// For what has no code of its own: 413, 415. OK stays OK; what is already said stays.
absl::Status WithHttpStatus(absl::Status status, int http);

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
