#include "kvstore/storage/context_import.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/file.h"
#include "common/mapped_file.h"
#include "common/status.h"
#include "kvstore/format/manifest.h"
#include "kvstore/storage/import_remains.h"
#include "kvstore/storage/unfinished.h"

namespace carrel::kvstore {
namespace {

namespace fs = std::filesystem;

// Bytes after which the disk is told to begin, and which may be on their way to it: whoever writes
// faster waits, so that the disk's queue stays short for those who read, and the end is no long wait.
constexpr int64_t kPace = int64_t{8} << 20;
constexpr int64_t kMostDeclaredBytes = int64_t{1} << 60;  // that somebody may declare

// The file that is being written, with the SHA-256 of what it holds.
class PartFile {
 public:
  ~PartFile() {
    if (fd_ >= 0) close(fd_);
  }

  // Goes on behind what is there, of which at most `most` bytes count.
  absl::Status Open(const std::string& path, int64_t most) {
    path_ = path;
    fd_ = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd_ < 0) return ErrnoStatus(errno, absl::StrCat(path, ": create"));
    const off_t there = lseek(fd_, 0, SEEK_END);
    if (there < 0) return ErrnoStatus(errno, path);
    bytes_ = begun_ = std::min<int64_t>(there, most);
    if (ftruncate(fd_, bytes_) != 0) return ErrnoStatus(errno, path);
    if (lseek(fd_, bytes_, SEEK_SET) < 0) return ErrnoStatus(errno, path);
    if (bytes_ == 0) return absl::OkStatus();
    ASSIGN_OR_RETURN(const std::unique_ptr<MappedFile> mapped, MappedFile::Open(path));
    sha_.Update(mapped->bytes());
    return absl::OkStatus();
  }

  absl::Status Write(absl::string_view bytes) {
    sha_.Update(bytes);
    RETURN_IF_ERROR(WriteAll(fd_, bytes, absl::StrCat(path_, ": write at ", bytes_)));
    bytes_ += static_cast<int64_t>(bytes.size());
    if (bytes_ - begun_ < kPace) return absl::OkStatus();
    // Hints: what they miss, the fsync at the end does.
    sync_file_range(fd_, begun_, bytes_ - begun_, SYNC_FILE_RANGE_WRITE);
    sync_file_range(fd_, 0, begun_, SYNC_FILE_RANGE_WAIT_BEFORE);
    begun_ = bytes_;
    return absl::OkStatus();
  }

  // Whether the file is of this SHA-256; then it gets its name, durably.
  absl::Status Finish(absl::string_view digest, const std::string& name) {
    if (digest != absl::HexStringToBytes(sha_.FinishHex())) {
      return absl::DataLossError(absl::StrCat("import: ", fs::path(name).filename().string(),
                                              " of ", bytes_, " bytes does not match its SHA-256"));
    }
    if (fsync(fd_) != 0) return ErrnoStatus(errno, absl::StrCat(path_, ": fsync"));
    if (rename(path_.c_str(), name.c_str()) != 0) return ErrnoStatus(errno, name);
    return absl::OkStatus();
  }

  const std::string& path() const { return path_; }
  int64_t bytes() const { return bytes_; }

 private:
  std::string path_;
  int fd_ = -1;
  int64_t bytes_ = 0;
  int64_t begun_ = 0;  // of which the disk has been told to write
  Sha256 sha_;
};

class ContextImportImpl final : public ContextImport {
 public:
  ContextImportImpl(std::string folder, std::string name, ImportTarget target)
      : imports_(std::move(folder)), name_(std::move(name)), target_(std::move(target)) {}

  absl::Status BeginAhead(ContextId id, int64_t file, int64_t bytes) override {
    CARREL_CHECK(position_ == 0 && bytes_ == 0);
    if (name_.empty() || file < 0 || file >= kMostStreamFiles || bytes < 1 ||
        bytes > kMostDeclaredBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("import ", name_, ": file ", file, " of ", bytes,
                       " bytes ahead; it needs a name, files below ", kMostStreamFiles,
                       " and 1 to ", kMostDeclaredBytes, " bytes"));
    }
    ahead_ = true;
    file_ = static_cast<size_t>(file);
    RETURN_IF_ERROR(OpenFolder(
        id, bytes + kStreamDigestBytes + BytesBeside(absl::StrCat(imports_, "/", id.ToString()))));
    header_.file_bytes.assign(file_ + 1, 0);
    header_.file_bytes[file_] = bytes;
    bytes_ = bytes + kStreamDigestBytes;
    if (!IsWhole(file_)) RETURN_IF_ERROR(ProbeRoom(folder_ + "/all", 0, bytes));
    return BeginFile();
  }

