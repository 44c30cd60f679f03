#include "decoder/client/store_client_replies.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "carrel/v1/retrieval.pb.h"
#include "common/routing.h"
#include "common/shown.h"
#include "common/status.h"

namespace carrel::decoder {

std::string Describe(const v1::SessionRequest& request) {
  switch (request.request_case()) {
    case v1::SessionRequest::kOpen:
      return absl::StrCat("open context ", Shown(request.open().context()));
    case v1::SessionRequest::kFetchRows:
      return absl::StrCat("fetch rows of layer ", request.fetch_rows().layer());
    default:
      return absl::StrCat("query layer ", request.query().layer());
  }
}

absl::Status AnnotateOnce(const absl::Status& status, absl::string_view what) {
  return absl::StartsWith(status.message(), what) ? status : Annotate(status, what);
}

bool Answered(const absl::Status& status) { return status.GetPayload(kAnsweredUrl).has_value(); }

absl::StatusOr<v1::SessionReply> TakeReply(v1::SessionReply reply, absl::string_view what) {
  if (!reply.has_error()) return reply;
  const auto code = static_cast<absl::StatusCode>(reply.error().code());
  return absl::Status(code == absl::StatusCode::kOk ? absl::StatusCode::kUnknown : code,
                      absl::StrCat(what, ": ", reply.error().message()));
}

absl::StatusOr<v1::OpenReply> TakeOpenReply(v1::SessionReply reply, absl::string_view what) {
  if (reply.has_open() && reply.last()) return std::move(*reply.mutable_open());
  return absl::DataLossError(absl::StrCat(what, ": the store answered with something else"));
}

absl::Status NothingToCome(RequestId id) {
  return absl::FailedPreconditionError(
      absl::StrCat("request ", id, " was not sent, was forgotten, or has been read wholly"));
}

}  // namespace carrel::decoder
