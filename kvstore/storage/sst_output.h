// What:   where RocksDB's SstFileWriter puts its bytes: a file of ours. Debian's RocksDB aborts on
//         a write that fails, so it never hears of one: the first failure is kept, later bytes go
//         nowhere, and whoever writes asks for status().
// Errors: ResourceExhausted disk full, quota or limit on file size; as ErrnoStatus, naming the
//         path.
// Threads: one writer.
// Cost:   no copy. What was written begins its way to the disk at once, so that the sync at the end
//         finds little to wait for.
#pragma once

#include <memory>

#include "absl/status/status.h"

namespace rocksdb {
class Env;
}

namespace carrel::kvstore {

class SstOutput {
 public:
  SstOutput();
  ~SstOutput();
  // What SstFileWriter is to be opened with; lives as long as this.
  rocksdb::Env* env() const { return env_.get(); }
  // Of all that was written, synced and closed so far.
  absl::Status status() const;

 private:
  class Files;
  std::shared_ptr<Files> files_;
  std::unique_ptr<rocksdb::Env> env_;
};

}  // namespace carrel::kvstore
