#include "kvstore/storage/context_export.h"

#include <algorithm>
#include <array>
#include <utility>

#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/status.h"

namespace carrel::kvstore {
namespace {

class ContextExportImpl final : public ContextExport {
 public:
  ContextExportImpl(std::shared_ptr<const StoredContext> context, const std::string& manifest,
                    std::vector<std::shared_ptr<const SegmentFile>> files)
      : context_(std::move(context)), files_(std::move(files)) {
    StreamHeader header{.name = context_->manifest().name(), .manifest = manifest};
    for (const auto& file : files_) header.file_bytes.push_back(file->bytes());
    header_ = header.Encode();
    bytes_ = static_cast<int64_t>(header_.size());
    for (const int64_t bytes : header.file_bytes) bytes_ += bytes + kStreamDigestBytes;
    rest_ = header_;
  }

  const v1::Manifest& manifest() const override { return context_->manifest(); }
  int64_t bytes() const override { return bytes_; }

  int64_t files() const override { return static_cast<int64_t>(files_.size()); }
  absl::string_view File(int64_t file) const override {
    return files_[static_cast<size_t>(file)]->contents();
  }
  absl::Status VerifyFile(int64_t file) override {
    const SegmentFile& wanted = *files_[static_cast<size_t>(file)];
    ASSIGN_OR_RETURN(const std::shared_ptr<const SstEntries> located, wanted.Entries());
    for (const SstEntry& entry : located->entries) {
      ASSIGN_OR_RETURN(const auto segment, SegmentOf(entry));
      RETURN_IF_ERROR(segment->Verify(0, static_cast<int64_t>(segment->payload().size())));
    }
    wanted.ReleasePages();
    return absl::OkStatus();
  }

  absl::StatusOr<absl::string_view> Next() override {
    if (rest_.empty() && state_ == State::kFile) {
      const std::array<uint8_t, 32> digest = std::exchange(sha_, nullptr)->Finish();
      digest_.assign(reinterpret_cast<const char*>(digest.data()), digest.size());
      rest_ = digest_;
      state_ = State::kDigest;
      files_[next_file_ - 1]->ReleasePages();
    } else if (rest_.empty() && next_file_ < files_.size()) {
      const SegmentFile& file = *files_[next_file_++];
      ASSIGN_OR_RETURN(located_, file.Entries());
      entries_ = located_->entries;
      sha_ = std::make_unique<Sha256>();
      rest_ = file.contents();
      state_ = State::kFile;
    }
    const absl::string_view piece = rest_.substr(0, kStreamPieceBytes);
    if (state_ == State::kFile) {
      RETURN_IF_ERROR(Verify(piece));
      sha_->Update(piece);
    }
    rest_.remove_prefix(piece.size());
    return piece;
  }

 private:
  enum class State : uint8_t { kHeader, kFile, kDigest };

  absl::StatusOr<std::shared_ptr<const PinnedSegment>> SegmentOf(const SstEntry& entry) const {
    ASSIGN_OR_RETURN(const SegmentKey key, DecodeKey(entry.key));
    return context_->Segment(key.layer, key.kind, key.kv_head, key.segment);
  }

  // What leaves is what was published: nobody is to find out after a restore.
  absl::Status Verify(absl::string_view piece) {
    const char* const end = piece.data() + piece.size();
    while (!entries_.empty() && entries_.front().value.data() < end) {
      ASSIGN_OR_RETURN(const auto segment, SegmentOf(entries_.front()));
      const absl::string_view payload = segment->payload();
      const auto offset = [&payload](const char* at) {
        return std::clamp<int64_t>(at - payload.data(), 0, static_cast<int64_t>(payload.size()));
      };
      RETURN_IF_ERROR(segment->Verify(offset(piece.data()), offset(end)));
      if (entries_.front().value.data() + entries_.front().value.size() > end) break;
      entries_.remove_prefix(1);
    }
    return absl::OkStatus();
  }

  const std::shared_ptr<const StoredContext> context_;
  const std::vector<std::shared_ptr<const SegmentFile>> files_;
  std::string header_, digest_;
  int64_t bytes_ = 0;
  State state_ = State::kHeader;
  size_t next_file_ = 0;
  absl::string_view rest_;                     // of header, file or digest: what is to be given
  std::shared_ptr<const SstEntries> located_;  // of the file
  absl::Span<const SstEntry> entries_;         // of the file: those that are not wholly given
  std::unique_ptr<Sha256> sha_;                // of the file so far
};

}  // namespace

std::unique_ptr<ContextExport> MakeContextExport(
    std::shared_ptr<const StoredContext> context, const std::string& manifest,
    std::vector<std::shared_ptr<const SegmentFile>> files) {
  return std::make_unique<ContextExportImpl>(std::move(context), manifest, std::move(files));
}

}  // namespace carrel::kvstore