  int64_t position() const override { return position_; }
  int64_t bytes() const override { return bytes_; }

  absl::Status Take(absl::string_view bytes) override {
    while (!bytes.empty()) {
      if (bytes_ > 0 && position_ == bytes_) {
        return absl::DataLossError(
            absl::StrCat("import: bytes behind the end of the stream at ", bytes_));
      }
      const int64_t before = position_;
      ASSIGN_OR_RETURN(const int64_t taken, bytes_ == 0 ? TakeHeader(bytes) : TakeFile(bytes));
      bytes.remove_prefix(static_cast<size_t>(taken));
      // After a jump the rest is of another place.
      if (position_ != before + taken) return absl::OkStatus();
    }
    return absl::OkStatus();
  }

  absl::StatusOr<v1::Manifest> Publish() override {
    if (ahead_) {
      return absl::FailedPreconditionError(
          absl::StrCat("import ", name_, ": a file that is sent ahead is no context"));
    }
    if (bytes_ == 0 || position_ != bytes_) {
      return absl::DataLossError(
          absl::StrCat("import: the stream ends at ", position_, ", it has ",
                       bytes_ == 0 ? "a header longer than that" : absl::StrCat(bytes_, " bytes")));
    }
    std::vector<std::string> files;
    for (size_t i = 0; i < header_.file_bytes.size(); ++i) files.push_back(FilePath(i));
    absl::StatusOr<v1::Manifest> manifest = target_.publish(name_, header_.manifest, files);
    // What is damaged will not get better; on a full disk or under a taken name it is kept.
    const bool hopeless =
        absl::IsDataLoss(manifest.status()) || absl::IsInvalidArgument(manifest.status());
    if (manifest.ok() || hopeless) RETURN_IF_ERROR(Remove());
    return manifest;
  }

 private:
  std::string FilePath(size_t i) const { return absl::StrFormat("%s/%04d.sst", folder_, i); }
  std::string PartPath(size_t i) const { return absl::StrFormat("%s/%04d.part", folder_, i); }

  absl::Status Remove() const {
    std::error_code error;
    fs::remove_all(folder_, error);
    if (!error) fs::remove(LockPath(), error);
    return error ? ErrnoStatus(error.value(), folder_) : absl::OkStatus();
  }

  std::string LockPath() const { return folder_ + ".lock"; }

  // Of two imports of one context at a time, the second is refused.
  absl::Status Lock() {
    std::error_code error;
    fs::create_directories(imports_, error);
    if (error) return ErrnoStatus(error.value(), absl::StrCat("create ", imports_));
    // Who looks at what was left holds locks for a moment, too.
    for (int attempt = 0;; ++attempt) {
      absl::StatusOr<FolderLock> lock = FolderLock::TakeFile(LockPath());
      if (lock.ok()) {
        lock_ = *std::move(lock);
        return absl::OkStatus();
      }
      if (!absl::IsFailedPrecondition(lock.status()) || attempt == 5) {
        return Annotate(lock.status(), absl::StrCat("import ", name_));
      }
      absl::SleepFor(absl::Milliseconds(20));
    }
  }

  // The place of the context's files, for this import alone, which will then hold so many bytes.
  absl::Status OpenFolder(ContextId id, int64_t wanted) {
    folder_ = absl::StrCat(imports_, "/", id.ToString());
    RETURN_IF_ERROR(target_.check_free(name_, id, wanted));
    RETURN_IF_ERROR(Lock());
    if (target_.most_remains != nullptr) {
      RemoveImportRemains(imports_, {.bytes = target_.most_remains()});
    }
    std::error_code error;
    fs::permissions(imports_, fs::perms::owner_all, error);
    fs::create_directories(folder_, error);
    return error ? ErrnoStatus(error.value(), absl::StrCat("create ", folder_)) : absl::OkStatus();
  }

