#include "kvstore/storage/freed_files.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/file.h"
#include "common/thread_pool.h"

namespace carrel::kvstore {
namespace {

constexpr int64_t kThreads = 8;  // most of the time they wait for the disk

}  // namespace

FreedFiles::FreedFiles(absl::Span<const std::string> paths, std::string folder)
    : folder_(std::move(folder)) {
  if (!MakePrivateFolder(folder_).ok()) return;
  for (const std::string& path : paths) {
    std::string name = absl::StrCat(folder_, "/", names_.size());
    if (link(path.c_str(), name.c_str()) == 0) names_.push_back(std::move(name));
  }
}

FreedFiles::~FreedFiles() {
  const auto files = static_cast<int64_t>(names_.size());
  ThreadPool pool(static_cast<int>(std::clamp<int64_t>(files, 1, kThreads)) - 1);
  pool.ParallelFor(files, [&](int64_t i) { (void)unlink(names_[static_cast<size_t>(i)].c_str()); });
  (void)rmdir(folder_.c_str());
}

}  // namespace carrel::kvstore
