#include "http_api/api_error.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/json.h"
#include "common/resource_status.h"

namespace carrel::http_api {
namespace {

using nlohmann::json;

constexpr char kParam[] = "carrel/param", kCode[] = "carrel/code", kHttp[] = "carrel/http",
               kRetryAfter[] = "carrel/retry-after";

absl::Status With(absl::Status status, const char* what, absl::string_view value) {
  if (!status.ok() && !status.GetPayload(what).has_value()) {
    status.SetPayload(what, absl::Cord(value));
  }
  return status;
}

std::string Said(const absl::Status& status, const char* what) {
  const auto found = status.GetPayload(what);
  return found.has_value() ? std::string(*found) : std::string();
}

struct ErrorKind {
  int status;
  const char* type;
};

ErrorKind KindOf(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kUnimplemented:
      return {400, "invalid_request_error"};
    case absl::StatusCode::kUnauthenticated:
      return {401, "authentication_error"};
    case absl::StatusCode::kPermissionDenied:
      return {403, "permission_error"};
    case absl::StatusCode::kNotFound:
      return {404, "not_found_error"};
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kAlreadyExists:
      return {409, "conflict_error"};
    case absl::StatusCode::kResourceExhausted:
      return {429, "rate_limit_error"};
    case absl::StatusCode::kUnavailable:
      return {503, "server_error"};
    case absl::StatusCode::kDeadlineExceeded:
      return {504, "server_error"};
    default:
      return {500, "server_error"};
  }
}

ErrorKind KindOf(const absl::Status& status) {
  ErrorKind kind = KindOf(status.code());
  if (int http = 0; absl::SimpleAtoi(Said(status, kHttp), &http)) {
    kind = {http, http < 500 ? "invalid_request_error" : "server_error"};
  }
  return kind;
}

json TextOrNull(const std::string& text) { return text.empty() ? json() : json(text); }

json ErrorJson(const absl::Status& status) { return {{"error", JsonOfError(status)}}; }

}  // namespace

json JsonOfError(const absl::Status& status) {
  return {{"message", std::string(status.message())},
          {"type", KindOf(status).type},
          {"param", TextOrNull(Said(status, kParam))},
          {"code", TextOrNull(Said(status, kCode))}};
}

absl::Status WithParam(absl::Status status, absl::string_view field) {
  return With(std::move(status), kParam, field);
}

absl::Status WithCode(absl::Status status, absl::string_view code) {
  return With(std::move(status), kCode, code);
}

absl::Status WithHttpStatus(absl::Status status, int http) {
  return With(std::move(status), kHttp, absl::StrCat(http));
}

absl::Status WithRetryAfter(absl::Status status, absl::Duration after) {
  return With(std::move(status), kRetryAfter,
              absl::StrCat(std::max<int64_t>(1, absl::ToInt64Seconds(after))));
}

absl::Status OfMachine(absl::Status status) {
  if (!absl::IsResourceExhausted(status)) return status;
  const int http = IsDiskFull(status) ? 507 : 503;
  return WithHttpStatus(std::move(status), http);
}

std::string ParamOf(const absl::Status& status) { return Said(status, kParam); }

HttpError ErrorOf(const absl::Status& status) {
  HttpError error = {KindOf(status).status, DumpJson(ErrorJson(status)), {}};
  if (const std::string after = Said(status, kRetryAfter); !after.empty()) {
    error.fields.emplace_back("Retry-After", after);
  }
  return error;
}

void SendError(HttpReply& reply, const absl::Status& status) {
  const HttpError error = ErrorOf(status);
  reply.Send(error.status, "application/json", error.body, error.fields);
}

std::string ErrorEvent(const absl::Status& status) {
  return absl::StrCat("data: ", DumpJson(ErrorJson(status)), "\n\n");
}

}  // namespace carrel::http_api
