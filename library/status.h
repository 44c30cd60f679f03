// What: statuses of the inside as statuses of the library, and back.
#pragma once

#include <utility>

#include "absl/status/statusor.h"
#include "carrel/status.h"

namespace carrel::library {

Status ToPublic(const absl::Status& status);
absl::Status FromPublic(const Status& status);

// f returns absl::StatusOr<T> or absl::Status.
template <typename T>
Result<T> ToPublic(absl::StatusOr<T> value) {
  if (!value.ok()) return ToPublic(value.status());
  return *std::move(value);
}

}  // namespace carrel::library
