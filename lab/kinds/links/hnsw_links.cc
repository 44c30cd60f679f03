#include "lab/kinds/links/hnsw_links.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/checksum.h"
#include "common/status.h"
#include "kvstore/format/little_endian.h"

namespace carrel::kvstore {
namespace {

constexpr char kMagic[] = {'C', 'H', 'N', 'S'};
constexpr uint16_t kVersion = 1;
constexpr int64_t kHeaderBytes = 64;
constexpr int64_t kHeaderCrcOffset = 60;
constexpr int32_t kMaxLevels = 64;

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
  std::string out;
  out.reserve(static_cast<size_t>(kHeaderBytes + header.rows * header.m * 8) + upper_rows * 8 +
              upper_lists * static_cast<uint64_t>(header.m) * 4);
  out.append(kMagic, sizeof(kMagic));
  AppendLittleEndian(out, kVersion);
  AppendLittleEndian(out, uint16_t{0});
  AppendLittleEndian(out, static_cast<uint64_t>(header.rows));
  AppendLittleEndian(out, static_cast<uint32_t>(header.head_dim));
  AppendLittleEndian(out, static_cast<uint32_t>(header.m));
  AppendLittleEndian(out, static_cast<uint32_t>(header.ef_construction));
  AppendLittleEndian(out, static_cast<uint32_t>(header.levels));
  AppendLittleEndian(out, header.entry);
  AppendLittleEndian(out, header.rows_crc);
  AppendLittleEndian(out, upper_rows);
  AppendLittleEndian(out, upper_lists);
  AppendLittleEndian(out, uint32_t{0});
  AppendLittleEndian(out, Crc32c(out));
  return out;
}

absl::StatusOr<HnswLinks> HnswLinks::Open(std::string blob) {
  HnswLinks links;
  links.blob_ = std::move(blob);
  RETURN_IF_ERROR(links.Parse());
  return links;
}

absl::Status HnswLinks::Parse() {
  const int64_t bytes = static_cast<int64_t>(blob_.size());
  if (bytes < kHeaderBytes) return Bad(absl::StrCat(bytes, " bytes, header has ", kHeaderBytes));
  const char* at = blob_.data();
  if (std::memcmp(at, kMagic, sizeof(kMagic)) != 0) return Bad("does not begin with \"CHNS\"");
  if (Crc32c(absl::string_view(at, kHeaderCrcOffset)) !=
      LoadLittleEndian<uint32_t>(at + kHeaderCrcOffset)) {
    return Bad("header does not match its CRC");
  }
  if (const uint16_t version = LoadLittleEndian<uint16_t>(at + 4); version != kVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("hnsw blob has version ", version, ", this program reads version ", kVersion));
  }
  const uint64_t rows = LoadLittleEndian<uint64_t>(at + 8);
  const uint32_t m = LoadLittleEndian<uint32_t>(at + 20);
  const uint32_t levels = LoadLittleEndian<uint32_t>(at + 28);
  const uint64_t upper_rows = LoadLittleEndian<uint64_t>(at + 40);
  const uint64_t upper_lists = LoadLittleEndian<uint64_t>(at + 48);
  header_.entry = LoadLittleEndian<uint32_t>(at + 32);
  // These bounds keep the sizes below from overflowing.
  if (rows > kMaxHnswRows || m < 1 || m > kMaxHnswM || levels > kMaxLevels || upper_rows > rows ||
      upper_lists > rows * kMaxLevels || (rows > 0 && (header_.entry >= rows || levels == 0))) {
    return Bad("a field of the header is out of bounds");
  }
  const uint64_t expected = kHeaderBytes + rows * m * 8 + upper_rows * 8 + upper_lists * m * 4;
  if (blob_.size() != expected) {
    return Bad(absl::StrCat(bytes, " bytes, header makes ", expected));
  }
  header_.rows = static_cast<int64_t>(rows);
  header_.head_dim = LoadLittleEndian<uint32_t>(at + 16);
  header_.m = static_cast<int32_t>(m);
  header_.ef_construction = static_cast<int32_t>(LoadLittleEndian<uint32_t>(at + 24));
  header_.levels = static_cast<int32_t>(levels);
  header_.rows_crc = LoadLittleEndian<uint32_t>(at + 36);
  CARREL_CHECK(reinterpret_cast<uintptr_t>(at) % alignof(UpperRow) == 0);
  level0_ = reinterpret_cast<const int32_t*>(at + kHeaderBytes);
  const int32_t* upper = level0_ + rows * m * 2;
  upper_rows_ = {reinterpret_cast<const UpperRow*>(upper), upper_rows};
  upper_links_ = upper + upper_rows * 2;
  return CheckLinks(static_cast<int64_t>(upper_lists));
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
