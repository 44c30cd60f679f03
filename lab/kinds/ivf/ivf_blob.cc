#include "lab/kinds/ivf/ivf_blob.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/dtype.h"
#include "common/status.h"
#include "kvstore/index/rows/blob_header.h"

namespace carrel::kvstore {
namespace {

constexpr char kMagic[] = {'C', 'I', 'V', 'F'};
constexpr uint16_t kVersion = 1;

#pragma pack(push, 1)
struct RawHeader {
  char magic[4];
  uint16_t version;
  uint16_t reserved;
  uint64_t rows;
  uint32_t head_dim;
  uint32_t lists;
  uint32_t asked_lists;
  uint32_t rows_crc;
  char zeros[28];
  uint32_t crc;
};
#pragma pack(pop)

template <typename T>
void Append(const std::vector<T>& values, std::string& bytes) {
  bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

int64_t BlobBytes(const IvfHeader& h) {
  return kBlobHeaderBytes + 4 * (h.head_dim + h.lists + h.lists + 1 + h.rows) +
         2 * h.lists * h.head_dim;
}

template <typename... What>
absl::Status Bad(const What&... what) {
  return absl::DataLossError(absl::StrCat("ivf blob: ", what...));
}

}  // namespace

std::string EncodeIvfBlob(const IvfHeader& header, const Partition& partition) {
  RawHeader raw = {};
  raw.version = kVersion;
  raw.rows = static_cast<uint64_t>(header.rows);
  raw.head_dim = static_cast<uint32_t>(header.head_dim);
  raw.lists = static_cast<uint32_t>(header.lists);
  raw.asked_lists = static_cast<uint32_t>(header.asked_lists);
  raw.rows_crc = header.rows_crc;
  SealBlobHeader(kMagic, raw);
  std::string bytes;
  bytes.reserve(static_cast<size_t>(BlobBytes(header)));
  bytes.append(reinterpret_cast<const char*>(&raw), sizeof(raw));
  Append(partition.mean, bytes);
  Append(partition.spreads, bytes);
  Append(partition.offsets, bytes);
  Append(partition.rows, bytes);
  Append(partition.centroids, bytes);
  return bytes;
}

absl::StatusOr<IvfBlob> IvfBlob::Open(std::string bytes) {
  IvfBlob blob;
  blob.bytes_ = std::move(bytes);
  RETURN_IF_ERROR(blob.Parse());
  RETURN_IF_ERROR(blob.CheckParts());
  return blob;
}

absl::Status IvfBlob::Parse() {
  const auto size = static_cast<int64_t>(bytes_.size());
  ASSIGN_OR_RETURN(const RawHeader raw,
                   ReadBlobHeader<RawHeader>("ivf", kMagic, {kVersion}, bytes_));
  // These bounds keep the sizes below from overflowing.
  if (raw.rows > static_cast<uint64_t>(kMaxIvfRows) || raw.head_dim < 1 ||
      raw.head_dim > kMaxIvfHeadDim || raw.lists > kMaxIvfLists || raw.lists > raw.rows ||
      (raw.lists == 0) != (raw.rows == 0) || raw.asked_lists > kMaxIvfLists) {
    return Bad("rows=", raw.rows, " head_dim=", raw.head_dim, " lists=", raw.lists,
               " asked_lists=", raw.asked_lists, " are out of bounds");
  }
  header_ = {.rows = static_cast<int64_t>(raw.rows),
             .head_dim = raw.head_dim,
             .lists = raw.lists,
             .asked_lists = raw.asked_lists,
             .rows_crc = raw.rows_crc};
  if (size != BlobBytes(header_)) return Bad(size, " bytes instead of ", BlobBytes(header_));
  CARREL_CHECK(reinterpret_cast<uintptr_t>(bytes_.data()) % alignof(float) == 0);
  mean_ = reinterpret_cast<const float*>(bytes_.data() + kBlobHeaderBytes);
  spreads_ = mean_ + header_.head_dim;
  offsets_ = reinterpret_cast<const uint32_t*>(spreads_ + header_.lists);
  rows_ = offsets_ + header_.lists + 1;
  centroids_ = reinterpret_cast<const uint16_t*>(rows_ + header_.rows);
  return absl::OkStatus();
}

absl::Status IvfBlob::CheckParts() const {
  const auto finite = [](float x) { return std::isfinite(x); };
  const auto finite_bf16 = [](uint16_t x) { return std::isfinite(Bf16ToFloat(x)); };
  if (!std::all_of(mean_, spreads_, finite) ||
      !std::all_of(spreads_, spreads_ + header_.lists,
                   [](float x) { return std::isfinite(x) && x >= 0; }) ||
      !std::all_of(centroids_, centroids_ + header_.lists * header_.head_dim, finite_bf16)) {
    return Bad("a centroid, a spread or the mean is not finite");
  }
  if (offsets_[0] != 0 || offsets_[header_.lists] != header_.rows ||
      !std::is_sorted(offsets_, offsets_ + header_.lists + 1)) {
    return Bad("offsets of ", header_.lists, " lists do not ascend from 0 to ", header_.rows);
  }
  std::vector<bool> seen(static_cast<size_t>(header_.rows));
  for (int64_t list = 0; list < header_.lists; ++list) {
    int64_t before = -1;
    for (const uint32_t row : List(list)) {
      if (row >= header_.rows || row <= before || seen[row]) {
        return Bad("list ", list, " holds row ", row, " of ", header_.rows,
                   " out of order or twice");
      }
      seen[row] = true;
      before = row;
    }
  }
  return absl::OkStatus();
}

}  // namespace carrel::kvstore
