// What:   bytes that are given as a text, taken as UTF-8. UTF-16 and UTF-32 that say so by a byte order
//         mark are converted, and UTF-8's mark is left out. What is no text (a PDF, an archive, a picture,
//         NULs, another encoding) is refused by its name, with the command that makes a text of it.
//         A text in a markup language is a text, and is remarked on.
// Errors: InvalidArgument; offsets are those of the bytes as they were given.
// Threads: any.    Cost: the text once.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace carrel::library {

struct GivenText {
  std::string text;    // valid UTF-8 without NULs and without a byte order mark
  std::string remark;  // for people: why it may not be what they mean; mostly empty
};

// file: as the command names it; empty: "FILE". then: what follows in the command, such as
// " | carrel prefill --input -"; empty: " > FILE.txt".
absl::StatusOr<GivenText> TakeText(std::string bytes, absl::string_view file = "",
                                   absl::string_view then = "");

}  // namespace carrel::library
