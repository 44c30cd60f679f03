#include "http_api/api_error.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "common/json.h"
#include "common/resource_status.h"

namespace carrel::http_api {
namespace {

using nlohmann::json;

constexpr char kHttp[] = "carrel/http";

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
  if (int http = 0; absl::SimpleAtoi(serving::DetailOf(status, kHttp), &http)) {
    return {http, http < 500 ? "invalid_request_error" : "server_error"};
  }
  if (serving::IsOfMachine(status)) return {IsDiskFull(status) ? 507 : 503, "server_error"};
  return KindOf(status.code());
}

json TextOrNull(const std::string& text) { return text.empty() ? json() : json(text); }

json ErrorJson(const absl::Status& status) { return {{"error", JsonOfError(status)}}; }

}  // namespace

json JsonOfError(const absl::Status& status) {
  return {{"message", std::string(status.message())},
          {"type", KindOf(status).type},
          {"param", TextOrNull(ParamOf(status))},
          {"code", TextOrNull(serving::CodeOf(status))}};
}

absl::Status WithHttpStatus(absl::Status status, int http) {
  return serving::WithDetail(std::move(status), kHttp, absl::StrCat(http));
}

HttpError ErrorOf(const absl::Status& status) {
  HttpError error = {KindOf(status).status, DumpJson(ErrorJson(status)), {}};
  if (const auto after = serving::RetryAfterOf(status); after.has_value()) {
    error.fields.emplace_back("Retry-After", absl::StrCat(absl::ToInt64Seconds(*after)));
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
