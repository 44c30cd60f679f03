#include "serving/status_details.h"

#include <algorithm>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace carrel::serving {
namespace {

constexpr char kParam[] = "carrel/param", kCode[] = "carrel/code",
               kRetryAfter[] = "carrel/retry-after", kOfMachine[] = "carrel/of-machine";

}  // namespace

absl::Status WithDetail(absl::Status status, const char* url, absl::string_view value) {
  if (!status.ok() && !status.GetPayload(url).has_value()) {
    status.SetPayload(url, absl::Cord(value));
  }
  return status;
}

std::string DetailOf(const absl::Status& status, const char* url) {
  const auto found = status.GetPayload(url);
  return found.has_value() ? std::string(*found) : std::string();
}

absl::Status WithParam(absl::Status status, absl::string_view field) {
  return WithDetail(std::move(status), kParam, field);
}

std::string ParamOf(const absl::Status& status) { return DetailOf(status, kParam); }

absl::Status WithCode(absl::Status status, absl::string_view code) {
  return WithDetail(std::move(status), kCode, code);
}

std::string CodeOf(const absl::Status& status) { return DetailOf(status, kCode); }

absl::Status WithRetryAfter(absl::Status status, absl::Duration after) {
  return WithDetail(std::move(status), kRetryAfter,
                    absl::StrCat(std::max<int64_t>(1, absl::ToInt64Seconds(after))));
}

std::optional<absl::Duration> RetryAfterOf(const absl::Status& status) {
  int64_t seconds = 0;
  if (!absl::SimpleAtoi(DetailOf(status, kRetryAfter), &seconds)) return std::nullopt;
  return absl::Seconds(seconds);
}

absl::Status OfMachine(absl::Status status) {
  if (!absl::IsResourceExhausted(status)) return status;
  return WithDetail(std::move(status), kOfMachine, "1");
}

bool IsOfMachine(const absl::Status& status) { return status.GetPayload(kOfMachine).has_value(); }

}  // namespace carrel::serving
