// Objects behind URLs that somebody presigned.
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kvstore/remote/s3_client.h"

namespace carrel::kvstore {
namespace {

// The query of the URL is as good as a key: it is in no message.
absl::StatusOr<HttpReply> Send(HttpClient& http, const HttpRequest& request,
                               const RetryPolicy& policy) {
  Retry retry(policy);
  for (;;) {
    absl::StatusOr<HttpReply> reply = http.Send(request);
    const bool broke = absl::IsUnavailable(reply.status());
    const bool later = reply.ok() && (reply->status >= 500 || reply->status == 429);
    if ((broke || later) && retry.Wait()) continue;
    RETURN_IF_ERROR(reply.status());
    if (reply->status >= 200 && reply->status < 300) return reply;
    const S3Error error = ReadS3Error(reply->body);
    const std::string what = absl::StrCat(ShownUrl(request.url), ": ", request.method, ": HTTP ",
                                          reply->status, error.code.empty() ? "" : " ", error.code,
                                          " (a presigned URL is for one "
                                          "method and object, and for a while)");
    if (reply->status == 404) return absl::NotFoundError(what);
    if (reply->status == 412) return absl::AlreadyExistsError(what);
    if (later) return absl::UnavailableError(what);
    return absl::PermissionDeniedError(what);
  }
}

}  // namespace

absl::StatusOr<std::string> ReadPresigned(HttpClient& http, const std::string& url,
                                          int64_t most_bytes, const RetryPolicy& retry) {
  ASSIGN_OR_RETURN(HttpReply reply,
                   Send(http, {.method = "GET", .url = url, .most_bytes = most_bytes}, retry));
  return std::move(reply.body);
}

absl::Status PutPresigned(HttpClient& http, const std::string& url, absl::string_view bytes,
                          const RetryPolicy& retry) {
  return Send(http, {.method = "PUT", .url = url, .body = bytes}, retry).status();
}

}  // namespace carrel::kvstore
