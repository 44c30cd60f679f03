#include "common/lab.h"

#include "absl/strings/str_cat.h"

namespace carrel {

bool HasLab() { return CARREL_LAB; }

absl::Status CheckLab(absl::string_view what) {
  if (HasLab()) return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat(what, " is in the lab; this carrel was built without CARREL_LAB"));
}

}  // namespace carrel
