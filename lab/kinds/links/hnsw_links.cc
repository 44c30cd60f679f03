#include "lab/kinds/links/hnsw_links.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kvstore/index/rows/blob_header.h"

namespace carrel::kvstore {
namespace {

constexpr char kMagic[] = {'C', 'H', 'N', 'S'};
constexpr uint16_t kVersion = 1;
constexpr int32_t kMaxLevels = 64;

#pragma pack(push, 1)
struct RawHeader {
  char magic[4];
  uint16_t version;
  uint16_t reserved;
  uint64_t rows;
  uint32_t head_dim, m, ef_construction, levels, entry, rows_crc;
  uint64_t upper_rows, upper_lists;
  uint32_t zero;
  uint32_t crc;
};
#pragma pack(pop)

absl::Status Bad(absl::string_view what) {
  return absl::DataLossError(absl::StrCat("hnsw blob: ", what));
}

// Links lead to rows below `rows`, and -1 follows the last.
bool AreLinks(const int32_t* links, int64_t width, int64_t rows) {
  bool ended = false;
  for (int64_t i = 0; i < width; ++i) {
    if (links[i] < -1 || links[i] >= rows || (ended && links[i] != -1)) return false;
    ended |= links[i] == -1;
  }
  return true;
}

}  // namespace

std::string HnswLinks::EncodeHeader(const Header& header, uint64_t upper_rows,
                                    uint64_t upper_lists) {
  RawHeader raw = {};
  raw.version = kVersion;
  raw.rows = static_cast<uint64_t>(header.rows);
  raw.head_dim = static_cast<uint32_t>(header.head_dim);
  raw.m = static_cast<uint32_t>(header.m);
  raw.ef_construction = static_cast<uint32_t>(header.ef_construction);
  raw.levels = static_cast<uint32_t>(header.levels);
  raw.entry = header.entry;
  raw.rows_crc = header.rows_crc;
  raw.upper_rows = upper_rows;
  raw.upper_lists = upper_lists;
  SealBlobHeader(kMagic, raw);
  std::string out;
  out.reserve(static_cast<size_t>(kBlobHeaderBytes + header.rows * header.m * 8) + upper_rows * 8 +
              upper_lists * static_cast<uint64_t>(header.m) * 4);
  return out.append(reinterpret_cast<const char*>(&raw), sizeof(raw));
}

absl::StatusOr<HnswLinks> HnswLinks::Open(std::string blob) {
  HnswLinks links;
  links.blob_ = std::move(blob);
  RETURN_IF_ERROR(links.Parse());
  return links;
}

absl::Status HnswLinks::Parse() {
  ASSIGN_OR_RETURN(const RawHeader raw,
                   ReadBlobHeader<RawHeader>("hnsw", kMagic, {kVersion}, blob_));
  // These bounds keep the sizes below from overflowing.
  if (raw.rows > kMaxHnswRows || raw.m < 1 || raw.m > kMaxHnswM || raw.levels > kMaxLevels ||
      raw.upper_rows > raw.rows || raw.upper_lists > raw.rows * kMaxLevels ||
      (raw.rows > 0 && (raw.entry >= raw.rows || raw.levels == 0))) {
    return Bad("a field of the header is out of bounds");
  }
  const uint64_t links = raw.rows * raw.m * 2;  // of level 0
  const uint64_t expected =
      kBlobHeaderBytes + links * 4 + raw.upper_rows * 8 + raw.upper_lists * raw.m * 4;
  if (blob_.size() != expected) {
    return Bad(absl::StrCat(blob_.size(), " bytes, header makes ", expected));
  }
  header_ = {.rows = static_cast<int64_t>(raw.rows),
             .head_dim = raw.head_dim,
             .m = static_cast<int32_t>(raw.m),
             .ef_construction = static_cast<int32_t>(raw.ef_construction),
             .levels = static_cast<int32_t>(raw.levels),
             .entry = raw.entry,
             .rows_crc = raw.rows_crc};
  CARREL_CHECK(reinterpret_cast<uintptr_t>(blob_.data()) % alignof(UpperRow) == 0);
  level0_ = reinterpret_cast<const int32_t*>(blob_.data() + kBlobHeaderBytes);
  upper_rows_ = {reinterpret_cast<const UpperRow*>(level0_ + links), raw.upper_rows};
  upper_links_ = level0_ + links + raw.upper_rows * 2;
  return CheckLinks(static_cast<int64_t>(raw.upper_lists));
}

absl::Status HnswLinks::CheckLinks(int64_t upper_lists) {
  for (int64_t row = 0; row < header_.rows; ++row) {
    if (!AreLinks(level0_ + row * header_.m * 2, header_.m * 2, header_.rows)) {
      return Bad(absl::StrCat("links of row ", row, " lead outside ", header_.rows, " rows"));
    }
  }
  int64_t lists = 0;
  int64_t before = -1;
  for (const UpperRow& upper : upper_rows_) {
    if (upper.row <= before || upper.row >= header_.rows || upper.levels < 1 ||
        static_cast<int64_t>(upper.levels) >= header_.levels) {
      return Bad(absl::StrCat("upper row ", upper.row, " with ", upper.levels, " levels"));
    }
    before = upper.row;
    upper_first_.push_back(static_cast<uint64_t>(lists));
    lists += upper.levels;
  }
  if (lists != upper_lists)
    return Bad(absl::StrCat(lists, " upper lists, header says ", upper_lists));
  for (int64_t list = 0; list < lists; ++list) {
    if (!AreLinks(upper_links_ + list * header_.m, header_.m, header_.rows)) {
      return Bad(absl::StrCat("upper list ", list, " leads outside ", header_.rows, " rows"));
    }
  }
  return absl::OkStatus();
}

absl::Span<const int32_t> HnswLinks::Upper(uint32_t row, int32_t level) const {
  const auto at =
      std::lower_bound(upper_rows_.begin(), upper_rows_.end(), row,
                       [](const UpperRow& upper, uint32_t wanted) { return upper.row < wanted; });
  if (at == upper_rows_.end() || at->row != row || static_cast<int32_t>(at->levels) < level) {
    return {};
  }
  const uint64_t list = upper_first_[static_cast<size_t>(at - upper_rows_.begin())] +
                        static_cast<uint64_t>(level - 1);
  return {upper_links_ + list * static_cast<uint64_t>(header_.m), static_cast<size_t>(header_.m)};
}

int64_t HnswLinks::resident_bytes() const {
  return static_cast<int64_t>(blob_.capacity() + upper_first_.capacity() * sizeof(uint64_t));
}

}  // namespace carrel::kvstore