  // Of the files that came ahead before this one.
  int64_t BytesBeside(const std::string& folder) const {
    const std::string mine = absl::StrFormat("%04d.", file_);
    int64_t bytes = 0;
    std::error_code error;
    for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
      std::error_code gone;
      const bool other = it->path().filename().string().rfind(mine, 0) != 0;
      if (other && it->is_regular_file(gone)) {
        const uintmax_t size = it->file_size(gone);
        if (!gone) bytes += static_cast<int64_t>(size);
      }
    }
    return bytes;
  }

  bool IsWhole(size_t i) const {
    std::error_code error;
    return static_cast<int64_t>(fs::file_size(FilePath(i), error)) == header_.file_bytes[i] &&
           !error;
  }

  absl::StatusOr<int64_t> TakeHeader(absl::string_view bytes) {
    absl::string_view rest = bytes;
    ASSIGN_OR_RETURN(const bool whole, StreamHeader::Take(header_bytes_, rest));
    const auto taken = static_cast<int64_t>(bytes.size() - rest.size());
    position_ += taken;
    if (whole) RETURN_IF_ERROR(Begin());
    return taken;
  }

  // The header is known: finds what is here already.
  absl::Status Begin() {
    ASSIGN_OR_RETURN(header_, StreamHeader::Decode(header_bytes_));
    v1::Manifest manifest;
    if (!manifest.ParseFromString(header_.manifest)) {
      return absl::DataLossError("import: the manifest is no Manifest message");
    }
    ASSIGN_OR_RETURN(const ContextId id, ContextIdOf(manifest));
    if (name_.empty()) name_ = header_.name;
    int64_t wanted = position_;
    for (const int64_t bytes : header_.file_bytes) wanted += bytes + kStreamDigestBytes;
    RETURN_IF_ERROR(OpenFolder(id, wanted));
    const absl::StatusOr<std::string> known = ReadFile(folder_ + "/header");
    // Files without a header were sent ahead.
    if (known.ok() && *known != header_bytes_) {
      std::error_code error;
      fs::remove_all(folder_, error);
      RETURN_IF_ERROR(MakePrivateFolder(folder_));
    }
    if (!known.ok() || *known != header_bytes_) {
      RETURN_IF_ERROR(WriteFileAtomically(folder_ + "/header", header_bytes_));
    }
    bytes_ = position_;
    int64_t room = 0;
    for (size_t i = 0; i < header_.file_bytes.size(); ++i) {
      bytes_ += header_.file_bytes[i] + kStreamDigestBytes;
      if (!IsWhole(i)) room += header_.file_bytes[i];
    }
    if (room > 0) RETURN_IF_ERROR(ProbeRoom(folder_ + "/all", 0, room));
    return BeginFile();
  }

  // The next one that is not here.
  absl::Status BeginFile() {
    for (; file_ < header_.file_bytes.size() && IsWhole(file_); ++file_) {
      position_ += header_.file_bytes[file_] + kStreamDigestBytes;
    }
    if (file_ == header_.file_bytes.size()) return absl::OkStatus();
    part_ = std::make_unique<PartFile>();
    digest_.clear();
    RETURN_IF_ERROR(part_->Open(PartPath(file_), header_.file_bytes[file_]));
    position_ += part_->bytes();
    return absl::OkStatus();
  }

  absl::StatusOr<int64_t> TakeFile(absl::string_view bytes) {
    const int64_t left = header_.file_bytes[file_] - part_->bytes();
    if (left > 0) {
      const absl::string_view taken = bytes.substr(0, static_cast<size_t>(left));
      RETURN_IF_ERROR(part_->Write(taken));
      position_ += static_cast<int64_t>(taken.size());
      return static_cast<int64_t>(taken.size());
    }
    const absl::string_view taken =
        bytes.substr(0, static_cast<size_t>(kStreamDigestBytes) - digest_.size());
    digest_.append(taken.data(), taken.size());
    position_ += static_cast<int64_t>(taken.size());
    if (static_cast<int64_t>(digest_.size()) < kStreamDigestBytes) {
      return static_cast<int64_t>(taken.size());
    }
    const absl::Status finished = part_->Finish(digest_, FilePath(file_));
    if (absl::IsDataLoss(finished)) {
      std::error_code ignored;
      fs::remove(part_->path(), ignored);
    }
    RETURN_IF_ERROR(finished);
    ++file_;
    RETURN_IF_ERROR(BeginFile());
    return static_cast<int64_t>(taken.size());
  }

  const std::string imports_;
  std::string name_;
  const ImportTarget target_;
  FolderLock lock_;
  bool ahead_ = false;  // one file instead of a stream
  std::string header_bytes_;
  StreamHeader header_;
  std::string folder_;
  int64_t position_ = 0;
  int64_t bytes_ = 0;
  size_t file_ = 0;  // the one that is on its way
  std::unique_ptr<PartFile> part_;
  std::string digest_;  // of it, as far as it has come
};

}  // namespace

std::unique_ptr<ContextImport> MakeContextImport(std::string folder, std::string name,
                                                 ImportTarget target) {
  return std::make_unique<ContextImportImpl>(std::move(folder), std::move(name), std::move(target));
}

}  // namespace carrel::kvstore
