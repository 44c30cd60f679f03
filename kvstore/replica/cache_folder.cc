#include "kvstore/replica/cache_folder.h"

#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "carrel/v1/context.pb.h"
#include "common/file.h"
#include "common/shown.h"
#include "common/status.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {

absl::Status ClaimCacheFolder(const std::string& folder, const std::string& uri,
                              const Store& store) {
  const std::string path = folder + "/replica-of";
  const absl::StatusOr<std::string> marked = ReadFile(path);
  if (marked.ok()) {
    const std::string of(absl::StripAsciiWhitespace(*marked));
    if (of == uri) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("cache ", folder, " holds contexts of ", Shown(of), ", not of ", Shown(uri)));
  }
  if (!absl::IsNotFound(marked.status())) return marked.status();
  std::vector<absl::Status> unreadable;
  ASSIGN_OR_RETURN(const std::vector<v1::Manifest> here, store.List(&unreadable));
  if (!here.empty() || !unreadable.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "cache ", folder, " is a store with contexts of its own, which a replica would remove: ",
        "give a folder that is empty or not there yet"));
  }
  return WriteFileAtomically(path, absl::StrCat(uri, "\n"));
}

}  // namespace carrel::kvstore
