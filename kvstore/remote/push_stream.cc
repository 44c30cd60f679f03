#include "kvstore/remote/push_stream.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "carrel/v1/context.pb.h"
#include "common/file.h"
#include "common/mapped_file.h"
#include "common/status.h"
#include "kvstore/format/manifest.h"

namespace carrel::kvstore {

StreamPush::StreamPush(const Bucket& bucket, std::string name, std::string folder,
                       const PushOptions& options)
    : bucket_(bucket), name_(std::move(name)), folder_(std::move(folder)), options_(options) {}

StreamPush::~StreamPush() {
  if (fd_ >= 0) close(fd_);
}

absl::Status StreamPush::Take(absl::string_view piece) {
  while (!piece.empty()) {
    size_t taken = 0;
    if (pusher_ == nullptr) {
      ASSIGN_OR_RETURN(const bool whole, StreamHeader::Take(so_far_, piece));
      if (whole) RETURN_IF_ERROR(Begin());
    } else if (file_ == header_.file_bytes.size()) {
      return absl::DataLossError("push: bytes behind the end of the stream");
    } else if (left_ > 0) {
      taken = static_cast<size_t>(std::min<int64_t>(left_, static_cast<int64_t>(piece.size())));
      sha_->Update(piece.substr(0, taken));
      RETURN_IF_ERROR(WriteAll(fd_, piece.substr(0, taken), absl::StrCat(folder_, ": write")));
      left_ -= static_cast<int64_t>(taken);
    } else {
      taken = std::min(piece.size(), static_cast<size_t>(kStreamDigestBytes) - so_far_.size());
      so_far_.append(piece.data(), taken);
      if (static_cast<int64_t>(so_far_.size()) == kStreamDigestBytes) RETURN_IF_ERROR(EndFile());
    }
    piece.remove_prefix(taken);
  }
  return absl::OkStatus();
}

absl::Status StreamPush::Begin() {
  ASSIGN_OR_RETURN(header_, StreamHeader::Decode(so_far_));
  bytes_ = static_cast<int64_t>(so_far_.size());
  for (const int64_t bytes : header_.file_bytes) bytes_ += bytes + kStreamDigestBytes;
  if (name_.empty()) name_ = header_.name;
  v1::Manifest manifest;
  if (!manifest.ParseFromString(header_.manifest)) {
    return absl::DataLossError("push: the manifest is no Manifest message");
  }
  ASSIGN_OR_RETURN(const ContextId id, ContextIdOf(manifest));
  RETURN_IF_ERROR(Pusher::CheckName(bucket_, name_, Sha256Hex(header_.manifest)));
  ASSIGN_OR_RETURN(pusher_, Pusher::Begin(bucket_, id, options_));
  return BeginFile();
}

absl::Status StreamPush::BeginFile() {
  so_far_.clear();
  if (file_ == header_.file_bytes.size()) return absl::OkStatus();
  fd_ = open(folder_.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd_ < 0) return ErrnoStatus(errno, absl::StrCat(folder_, ": a file without a name"));
  left_ = header_.file_bytes[file_];
  sha_ = std::make_unique<Sha256>();
  return absl::OkStatus();
}

absl::Status StreamPush::EndFile() {
  const std::string digest = absl::BytesToHexString(so_far_);
  if (sha_->FinishHex() != digest) {
    return absl::DataLossError(
        absl::StrCat("push: file ", file_, " of the stream does not match its SHA-256"));
  }
  absl::StatusOr<std::unique_ptr<MappedFile>> mapped =
      MappedFile::Open(absl::StrCat("/proc/self/fd/", fd_));
  close(std::exchange(fd_, -1));
  RETURN_IF_ERROR(mapped.status());
  const std::shared_ptr<const MappedFile> keep = *std::move(mapped);
  RETURN_IF_ERROR(pusher_->AddFile(static_cast<int64_t>(file_), keep->bytes(), digest, keep));
  ++file_;
  return BeginFile();
}

absl::StatusOr<Pushed> StreamPush::Finish() {
  if (pusher_ == nullptr || file_ != header_.file_bytes.size()) {
    return absl::DataLossError("push: the stream ended before the context did");
  }
  return pusher_->Publish(name_, std::move(header_));
}

}  // namespace carrel::kvstore
