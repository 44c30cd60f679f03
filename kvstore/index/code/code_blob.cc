#include "kvstore/index/code/code_blob.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/string_view.h"
#include "common/status.h"
#include "kernels/score/code_score/code_score.h"
#include "kvstore/index/rows/blob_header.h"

namespace carrel::kvstore {
namespace {

constexpr char kMagic[] = {'C', 'C', 'O', 'D'};
// Programs that know version 1 alone do not look for what hata adds.
constexpr uint16_t kVersion = 1, kHataVersion = 2;
constexpr int64_t kAlignment = 4096;
constexpr int64_t kMaxRows = int64_t{1} << 31;
constexpr int64_t kMaxHeadDim = 4096;

#pragma pack(push, 1)
struct RawHeader {
  char magic[4];
  uint16_t version;
  uint16_t reserved;
  uint64_t rows;
  uint32_t head_dim;
  uint32_t bits;
  uint32_t training;
  uint32_t rows_crc;
  float error_ratio;
  char zeros[24];
  uint32_t crc;
};
#pragma pack(pop)

bool IsHata(const CodeHeader& h) { return h.training == CodeTraining::kHata; }

int64_t DecoderBytes(const CodeHeader& h) {
  return 4 * h.head_dim + (IsHata(h) ? 4 : 2) * h.bits * h.head_dim;
}

int64_t BlocksBytes(const CodeHeader& h) {
  return (h.rows + kernels::kCodeBlockKeys - 1) / kernels::kCodeBlockKeys *
         kernels::CodeBlockBytes(h.bits);
}

template <typename T>
void Append(const std::vector<T>& values, std::string& bytes) {
  bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

template <typename T>
void Take(int64_t count, absl::string_view& bytes, std::vector<T>& values) {
  values.resize(static_cast<size_t>(count));
  std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  bytes.remove_prefix(values.size() * sizeof(T));
}

}  // namespace

int64_t CodeBlocksOffset(const CodeHeader& header) {
  return (kBlobHeaderBytes + DecoderBytes(header) + kAlignment - 1) / kAlignment * kAlignment;
}

std::string EncodeCodeBlob(const CodeHeader& header, const CodeDecoder& decoder) {
  RawHeader raw = {};
  raw.version = IsHata(header) ? kHataVersion : kVersion;
  raw.rows = static_cast<uint64_t>(header.rows);
  raw.head_dim = static_cast<uint32_t>(header.head_dim);
  raw.bits = static_cast<uint32_t>(header.bits);
  raw.training = static_cast<uint32_t>(header.training);
  raw.rows_crc = header.rows_crc;
  raw.error_ratio = header.error_ratio;
  SealBlobHeader(kMagic, raw);
  std::string bytes(reinterpret_cast<const char*>(&raw), sizeof(raw));
  Append(decoder.centre, bytes);
  Append(decoder.decoder, bytes);
  Append(decoder.hash, bytes);
  bytes.resize(static_cast<size_t>(CodeBlocksOffset(header)), '\0');
  return bytes;
}

absl::StatusOr<CodeHeader> DecodeCodeBlob(const Blob& blob, CodeDecoder& decoder) {
  const auto refuse = [](const auto&... what) {
    return absl::DataLossError(absl::StrCat("code blob: ", what...));
  };
  const int64_t bytes = std::min(blob.size(), kBlobHeaderBytes);
  RETURN_IF_ERROR(blob.Verify(0, bytes));
  ASSIGN_OR_RETURN(
      const RawHeader raw,
      ReadBlobHeader<RawHeader>("code", kMagic, {kVersion, kHataVersion}, blob.View(0, bytes)));
  CodeHeader header;
  header.rows = static_cast<int64_t>(raw.rows);
  header.head_dim = raw.head_dim;
  header.bits = raw.bits;
  header.training = static_cast<CodeTraining>(std::min<uint32_t>(raw.training, UINT8_MAX));
  header.rows_crc = raw.rows_crc;
  header.error_ratio = raw.error_ratio;
  if (raw.rows > static_cast<uint64_t>(kMaxRows) || header.head_dim < 1 ||
      header.head_dim > kMaxHeadDim || header.bits < 8 || header.bits > kernels::kMaxCodeBits ||
      header.bits % 8 != 0 || raw.training > static_cast<uint32_t>(CodeTraining::kHata) ||
      IsHata(header) != (raw.version == kHataVersion) || !(header.error_ratio >= 0)) {
    return refuse("rows=", header.rows, " head_dim=", header.head_dim, " bits=", header.bits,
                  " training=", raw.training, " (version ", raw.version,
                  ") error_ratio=", header.error_ratio, " are out of bounds");
  }
  const int64_t offset = CodeBlocksOffset(header);
  if (blob.size() != offset + BlocksBytes(header)) {
    return refuse(blob.size(), " bytes instead of ", offset + BlocksBytes(header));
  }
  RETURN_IF_ERROR(blob.Verify(0, offset));
  absl::string_view rest(blob.Address(kBlobHeaderBytes),
                         static_cast<size_t>(offset - kBlobHeaderBytes));
  Take(header.head_dim, rest, decoder.centre);
  Take(header.bits * header.head_dim, rest, decoder.decoder);
  if (IsHata(header)) Take(header.bits * header.head_dim, rest, decoder.hash);
  return header;
}

}  // namespace carrel::kvstore
