// What:   names of contexts that a server keeps unasked, because somebody said their text: [PREFIX]kept-WHO-DIGEST.
//         PREFIX is his tenant's, WHO twelve digits of the SHA-256 of his name, DIGEST those of the tokens'. They are
//         his: whatever globs others have, contexts of such names are not there for them (Principal::Sees). Of an older
//         kept-DIGEST nobody knows whose words it holds: it is there for administrators alone.
// Threads: any.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace carrel::kvstore {

// who: his name; empty: nobody's. digest: of 12 digits and more.
std::string KeptName(absl::string_view prefix, absl::string_view who, absl::string_view digest);
bool IsKept(absl::string_view context);
// Two of them that the same one keeps.
bool SameKeeper(absl::string_view kept, absl::string_view other);
// One that does not say whose it is.
bool IsNobodysKept(absl::string_view context);
// Whether its name does not say that it is his.
bool KeptByAnother(absl::string_view context, absl::string_view who);

}  // namespace carrel::kvstore
