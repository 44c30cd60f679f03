#include "library/status.h"

#include <string>

namespace carrel::library {

// Both enumerations are google.rpc.Code.
Status ToPublic(const absl::Status& status) {
  if (status.ok()) return {};
  return {static_cast<StatusCode>(status.raw_code()), std::string(status.message())};
}

absl::Status FromPublic(const Status& status) {
  return {static_cast<absl::StatusCode>(status.code()), status.message()};
}

}  // namespace carrel::library
