#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/status.h"
#include "kvstore/storage/context_stream.h"
#include "kvstore/storage/segment_file.h"
#include "kvstore/storage/store.h"
#include "kvstore/storage/stored_context.h"

namespace carrel::kvstore {
namespace {

class ContextExportImpl final : public ContextExport {
 public:
  ContextExportImpl(std::shared_ptr<const StoredContext> context, const std::string& manifest,
                    std::vector<std::shared_ptr<const SegmentFile>> files)
      : context_(std::move(context)), files_(std::move(files)) {
    header_ = {.name = context_->manifest().name(), .manifest = manifest};
    for (const auto& file : files_) header_.file_bytes.push_back(file->bytes());
    given_ = header_.Encode();
    bytes_ = static_cast<int64_t>(given_.size());
    for (const int64_t bytes : header_.file_bytes) bytes_ += bytes + kStreamDigestBytes;
    rest_ = given_;
  }

  const v1::Manifest& manifest() const override { return context_->manifest(); }
  const StreamHeader& header() const override { return header_; }
  int64_t bytes() const override { return bytes_; }

  int64_t files() const override { return static_cast<int64_t>(files_.size()); }
  absl::string_view File(int64_t file) const override {
    return files_[static_cast<size_t>(file)]->contents();
  }
  absl::Status VerifyFile(int64_t file, std::string* sha256) override {
    const SegmentFile& wanted = *files_[static_cast<size_t>(file)];
    ASSIGN_OR_RETURN(const std::shared_ptr<const SstEntries> located, wanted.Entries());
    absl::Span<const SstEntry> entries = located->entries;
    Sha256 sha;
    for (absl::string_view rest = wanted.contents(); !rest.empty();) {
      const absl::string_view piece = rest.substr(0, kStreamPieceBytes);
      RETURN_IF_ERROR(Verify(piece, entries));
      if (sha256 != nullptr) sha.Update(piece);
      rest.remove_prefix(piece.size());
    }
    if (sha256 != nullptr) *sha256 = sha.FinishHex();
    wanted.ReleasePages();
    return absl::OkStatus();
  }

  absl::StatusOr<absl::string_view> Next() override {
    if (rest_.empty() && state_ == State::kFile) {
      given_ = absl::HexStringToBytes(std::exchange(sha_, nullptr)->FinishHex());
      rest_ = given_;
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
      RETURN_IF_ERROR(Verify(piece, entries_));
      sha_->Update(piece);
    }
    rest_.remove_prefix(piece.size());
    return piece;
  }

 private:
  enum class State : uint8_t { kHeader, kFile, kDigest };

  // What leaves is what was published: nobody is to find out after a restore. entries: those of the file that
  // are not wholly behind.
  absl::Status Verify(absl::string_view piece, absl::Span<const SstEntry>& entries) const {
    const char* const end = piece.data() + piece.size();
    while (!entries.empty() && entries.front().value.data() < end) {
      ASSIGN_OR_RETURN(const SegmentKey key, DecodeKey(entries.front().key));
      ASSIGN_OR_RETURN(const auto segment,
                       context_->Segment(key.layer, key.kind, key.kv_head, key.segment));
      const absl::string_view payload = segment->payload();
      const auto offset = [&payload](const char* at) {
        return std::clamp<int64_t>(at - payload.data(), 0, static_cast<int64_t>(payload.size()));
      };
      RETURN_IF_ERROR(segment->Verify(offset(piece.data()), offset(end)));
      if (entries.front().value.data() + entries.front().value.size() > end) break;
      entries.remove_prefix(1);
    }
    return absl::OkStatus();
  }

  const std::shared_ptr<const StoredContext> context_;
  const std::vector<std::shared_ptr<const SegmentFile>> files_;
  StreamHeader header_;
  std::string given_;  // the header, or a digest
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
