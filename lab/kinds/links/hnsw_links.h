// What:   the blob of an hnsw index: links, and what ties them to their rows.
// Bytes:  little-endian, all parts aligned to 4:
//         header of 64 bytes: magic "CHNS" | version u16 = 1 | reserved u16 = 0 | rows u64 |
//           head_dim u32 | m u32 | ef_construction u32 |
//           levels u32 (of the graph; 0 without rows) | entry u32 (row where a search starts) |
//           rows_crc u32 | upper_rows u64 | upper_lists u64 | reserved u32 = 0 |
//           crc32c u32 of the header so far
//         links of level 0, i32 [rows, 2 m]: rows, filled up with -1
//         {row u32, upper levels u32} [upper_rows], rows ascending: those on level 1 and above
//         links of the upper levels, i32 [upper_lists, m]: of each such row level 1, 2, ...
//         rows_crc is the CRC32C of kCheckedRows rows spread evenly: links over other rows are
//         refused without reading all rows. (The blob's own bytes are proven by its segments.)
// Errors: DataLoss for bytes that are no such blob: names what. No link of an opened blob leads
//         outside the rows.
// Ownership: points into the blob, which it keeps.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "kvstore/index/rows/rows.h"

namespace carrel::kvstore {

inline constexpr int32_t kMaxHnswM = 64;
inline constexpr int64_t kMaxHnswRows = (int64_t{1} << 31) - 1;

class HnswLinks {
 public:
  struct Header {
    int64_t rows = 0;
    int64_t head_dim = 0;
    int32_t m = 0;
    int32_t ef_construction = 0;
    int32_t levels = 0;
    uint32_t entry = 0;
    uint32_t rows_crc = 0;
  };

  // lists(row, level): the links of a row on a level, at most 2 m on level 0, m above.
  // levels_of(row): on how many levels it is, >= 1.
  template <typename Lists, typename LevelsOf>
  static std::string Encode(const Header& header, Lists lists, LevelsOf levels_of);

  static absl::StatusOr<HnswLinks> Open(std::string blob);

  HnswLinks(HnswLinks&&) = default;
  HnswLinks& operator=(HnswLinks&&) = default;

  const Header& header() const { return header_; }
  // Filled up with -1 behind the last.
  absl::Span<const int32_t> Level0(uint32_t row) const {
    const size_t width = static_cast<size_t>(header_.m) * 2;
    return {level0_ + row * width, width};
  }
  // level >= 1; empty for a row that is not on it.
  absl::Span<const int32_t> Upper(uint32_t row, int32_t level) const;
  int64_t resident_bytes() const;

 private:
  struct UpperRow {
    uint32_t row;
    uint32_t levels;
  };
  HnswLinks() = default;
  static std::string EncodeHeader(const Header& header, uint64_t upper_rows, uint64_t upper_lists);
  absl::Status Parse();
  absl::Status CheckLinks(int64_t upper_lists);  // and fills upper_first_

  std::string blob_;  // longer than any string that lies inside its object: views survive a move
  Header header_;
  const int32_t* level0_ = nullptr;
  absl::Span<const UpperRow> upper_rows_;
  std::vector<uint64_t> upper_first_;  // [upper_rows]: index of its first list
  const int32_t* upper_links_ = nullptr;
};

template <typename Lists, typename LevelsOf>
std::string HnswLinks::Encode(const Header& header, Lists lists, LevelsOf levels_of) {
  uint64_t upper_rows = 0, upper_lists = 0;
  for (int64_t row = 0; row < header.rows; ++row) {
    const int32_t upper = levels_of(row) - 1;
    upper_rows += upper > 0;
    upper_lists += static_cast<uint64_t>(upper);
  }
  std::string blob = EncodeHeader(header, upper_rows, upper_lists);
  const auto append = [&blob](absl::Span<const int32_t> links, int32_t width) {
    for (int32_t i = 0; i < width; ++i) {
      const int32_t link = i < static_cast<int32_t>(links.size()) ? links[i] : -1;
      blob.append(reinterpret_cast<const char*>(&link), sizeof(link));
    }
  };
  for (int64_t row = 0; row < header.rows; ++row) append(lists(row, 0), header.m * 2);
  for (int64_t row = 0; row < header.rows; ++row) {
    const UpperRow upper{static_cast<uint32_t>(row), static_cast<uint32_t>(levels_of(row) - 1)};
    if (upper.levels > 0) blob.append(reinterpret_cast<const char*>(&upper), sizeof(upper));
  }
  for (int64_t row = 0; row < header.rows; ++row) {
    for (int32_t level = 1; level < levels_of(row); ++level) append(lists(row, level), header.m);
  }
  return blob;
}

}  // namespace carrel::kvstore
