#include "retrieval/errors.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/shown.h"
#include "common/status.h"

namespace carrel::retrieval {

std::string Describe(const OpenRequest& open) {
  return absl::StrCat("open context ", Shown(open.context));
}
std::string DescribeQuery(Layer layer) { return absl::StrCat("query layer ", layer.value()); }
std::string Describe(const Fetch& fetch) {
  return absl::StrCat("fetch rows of layer ", fetch.layer.value());
}

absl::Status AnnotateOnce(const absl::Status& status, absl::string_view what) {
  return absl::StartsWith(status.message(), what) ? status : Annotate(status, what);
}

absl::Status NothingToCome(RequestId id) {
  return absl::FailedPreconditionError(
      absl::StrCat("request ", id, " was not sent, was forgotten, or has been read wholly"));
}

}  // namespace carrel::retrieval
