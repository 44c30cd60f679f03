#include "kvstore/storage/import_remains.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/strip.h"
#include "common/checksum.h"
#include "kvstore/storage/unfinished.h"

namespace carrel::kvstore {
namespace {

namespace fs = std::filesystem;

constexpr char kOfOwner[] = "of-", kLock[] = ".lock";

std::string LockOf(const ImportRemains& remains) { return remains.path + kLock; }

// By who holds its lock.
bool Remove(const ImportRemains& remains) {
  std::error_code error;
  fs::remove_all(remains.path, error);
  if (!error) fs::remove(LockOf(remains), error);
  return !error;
}

std::vector<std::string> PathsIn(const std::string& folder) {
  std::vector<std::string> paths;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    paths.push_back(it->path().string());
  }
  return paths;
}

bool IsOfOwner(const std::string& path) {
  return absl::StartsWith(fs::path(path).filename().string(), kOfOwner);
}

void EndPublishedOf(const std::string& folder,
                    absl::FunctionRef<bool(const std::string& id)> is_published) {
  for (const ImportRemains& remains : ListImportRemains(folder)) {
    if (is_published(fs::path(remains.path).filename().string())) Remove(remains);
  }
  for (const std::string& path : PathsIn(folder)) {  // of those that were removed half
    std::error_code ignored;
    if (absl::EndsWith(path, kLock) &&
        !fs::exists(std::string(absl::StripSuffix(path, kLock)), ignored)) {
      fs::remove(path, ignored);
    }
  }
}

}  // namespace

std::vector<ImportRemains> ListImportRemains(const std::string& folder) {
  std::vector<ImportRemains> all;
  for (const std::string& path : PathsIn(folder)) {
    std::error_code gone;
    if (IsOfOwner(path) || !fs::is_directory(path, gone)) continue;
    const FolderUse use = MeasureFolder(path);
    all.push_back({.path = path, .bytes = use.bytes, .touched = use.touched});
  }
  std::sort(all.begin(), all.end(),
            [](const ImportRemains& a, const ImportRemains& b) { return a.touched < b.touched; });
  return all;
}

RemovedRemains RemoveImportRemains(const std::string& folder, const RemainsLimits& limits,
                                   absl::Time now) {
  std::vector<std::pair<ImportRemains, FolderLock>> abandoned;  // whose locks we have
  int64_t bytes = 0;
  for (const ImportRemains& remains : ListImportRemains(folder)) {
    absl::StatusOr<FolderLock> lock = FolderLock::TakeFile(LockOf(remains));
    if (!lock.ok()) continue;
    bytes += remains.bytes;
    abandoned.emplace_back(remains, *std::move(lock));
  }
  RemovedRemains removed;
  for (const auto& [remains, lock] : abandoned) {
    if (now - remains.touched <= limits.age && bytes <= limits.bytes) break;  // oldest first
    if (!Remove(remains)) continue;
    bytes -= remains.bytes;
    ++removed.imports;
    removed.bytes += remains.bytes;
  }
  return removed;
}

RemovedRemains RemoveOldImportRemains(const std::string& imports, absl::Duration age,
                                      absl::Time now) {
  RemovedRemains removed = RemoveImportRemains(imports, {.age = age}, now);
  for (const std::string& path : PathsIn(imports)) {
    if (!IsOfOwner(path)) continue;
    const RemovedRemains of_owner = RemoveImportRemains(path, {.age = age}, now);
    removed.imports += of_owner.imports;
    removed.bytes += of_owner.bytes;
  }
  return removed;
}

void EndPublishedImports(const std::string& imports,
                         absl::FunctionRef<bool(const std::string& id)> is_published) {
  EndPublishedOf(imports, is_published);
  for (const std::string& path : PathsIn(imports)) {
    if (IsOfOwner(path)) EndPublishedOf(path, is_published);
  }
}

std::string ImportsFolderOf(const std::string& imports, const std::string& owner) {
  if (owner.empty()) return imports;
  return absl::StrCat(imports, "/", kOfOwner, Sha256Hex(owner).substr(0, 32));
}

}  // namespace carrel::kvstore
