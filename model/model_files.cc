#include "model/model_files.h"

#include <utility>

#include "common/status.h"

namespace carrel::model {

ModelFilesWatch::ModelFilesWatch(ModelFiles files, std::function<std::string()> digest,
                                 std::string expected)
    : files_(std::move(files)), digest_(std::move(digest)), expected_(std::move(expected)) {
  for (const auto& file : files_) known_.push_back(file->opened_as());
}

absl::Status ModelFilesWatch::Check() const {
  absl::MutexLock lock(&mu_);
  std::vector<FileIdentity> now;
  const MappedFile* touched = nullptr;
  for (size_t i = 0; i < files_.size(); ++i) {
    RETURN_IF_ERROR(files_[i]->CheckReadable());
    ASSIGN_OR_RETURN(const FileIdentity& found, files_[i]->Identify());
    now.push_back(found);
    if (found == known_[i]) continue;
    FileIdentity but_for_change = found;
    but_for_change.changed_ns = known_[i].changed_ns;
    if (but_for_change != known_[i]) {
      return absl::DataLossError(
          absl::StrCat(files_[i]->path(), ": the checkpoint changed while it was read"));
    }
    touched = files_[i].get();
  }
  if (touched == nullptr) return absl::OkStatus();
  if (digest_() != expected_) {
    return absl::DataLossError(
        absl::StrCat(touched->path(), ": the checkpoint changed while it was read"));
  }
  known_ = std::move(now);
  for (const auto& file : files_) RETURN_IF_ERROR(file->CheckReadable());
  return absl::OkStatus();
}

}  // namespace carrel::model
