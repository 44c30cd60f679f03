// What: the name that somebody may have meant; and, after an error of a context that is not there, the error with a few
//       names of those that are, as far as who asks may list them.
// Cost: none of what succeeds; else the store is opened and listed once.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "library/store_access.h"

namespace carrel::tools {

absl::Status WithNames(const absl::Status& status, const library::StoreAddress& store,
                       const std::string& wanted);

// "; did you mean NAME?", or nothing where none is near (a third of the letters added, left out, changed or swapped).
// The product of the lengths, per name.
std::string DidYouMean(absl::string_view given, const std::vector<std::string>& names,
                       absl::string_view before = "");

}  // namespace carrel::tools
