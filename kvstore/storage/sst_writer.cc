#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <utility>

#include "common/status.h"
#include "kvstore/storage/rocks.h"
#include "kvstore/storage/sst_output.h"
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
        writer_(rocksdb::EnvOptions(), WriterOptions(output_.env()), nullptr,
                /*invalidate_page_cache=*/false) {}

  absl::Status Open() {
    RETURN_IF_ERROR(FromRocks(writer_.Open(path_), path_));
    return output_.status();
  }

  absl::Status Add(const SegmentKey& key, absl::string_view payload, uint8_t dtype) override {
    RETURN_IF_ERROR(Annotate(ValidateKey(key), path_));
    if (key.kind == Kind::kManifest) {
      return absl::InvalidArgumentError(absl::StrCat(path_, ": a manifest is added by Publish"));
    }
    if (entries_ > 0 && key.context != context_) {
      return absl::InvalidArgumentError(absl::StrCat(
          path_, ": holds context #", context_.ToString(), ", not #", key.context.ToString()));
    }
    std::string bytes = EncodeKey(key);
    if (entries_ > 0 && bytes <= last_) {
      return absl::InvalidArgumentError(
          absl::StrCat(path_, ": ", DescribeKey(key), " must follow the key before it"));
    }
    if (entries_ == 0) RETURN_IF_ERROR(FromRocks(writer_.Put(BytesBefore(bytes), ""), path_));
    EncodeSegment(bytes, payload, dtype, value_);
    RETURN_IF_ERROR(FromRocks(writer_.Put(bytes, value_), path_));
    RETURN_IF_ERROR(output_.status());
    last_ = std::move(bytes);
    context_ = key.context;
    ++entries_;
    return absl::OkStatus();
  }

  absl::Status Finish() override {
    if (entries_ == 0) return absl::InvalidArgumentError(absl::StrCat(path_, ": no segments"));
    RETURN_IF_ERROR(FromRocks(writer_.Put(BytesAfter(last_), ""), path_));
    RETURN_IF_ERROR(FromRocks(writer_.Finish(), path_));
    RETURN_IF_ERROR(output_.status());
    return SyncFolderOf(path_);
  }

 private:
  static rocksdb::Options WriterOptions(rocksdb::Env* env) {
    rocksdb::Options options = SegmentOptions();
    options.env = env;
    return options;
  }

  const std::string path_;
  const SstOutput output_;
  rocksdb::SstFileWriter writer_;
  std::string value_, last_;
  ContextId context_;
  int64_t entries_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<SstWriter>> SstWriter::Create(const std::string& path) {
  auto writer = std::make_unique<SstWriterImpl>(path);
  RETURN_IF_ERROR(writer->Open());
  return writer;
}

}  // namespace carrel::kvstore
