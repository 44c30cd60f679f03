#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <utility>

#include "common/file.h"
#include "common/status.h"
#include "kvstore/storage/rocks.h"
#include "rocksdb/sst_file_writer.h"

namespace carrel::kvstore {
namespace {

// A new file's name is durable once its folder is.
absl::Status SyncFolderOf(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  const char* folder = parent.empty() ? "." : parent.c_str();
  const int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return ErrnoStatus(errno, folder);
  const int result = fsync(fd);
  const int error = errno;
  close(fd);
  return result == 0 ? absl::OkStatus() : ErrnoStatus(error, folder);
}

class SstWriterImpl : public SstWriter {
 public:
  explicit SstWriterImpl(std::string path)
      : path_(std::move(path)),
        writer_(rocksdb::EnvOptions(), SegmentOptions(), nullptr,
                /*invalidate_page_cache=*/false) {}

  absl::Status Open() { return FromRocks(writer_.Open(path_), path_); }

  absl::Status Add(const SegmentKey& key, std::string payload, uint8_t dtype) override {
    RETURN_IF_ERROR(Annotate(ValidateKey(key), path_));
    if (key.kind == Kind::kManifest) {
      return absl::InvalidArgumentError(absl::StrCat(path_, ": a manifest is added by Publish"));
    }
    if (entries_ > 0 && key.context != context_) {
      return absl::InvalidArgumentError(absl::StrCat(path_, ": holds context #", context_.value(),
                                                     ", not #", key.context.value()));
    }
    std::string bytes = EncodeKey(key);
    if (entries_ > 0 && bytes <= last_) {
      return absl::InvalidArgumentError(
          absl::StrCat(path_, ": ", DescribeKey(key), " must follow the key before it"));
    }
    const std::string value = EncodeSegment(bytes, std::move(payload), dtype);
    // What Finish appends beside values: index, properties, footer.
    const int64_t tail = 65536 + 256 * entries_;
    const int64_t size = static_cast<int64_t>(value.size());
    RETURN_IF_ERROR(ProbeRoom(path_, bytes_, size + tail));
    RETURN_IF_ERROR(FromRocks(writer_.Put(bytes, value), path_));
    bytes_ += size;
    last_ = std::move(bytes);
    context_ = key.context;
    ++entries_;
    return absl::OkStatus();
  }

  absl::Status Finish() override {
    if (entries_ == 0) return absl::InvalidArgumentError(absl::StrCat(path_, ": no segments"));
    RETURN_IF_ERROR(FromRocks(writer_.Finish(), path_));
    return SyncFolderOf(path_);
  }

 private:
  const std::string path_;
  rocksdb::SstFileWriter writer_;
  std::string last_;
  ContextId context_;
  int64_t entries_ = 0;
  int64_t bytes_ = 0;  // of values so far
};

}  // namespace

absl::StatusOr<std::unique_ptr<SstWriter>> SstWriter::Create(const std::string& path) {
  auto writer = std::make_unique<SstWriterImpl>(path);
  RETURN_IF_ERROR(writer->Open());
  return writer;
}

}  // namespace carrel::kvstore
