// What:   a value of the store: a payload followed by what proves it. Checked piecewise, so that a
//         row can be trusted without reading its whole segment.
// Bytes:  payload | crc32c u32 of each 4 KiB chunk of the payload (the last may be shorter) |
//         footer of 24 bytes: payload_bytes u64, format_version u16, element dtype u8 (255: bytes),
//         reserved u8 = 0, reserved u32 = 0, crc32c u32 over (key bytes, chunk CRCs, footer so
//         far), magic "CSEG"; all little-endian. The last CRC binds the value to its key: a right
//         segment under a wrong key does not verify.
// Errors: DataLoss for anything that does not add up, with what and where inside the segment; the
//         caller adds context and key. FailedPrecondition for another format version.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace carrel::kvstore {

inline constexpr int64_t kChunkBytes = 4096;
inline constexpr int64_t kSegmentFooterBytes = 24;
inline constexpr uint16_t kSegmentFormatVersion = 1;
inline constexpr uint8_t kDTypeBytes = 255;  // the payload is no tensor

// The payload, its CRCs and the footer.
std::string EncodeSegment(absl::string_view key, absl::string_view payload, uint8_t dtype);
// The same into `value`, whose memory is kept from one value to the next. Reads the payload once.
void EncodeSegment(absl::string_view key, absl::string_view payload, uint8_t dtype,
                   std::string& value);

// A view of a stored value.
// Invariants
//   1. Open has verified the footer, the length and the chunk table; payload bytes only after
//      Verify covers them.
//   2. A chunk is verified at most a few times (concurrent first touches may repeat it) and
//      remembered.
//   3. A chunk that is remembered was read after the last Forget began: whoever was verifying
//      meanwhile does not add to what is remembered.
// Threads:   Verify may be called concurrently.
// Ownership: the bytes belong to whoever pinned them (storage) and outlive the view.
class SegmentView {
 public:
  static absl::StatusOr<std::unique_ptr<SegmentView>> Open(absl::string_view key,
                                                           absl::string_view value);

  absl::string_view payload() const { return payload_; }
  uint8_t dtype() const { return dtype_; }
  // Chunk table and footer: with the key, what SegmentDigest is made of.
  absl::string_view proof() const { return proof_; }

  // Makes sure that payload bytes [begin, end) are what was written; OutOfRange if there are no
  // such bytes. Cost: a bit test per chunk once verified; a CRC of each new chunk.
  absl::Status Verify(int64_t begin, int64_t end) const;
  // That Verify of payload bytes [begin, end), which are some, would read nothing.
  bool Verified(int64_t begin, int64_t end) const;
  // Calls fn(bytes) for each run of chunks of payload bytes [begin, end) that are not verified.
  template <typename Fn>
  void ForEachUnverified(int64_t begin, int64_t end, Fn&& fn) const;
  // What was verified will be verified again: the bytes were given back and come from disk anew, or
  // they may have changed.
  void Forget() const;
  // That `bytes`, read by other means than the mapping, are those of whole chunks from `first_chunk`
  // on (the last of the payload may be shorter); DataLoss names the first chunk that is not.
  absl::Status CheckChunks(int64_t first_chunk, absl::string_view bytes) const;
  bool fully_verified() const { return unverified_chunks_.load(std::memory_order_acquire) == 0; }

 private:
  SegmentView() = default;
  absl::Status VerifyChunk(int64_t chunk) const;

  absl::string_view payload_;
  absl::string_view chunk_crcs_;
  absl::string_view proof_;
  uint8_t dtype_ = kDTypeBytes;
  // Words of kChunksPerWord bits, one per chunk, below a count of the Forgets: a bit is set only
  // in the word that was there before the chunk was read.
  static constexpr int64_t kChunksPerWord = 48;
  static constexpr uint64_t kOneForget = uint64_t{1} << kChunksPerWord;
  mutable std::unique_ptr<std::atomic<uint64_t>[]> verified_;
  mutable std::atomic<int64_t> unverified_chunks_{0};
};

inline bool SegmentView::Verified(int64_t begin, int64_t end) const {
  for (int64_t chunk = begin / kChunkBytes; chunk <= (end - 1) / kChunkBytes; ++chunk) {
    const uint64_t word =
        verified_[static_cast<size_t>(chunk / kChunksPerWord)].load(std::memory_order_acquire);
    if ((word >> (chunk % kChunksPerWord) & 1) == 0) return false;
  }
  return true;
}

template <typename Fn>
void SegmentView::ForEachUnverified(int64_t begin, int64_t end, Fn&& fn) const {
  if (begin >= end || fully_verified()) return;
  const int64_t stop = (end - 1) / kChunkBytes + 1;
  const auto unverified = [this](int64_t chunk) {
    return (verified_[static_cast<size_t>(chunk / kChunksPerWord)].load(
                std::memory_order_relaxed) >>
                (chunk % kChunksPerWord) &
            1) == 0;
  };
  for (int64_t chunk = begin / kChunkBytes; chunk < stop; ++chunk) {
    if (!unverified(chunk)) continue;
    const int64_t first = chunk;
    while (chunk < stop && unverified(chunk)) ++chunk;
    fn(payload_.substr(static_cast<size_t>(first * kChunkBytes),
                       static_cast<size_t>((chunk - first) * kChunkBytes)));
  }
}

}  // namespace carrel::kvstore
