#include "kvstore/storage/sst_output.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <utility>

#include "common/file.h"
#include "common/status.h"
#include "rocksdb/env.h"
#include "rocksdb/file_system.h"

namespace carrel::kvstore {
namespace {

using rocksdb::IODebugContext;
using rocksdb::IOOptions;
using rocksdb::IOStatus;

// Bytes after which the kernel is asked to begin writing them.
constexpr int64_t kBeginWriting = int64_t{8} << 20;

class OutputFile final : public rocksdb::FSWritableFile {
 public:
  OutputFile(std::string path, int fd, absl::Status* status)
      : path_(std::move(path)), fd_(fd), status_(*status) {}
  ~OutputFile() override { CloseOnce(); }

  using FSWritableFile::Append;
  IOStatus Append(const rocksdb::Slice& data, const IOOptions&, IODebugContext*) override {
    if (status_.ok()) {
      status_.Update(WriteAll(fd_, {data.data(), data.size()}, At("write")));
    }
    bytes_ += static_cast<int64_t>(data.size());
    if (bytes_ - begun_ >= kBeginWriting && status_.ok()) {
      sync_file_range(fd_, begun_, bytes_ - begun_, SYNC_FILE_RANGE_WRITE);  // a hint
      begun_ = bytes_;
    }
    return IOStatus::OK();
  }

  IOStatus Flush(const IOOptions&, IODebugContext*) override { return IOStatus::OK(); }

  IOStatus Sync(const IOOptions&, IODebugContext*) override {
    if (status_.ok() && fsync(fd_) != 0) Fail("fsync");
    return IOStatus::OK();
  }

  IOStatus Close(const IOOptions&, IODebugContext*) override {
    CloseOnce();
    return IOStatus::OK();
  }

  uint64_t GetFileSize(const IOOptions&, IODebugContext*) override {
    return static_cast<uint64_t>(bytes_);
  }

 private:
  std::string At(const char* what) const { return absl::StrCat(path_, ": ", what, " at ", bytes_); }
  void Fail(const char* what) { status_.Update(ErrnoStatus(errno, At(what))); }
  void CloseOnce() {
    const int fd = std::exchange(fd_, -1);
    if (fd >= 0 && close(fd) != 0) Fail("close");
  }

  const std::string path_;
  int fd_;
  absl::Status& status_;
  int64_t bytes_ = 0;  // appended
  int64_t begun_ = 0;  // of which handed to the kernel to write
};

// The first call makes the environment with its files and its clock, which RocksDB does once, but
// where ThreadSanitizer does not see it: two threads that both call first would look like a race.
const std::shared_ptr<rocksdb::FileSystem>& DefaultFiles() {
  static const auto& files =
      *new std::shared_ptr<rocksdb::FileSystem>(rocksdb::Env::Default()->GetFileSystem());
  return files;
}

}  // namespace

class SstOutput::Files final : public rocksdb::FileSystemWrapper {
 public:
  Files() : FileSystemWrapper(DefaultFiles()) {}
  const char* Name() const override { return "carrel sst output"; }

  IOStatus NewWritableFile(const std::string& path, const rocksdb::FileOptions&,
                           std::unique_ptr<rocksdb::FSWritableFile>* file,
                           IODebugContext*) override {
    const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0) status_.Update(ErrnoStatus(errno, absl::StrCat(path, ": create")));
    *file = std::make_unique<OutputFile>(path, fd, &status_);
    return IOStatus::OK();
  }

  const absl::Status& status() const { return status_; }

 private:
  absl::Status status_;
};

SstOutput::SstOutput()
    : files_(std::make_shared<Files>()), env_(rocksdb::NewCompositeEnv(files_)) {}

SstOutput::~SstOutput() = default;

absl::Status SstOutput::status() const { return files_->status(); }

}  // namespace carrel::kvstore
