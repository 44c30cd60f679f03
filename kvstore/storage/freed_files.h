// What:   the files of a context that is deleted, removed together. RocksDB removes one after another, and the kernel
//         gives back the pages of each meanwhile: 0.3 s of 0.8 GB. So each gets a second name before RocksDB removes its own,
//         and threads remove these.
// Errors: none: where a file gets no second name, it goes with RocksDB's.
// Cost:   eight threads at most, while files are removed.
// Edge:   what a crash leaves lies in a folder that Store removes when it opens.
#pragma once

#include <string>
#include <vector>

#include "absl/types/span.h"

namespace carrel::kvstore {

class FreedFiles {
 public:
  // Gives the files their second names, in `folder`, which is made.
  FreedFiles(absl::Span<const std::string> paths, std::string folder);
  ~FreedFiles();  // removes these, and the folder
  FreedFiles(const FreedFiles&) = delete;
  FreedFiles& operator=(const FreedFiles&) = delete;

 private:
  const std::string folder_;
  std::vector<std::string> names_;
};

}  // namespace carrel::kvstore
