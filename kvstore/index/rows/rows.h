// What:      the mapped K (or V) rows of one layer and KV head, over all segments: position ->
//            pointer, verified on first touch.
// Errors:    DataLoss: segments that do not hold the manifest's rows, damaged bytes (names context,
//            kind, layer, head, segment); InvalidArgument: no such layer or head; OutOfRange: no
//            such row. FailedPrecondition: rows that are not bf16.
// Ownership: keeps its segments pinned.   Threads: any.
// Cost:      Address() is a shift, or a division; once a chunk is verified, VerifyRows() is one bit
//            test for each row, and none once all chunks are.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/dtype.h"
#include "common/ids.h"
#include "common/status.h"
#include "kvstore/format/segment.h"

namespace carrel::kvstore {

enum class Kind : uint8_t;
class PinnedSegment;
class StoredContext;

class Rows {
 public:
  // Check that the segments hold exactly the manifest's number of rows; touch no row.
  static absl::StatusOr<Rows> OpenKeys(const StoredContext& context, Layer layer, KvHead kv_head);
  static absl::StatusOr<Rows> OpenValues(const StoredContext& context, Layer layer, KvHead kv_head);

  // Rows in memory of the caller, trusted: for builders during prefill and for tests.
  static Rows FromMemory(const uint16_t* rows, int64_t count, int64_t head_dim);

  int64_t count() const { return count_; }
  int64_t head_dim() const { return head_dim_; }
  int64_t row_bytes() const { return row_bytes_; }

  // Unverified address; use after Verify covered it.
  const void* Address(Position row) const {
    const int64_t segment = SegmentOf(row);
    return bases_[static_cast<size_t>(segment)] + (row - segment * segment_tokens_) * row_bytes_;
  }
  absl::Status Verify(RowRange range) const;
  absl::Status VerifyRow(Position row) const { return Verify({row, row + 1}); }
  template <typename Id>
  absl::Status VerifyRows(const Id* rows, int64_t n) const {
    const auto there = [this](Id row) {
      return static_cast<uint64_t>(row) < static_cast<uint64_t>(count_);
    };
    if (fully_verified()) {
      bool all_there = true;
      for (int64_t i = 0; i < n; ++i) all_there &= there(rows[i]);
      if (all_there) return absl::OkStatus();
    }
    std::vector<Position> unverified;
    for (int64_t i = 0; i < n; ++i) {
      const auto row = static_cast<Position>(rows[i]);
      if (!there(rows[i]) || !Verified(row)) unverified.push_back(row);
    }
    if (unverified.empty()) return absl::OkStatus();
    AskAhead(unverified);
    for (size_t i = 0; i < unverified.size(); ++i) {
      if (i + 1 < unverified.size()) Fetch(unverified[i + 1]);  // while this one is verified
      RETURN_IF_ERROR(VerifyRow(unverified[i]));
    }
    return absl::OkStatus();
  }
  bool fully_verified() const;
  // Starts reading rows that are not in memory, all at once; none where pages are large.
  void AskAhead(RowRange range) const;
  // Calls fn(first position, address, rows) for each piece of the range that lies contiguously.
  template <typename Fn>
  void ForEachPiece(RowRange range, Fn&& fn) const {
    for (Position at = range.begin; at < range.end;) {
      const Position end = std::min(range.end, (at / segment_tokens_ + 1) * segment_tokens_);
      fn(at, Address(at), end - at);
      at = end;
    }
  }

 private:
  static absl::StatusOr<Rows> Open(const StoredContext& context, Layer layer, Kind kind,
                                   KvHead kv_head);

  bool sparse() const;
  // Brings what verifying the row reads into the L2 cache; any row. Inlined: GCC drops calls of what only prefetches.
  __attribute__((always_inline)) void Fetch(Position row) const {
    if (row < 0 || row >= count_ || Verified(row)) return;
    const int64_t segment = SegmentOf(row);
    const SegmentView* const view = views_[static_cast<size_t>(segment)];
    if (view == nullptr) return;
    const absl::string_view payload = view->payload();
    const int64_t begin =
        (row - segment * segment_tokens_) * row_bytes_ / kChunkBytes * kChunkBytes;
    const int64_t end =
        std::min<int64_t>(begin + kChunkBytes, static_cast<int64_t>(payload.size()));
    for (int64_t at = begin; at < end; at += 64) __builtin_prefetch(payload.data() + at, 0, 2);
  }
  void AskAhead(const std::vector<Position>& rows) const;
  int64_t SegmentOf(Position row) const {
    return segment_shift_ >= 0 ? row >> segment_shift_ : row / segment_tokens_;
  }
  void SetSegmentTokens(int64_t tokens);
  // Of a row that there is; false also where it is not known.
  bool Verified(Position row) const {
    const int64_t segment = SegmentOf(row);
    const SegmentView* const view = views_[static_cast<size_t>(segment)];
    const int64_t begin = (row - segment * segment_tokens_) * row_bytes_;
    return view != nullptr && view->Verified(begin, begin + row_bytes_);
  }

  int64_t count_ = 0;
  int64_t head_dim_ = 0;
  int64_t row_bytes_ = 0;
  int64_t segment_tokens_ = 1;
  int32_t segment_shift_ = -1;  // where segment_tokens_ is a power of two: its logarithm
  std::vector<const char*> bases_;
  std::vector<std::shared_ptr<const PinnedSegment>> segments_;  // empty for FromMemory
  std::vector<const SegmentView*> views_;                       // of the segments
};

// What ties an index's blob to the rows that it was built from: CRC32C over `checked` of them, those
// at floor(i * count / checked), which are verified.
inline constexpr int64_t kCheckedRows = 64;
absl::StatusOr<uint32_t> RowsCrc(const Rows& keys, int64_t checked = kCheckedRows);

}  // namespace carrel::kvstore
