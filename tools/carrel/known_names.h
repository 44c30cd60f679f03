// What: after an error of a context that is not there: the error with a few names of those that are, as far as
//       who asks may list them.
// Cost: none of what succeeds; else the store is opened and listed once.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "library/store_access.h"

namespace carrel::tools {

absl::Status WithNames(const absl::Status& status, const library::StoreAddress& store,
                       const std::string& wanted);

}  // namespace carrel::tools
