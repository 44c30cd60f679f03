// What: the name that somebody may have meant: "; did you mean NAME?", or nothing where none is near (a third of
//       the letters added, left out, changed or swapped).
// Cost: the product of the lengths, per name.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace carrel::tools {

std::string DidYouMean(absl::string_view given, const std::vector<std::string>& names,
                       absl::string_view before = "");

}  // namespace carrel::tools
