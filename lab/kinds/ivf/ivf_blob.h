// What:   the blob of an ivf index: centroids and the rows of each list; no second copy of a key.
// Bytes:  little-endian, all parts aligned to 4:
//         header of 64 bytes: magic "CIVF" | version u16 = 1 | reserved u16 = 0 | rows u64 |
//           head_dim u32 | lists u32 | asked_lists u32 (IndexParams::ivf_lists) | rows_crc u32
//           (HnswLinks) | zeros [28] | crc32c u32 of the header so far
//         mean f32 [head_dim] | spreads f32 [lists] | offsets u32 [lists + 1] | rows u32 [rows] |
//         centroids bf16 [lists, head_dim]: see partition.h
// Errors: DataLoss for bytes that are no such blob: names what. The lists of an opened blob hold
//         every row exactly once, and no number of it is infinite or NaN.
// Ownership: points into the blob, which it keeps.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvstore/index/building/partition.h"

namespace carrel::kvstore {

inline constexpr int64_t kMaxIvfRows = (int64_t{1} << 31) - 1;
inline constexpr int64_t kMaxIvfLists = 65536;
inline constexpr int64_t kMaxIvfHeadDim = 4096;

struct IvfHeader {
  int64_t rows = 0;
  int64_t head_dim = 0;
  int64_t lists = 0;
  int64_t asked_lists = 0;
  uint32_t rows_crc = 0;
};

std::string EncodeIvfBlob(const IvfHeader& header, const Partition& partition);

class IvfBlob {
 public:
  static absl::StatusOr<IvfBlob> Open(std::string bytes);

  IvfBlob(IvfBlob&&) = default;
  IvfBlob& operator=(IvfBlob&&) = default;

  const IvfHeader& header() const { return header_; }
  const float* mean() const { return mean_; }
  const void* centroids() const { return centroids_; }
  const float* spreads() const { return spreads_; }
  int64_t size(int64_t list) const { return offsets_[list + 1] - offsets_[list]; }
  absl::Span<const uint32_t> List(int64_t list) const {
    return {rows_ + offsets_[list], static_cast<size_t>(size(list))};
  }
  int64_t resident_bytes() const { return static_cast<int64_t>(bytes_.capacity()); }

 private:
  IvfBlob() = default;
  absl::Status Parse();
  absl::Status CheckParts() const;

  std::string bytes_;  // longer than any string that lies inside its object: views survive a move
  IvfHeader header_;
  const float *mean_ = nullptr, *spreads_ = nullptr;
  const uint32_t *offsets_ = nullptr, *rows_ = nullptr;
  const uint16_t* centroids_ = nullptr;
};

}  // namespace carrel::kvstore
