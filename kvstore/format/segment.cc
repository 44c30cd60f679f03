#include "kvstore/format/segment.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/checksum.h"
#include "common/status.h"
#include "kvstore/format/crc_metrics.h"
#include "kvstore/format/little_endian.h"

namespace carrel::kvstore {
namespace {

constexpr char kMagic[] = {'C', 'S', 'E', 'G'};
constexpr int64_t kFooterCrcOffset = 16;
constexpr int64_t kFooterMagicOffset = 20;

int64_t ChunkCount(int64_t payload_bytes) {
  return (payload_bytes + kChunkBytes - 1) / kChunkBytes;
}

}  // namespace

void EncodeSegment(absl::string_view key, absl::string_view payload, uint8_t dtype,
                   std::string& value) {
  // Chunks that are copied and, still in the L1 cache, checked.
  constexpr size_t kCopied = 4 * kChunkBytes;
  const size_t payload_bytes = payload.size();
  std::vector<uint32_t> crcs(static_cast<size_t>(ChunkCount(static_cast<int64_t>(payload_bytes))));
  const absl::string_view crc_bytes(reinterpret_cast<const char*>(crcs.data()), 4 * crcs.size());
  value.clear();
  value.reserve(payload_bytes + crc_bytes.size() + kSegmentFooterBytes);
  for (size_t at = 0; at < payload_bytes; at += kCopied) {
    const absl::string_view copied = payload.substr(at, kCopied);
    value.append(copied.data(), copied.size());
    Crc32cOfChunks(absl::string_view(value).substr(at), kChunkBytes, &crcs[at / kChunkBytes]);
  }
  value.append(crc_bytes.data(), crc_bytes.size());
  AppendLittleEndian(value, uint64_t{payload_bytes});
  AppendLittleEndian(value, kSegmentFormatVersion);
  AppendLittleEndian(value, dtype);
  AppendLittleEndian(value, uint8_t{0});
  AppendLittleEndian(value, uint32_t{0});
  AppendLittleEndian(value,
                     ExtendCrc32c(Crc32c(key), absl::string_view(value).substr(payload_bytes)));
  value.append(kMagic, sizeof(kMagic));
}

std::string EncodeSegment(absl::string_view key, absl::string_view payload, uint8_t dtype) {
  std::string value;
  EncodeSegment(key, payload, dtype, value);
  return value;
}

absl::StatusOr<std::unique_ptr<SegmentView>> SegmentView::Open(absl::string_view key,
                                                               absl::string_view value) {
  if (value.size() < kSegmentFooterBytes) {
    return absl::DataLossError(absl::StrCat(
        "segment of ", value.size(), " bytes is shorter than its footer of ", kSegmentFooterBytes));
  }
  const absl::string_view footer = value.substr(value.size() - kSegmentFooterBytes);
  if (std::memcmp(footer.data() + kFooterMagicOffset, kMagic, sizeof(kMagic)) != 0) {
    return absl::DataLossError("segment does not end in \"CSEG\"");
  }
  const uint64_t payload_bytes = LoadLittleEndian<uint64_t>(footer.data());
  const uint64_t available = value.size() - kSegmentFooterBytes;
  if (payload_bytes > available) {
    return absl::DataLossError(absl::StrCat("segment footer claims ", payload_bytes,
                                            " payload bytes, at most ", available, " are there"));
  }
  const int64_t chunks = ChunkCount(static_cast<int64_t>(payload_bytes));
  if (available - payload_bytes != static_cast<uint64_t>(chunks) * 4) {
    return absl::DataLossError(absl::StrCat("segment of ", payload_bytes, " payload bytes has ",
                                            available - payload_bytes, " bytes of CRCs, must have ",
                                            chunks * 4));
  }
  const absl::string_view proven =
      value.substr(payload_bytes, static_cast<size_t>(chunks * 4 + kFooterCrcOffset));
  if (ExtendCrc32c(Crc32c(key), proven) !=
      LoadLittleEndian<uint32_t>(footer.data() + kFooterCrcOffset)) {
    return absl::DataLossError("segment footer, CRC table or key does not match the footer's CRC");
  }
  const uint16_t version = LoadLittleEndian<uint16_t>(footer.data() + 8);
  if (version != kSegmentFormatVersion) {
    return absl::FailedPreconditionError(absl::StrCat("segment has format version ", version,
                                                      ", this program reads version ",
                                                      kSegmentFormatVersion));
  }
  if (footer[11] != 0 || LoadLittleEndian<uint32_t>(footer.data() + 12) != 0) {
    return absl::DataLossError("segment footer's reserved bytes are not 0");
  }
  std::unique_ptr<SegmentView> view(new SegmentView());
  view->payload_ = value.substr(0, payload_bytes);
  view->proof_ = value.substr(payload_bytes);
  view->chunk_crcs_ = value.substr(payload_bytes, static_cast<size_t>(chunks * 4));
  view->dtype_ = static_cast<uint8_t>(footer[10]);
  view->verified_ = std::make_unique<std::atomic<uint64_t>[]>(
      static_cast<size_t>((chunks + kChunksPerWord - 1) / kChunksPerWord));
  view->unverified_chunks_.store(chunks, std::memory_order_release);
  return view;
}

absl::Status SegmentView::CheckChunks(int64_t first_chunk, absl::string_view bytes) const {
  for (int64_t chunk = first_chunk; !bytes.empty(); ++chunk) {
    const absl::string_view part = bytes.substr(0, kChunkBytes);
    const uint32_t expected = LoadLittleEndian<uint32_t>(chunk_crcs_.data() + chunk * 4);
    if (const uint32_t actual = Crc32c(part); actual != expected) {
      CrcFailures().Add();
      return absl::DataLossError(
          absl::StrCat("payload bytes [", chunk * kChunkBytes, ", ",
                       chunk * kChunkBytes + static_cast<int64_t>(part.size()), ") have CRC ",
                       absl::Hex(actual), ", written with ", absl::Hex(expected)));
    }
    bytes.remove_prefix(part.size());
  }
  return absl::OkStatus();
}

absl::Status SegmentView::VerifyChunk(int64_t chunk) const {
  std::atomic<uint64_t>& word = verified_[static_cast<size_t>(chunk / kChunksPerWord)];
  uint64_t before = word.load(std::memory_order_acquire);
  const uint64_t forgets = before / kOneForget;
  RETURN_IF_ERROR(
      CheckChunks(chunk, payload_.substr(static_cast<size_t>(chunk * kChunkBytes), kChunkBytes)));
  const uint64_t bit = uint64_t{1} << (chunk % kChunksPerWord);
  // Only the first of concurrent verifiers counts the chunk.
  while (before / kOneForget == forgets && (before & bit) == 0) {
    if (word.compare_exchange_weak(before, before | bit, std::memory_order_acq_rel)) {
      unverified_chunks_.fetch_sub(1, std::memory_order_acq_rel);
      break;
    }
  }
  return absl::OkStatus();
}

void SegmentView::Forget() const {
  const int64_t chunks = ChunkCount(static_cast<int64_t>(payload_.size()));
  // First more than will be forgotten: fully_verified must not be seen while a bit is unset.
  unverified_chunks_.fetch_add(chunks, std::memory_order_acq_rel);
  int64_t known = 0;
  for (int64_t i = 0; i < (chunks + kChunksPerWord - 1) / kChunksPerWord; ++i) {
    std::atomic<uint64_t>& word = verified_[static_cast<size_t>(i)];
    uint64_t before = word.load(std::memory_order_acquire);
    while (!word.compare_exchange_weak(before, (before / kOneForget + 1) * kOneForget,
                                       std::memory_order_acq_rel)) {
    }
    known += std::popcount(before % kOneForget);
  }
  unverified_chunks_.fetch_sub(chunks - known, std::memory_order_acq_rel);
}

absl::Status SegmentView::Verify(int64_t begin, int64_t end) const {
  if (begin < 0 || begin > end || end > static_cast<int64_t>(payload_.size())) {
    return absl::OutOfRangeError(absl::StrCat("payload bytes [", begin, ", ", end,
                                              ") of a segment of ", payload_.size(), " bytes"));
  }
  if (begin == end || fully_verified()) return absl::OkStatus();
  const int64_t last_chunk = (end - 1) / kChunkBytes;
  for (int64_t chunk = begin / kChunkBytes; chunk <= last_chunk;) {
    const uint64_t word =
        verified_[static_cast<size_t>(chunk / kChunksPerWord)].load(std::memory_order_acquire);
    // Chunks of this word from `chunk` on that are verified without a gap.
    const int64_t known = std::countr_one((word % kOneForget) >> (chunk % kChunksPerWord));
    if (known > 0) {
      chunk += std::min<int64_t>(known, kChunksPerWord - chunk % kChunksPerWord);
      continue;
    }
    RETURN_IF_ERROR(VerifyChunk(chunk));
    ++chunk;
  }
  return absl::OkStatus();
}

}  // namespace carrel::kvstore
