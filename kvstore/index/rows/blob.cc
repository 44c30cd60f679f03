#include "kvstore/index/rows/blob.h"

#include <algorithm>
#include <utility>

#include "common/status.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {

Blob::Blob(std::string bytes)
    : size_(static_cast<int64_t>(bytes.size())),
      bytes_(std::make_shared<const std::string>(std::move(bytes))) {
  bases_.push_back(bytes_->data());
}

absl::StatusOr<Blob> Blob::Open(const StoredContext& context, Layer layer, Kind kind,
                                KvHead kv_head) {
  ASSIGN_OR_RETURN(const uint32_t segments, context.SegmentCount(layer.value(), kind, kv_head));
  Blob blob;
  blob.chunk_bytes_ = kIndexChunkBytes;
  for (uint32_t i = 0; i < segments; ++i) {
    ASSIGN_OR_RETURN(auto segment, context.Segment(layer.value(), kind, kv_head, i));
    const auto bytes = static_cast<int64_t>(segment->payload().size());
    if (bytes == 0 || bytes > kIndexChunkBytes || (i + 1 < segments && bytes < kIndexChunkBytes)) {
      return absl::DataLossError(absl::StrCat(KindName(kind), " chunk ", i, " of ", segments,
                                              " has ", bytes, " bytes (layer=", layer.value(),
                                              " kv_head=", kv_head.value(), ")"));
    }
    blob.size_ += bytes;
    blob.bases_.push_back(segment->payload().data());
    blob.segments_.push_back(std::move(segment));
  }
  return blob;
}

absl::Status Blob::Verify(int64_t begin, int64_t end) const {
  if (begin < 0 || begin > end || end > size_) {
    return absl::OutOfRangeError(absl::StrCat("index bytes [", begin, ", ", end, ") of ", size_));
  }
  if (segments_.empty()) return absl::OkStatus();
  for (int64_t at = begin; at < end;) {
    const int64_t first = at / chunk_bytes_ * chunk_bytes_;
    const int64_t stop = std::min(end, first + chunk_bytes_);
    RETURN_IF_ERROR(
        segments_[static_cast<size_t>(at / chunk_bytes_)]->Verify(at - first, stop - first));
    at = stop;
  }
  return absl::OkStatus();
}

void Blob::AskAhead() const {
  for (const auto& segment : segments_) {
    segment->AskAhead(0, static_cast<int64_t>(segment->payload().size()));
  }
}

absl::StatusOr<std::string> Blob::Read() const {
  if (bytes_ != nullptr) return *bytes_;
  AskAhead();
  RETURN_IF_ERROR(Verify(0, size_));
  std::string all;
  all.reserve(static_cast<size_t>(size_));
  for (const auto& segment : segments_) {
    all.append(segment->payload().data(), segment->payload().size());
  }
  return all;
}

}  // namespace carrel::kvstore
