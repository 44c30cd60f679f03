// What:   what interrupted imports left in a folder of imports (context_import.h), and how it goes
//         again: too old, or in the way of what its owner brings.
// Threads: any; also beside imports of other processes: whoever works on a context's files holds its
//         lock.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace carrel::kvstore {

struct ImportRemains {
  std::string path;  // FOLDER/ID
  int64_t bytes = 0;
  absl::Time touched;  // when something was last written
};

// Of one owner, oldest first. What an import works on just now is among them.
std::vector<ImportRemains> ListImportRemains(const std::string& folder);

struct RemainsLimits {
  absl::Duration age = absl::InfiniteDuration();
  int64_t bytes = std::numeric_limits<int64_t>::max();  // of all that nobody works on
};

struct RemovedRemains {
  int64_t imports = 0;
  int64_t bytes = 0;
};

// Removes, of one owner, what is older, and the oldest until the rest is within the bytes. What
// somebody works on stays and does not count.
RemovedRemains RemoveImportRemains(const std::string& folder, const RemainsLimits& limits,
                                   absl::Time now = absl::Now());
// By age, of every owner below the folder of all imports.
RemovedRemains RemoveOldImportRemains(const std::string& imports, absl::Duration age,
                                      absl::Time now = absl::Now());

// What an import left that ended with its process when its context, of that id, was published: no
// import goes on with it. By who opens the store for writing: nobody else works on imports then.
void EndPublishedImports(const std::string& imports,
                         absl::FunctionRef<bool(const std::string& id)> is_published);

// The folder of an owner's imports below that of all; empty: of who has none.
std::string ImportsFolderOf(const std::string& imports, const std::string& owner);

}  // namespace carrel::kvstore
