// What:   a file of a store that only takes room, so that who deletes a context on a full disk has
//         some: it is freed first, and made again when the disk has room.
// Errors: none: without it a store works, but on a full disk.
// Threads: one at a time.
#pragma once

#include <cstdint>
#include <string>

namespace carrel::kvstore {

class Ballast {
 public:
  // More than RocksDB writes when it opens and when a context is deleted.
  static constexpr int64_t kBytes = int64_t{1} << 20;

  explicit Ballast(const std::string& folder) : path_(folder + "/ballast") {}

  // Makes it, as large as there is room for and it can be of use, or leaves it.
  void Make() const;
  // Whether there was one.
  bool Free() const;

 private:
  const std::string path_;
};

}  // namespace carrel::kvstore
