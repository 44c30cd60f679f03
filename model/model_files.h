// What:   the mapped files that a checkpoint's tensors lie in, and whether they are still what they
//         were when they were mapped: weights are read from the mapping until the last token.
// Errors: DataLoss names the file: it was written to, or cannot be read any more.
// Cost:   Check is an fstat per file. Where a file's time of change alone differs (it was linked,
//         renamed or given other rights, or written to by who sets times back), all is hashed again,
//         once per change.
// Threads: any.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "common/mapped_file.h"

namespace carrel::model {

using ModelFiles = std::vector<std::shared_ptr<const MappedFile>>;

class ModelFilesWatch {
 public:
  // digest: of all bytes that are used of the files, by reading them; `expected`: what it was.
  ModelFilesWatch(ModelFiles files, std::function<std::string()> digest, std::string expected);

  // OK: whatever was read of the files from their mapping until now is what was hashed.
  absl::Status Check() const;

 private:
  const ModelFiles files_;
  const std::function<std::string()> digest_;
  const std::string expected_;
  mutable absl::Mutex mu_;
  mutable std::vector<FileIdentity> known_ ABSL_GUARDED_BY(mu_);  // as files_
};

}  // namespace carrel::model
