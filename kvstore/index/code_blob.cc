#include "kvstore/index/code_blob.h"

#include <cstring>

#include "absl/strings/string_view.h"
#include "common/checksum.h"
#include "common/status.h"
#include "kernels/code_score/code_score.h"

namespace carrel::kvstore {
namespace {

constexpr char kMagic[] = {'C', 'C', 'O', 'D'};
constexpr uint16_t kVersion = 1;
constexpr int64_t kHeaderBytes = 64;
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
  uint32_t trained;
  uint32_t rows_crc;
  float error_ratio;
  char zeros[24];
  uint32_t crc;
};
#pragma pack(pop)
static_assert(sizeof(RawHeader) == kHeaderBytes);

int64_t DecoderBytes(const CodeHeader& h) { return 4 * h.head_dim + 2 * h.bits * h.head_dim; }

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

uint32_t HeaderCrc(const RawHeader& raw) {
  return Crc32c(absl::string_view(reinterpret_cast<const char*>(&raw), kHeaderBytes - 4));
}

}  // namespace

int64_t CodeBlocksOffset(const CodeHeader& header) {
  return (kHeaderBytes + DecoderBytes(header) + kAlignment - 1) / kAlignment * kAlignment;
}

std::string EncodeCodeBlob(const CodeHeader& header, const CodeDecoder& decoder) {
  RawHeader raw = {};
  std::memcpy(raw.magic, kMagic, sizeof(kMagic));
  raw.version = kVersion;
  raw.rows = static_cast<uint64_t>(header.rows);
  raw.head_dim = static_cast<uint32_t>(header.head_dim);
  raw.bits = static_cast<uint32_t>(header.bits);
  raw.trained = header.trained ? 1 : 0;
  raw.rows_crc = header.rows_crc;
  raw.error_ratio = header.error_ratio;
  raw.crc = HeaderCrc(raw);
  std::string bytes(reinterpret_cast<const char*>(&raw), sizeof(raw));
  Append(decoder.centre, bytes);
  Append(decoder.decoder, bytes);
  bytes.resize(static_cast<size_t>(CodeBlocksOffset(header)), '\0');
  return bytes;
}

absl::StatusOr<CodeHeader> DecodeCodeBlob(const Blob& blob, CodeDecoder& decoder) {
  const auto refuse = [](const auto&... what) {
    return absl::DataLossError(absl::StrCat("code blob: ", what...));
  };
  if (blob.size() < kHeaderBytes) return refuse(blob.size(), " bytes hold no header");
  RETURN_IF_ERROR(blob.Verify(0, kHeaderBytes));
  RawHeader raw;
  std::memcpy(&raw, blob.Address(0), sizeof(raw));
  if (std::memcmp(raw.magic, kMagic, sizeof(kMagic)) != 0) return refuse("no magic CCOD");
  if (raw.crc != HeaderCrc(raw)) return refuse("the header's CRC does not fit");
  if (raw.version != kVersion) return refuse("version ", raw.version, ", must be ", kVersion);
  CodeHeader header;
  header.rows = static_cast<int64_t>(raw.rows);
  header.head_dim = raw.head_dim;
  header.bits = raw.bits;
  header.trained = raw.trained != 0;
  header.rows_crc = raw.rows_crc;
  header.error_ratio = raw.error_ratio;
  if (raw.rows > static_cast<uint64_t>(kMaxRows) || header.head_dim < 1 ||
      header.head_dim > kMaxHeadDim || header.bits < 8 || header.bits > kernels::kMaxCodeBits ||
      header.bits % 8 != 0 || !(header.error_ratio >= 0)) {
    return refuse("rows=", header.rows, " head_dim=", header.head_dim, " bits=", header.bits,
                  " error_ratio=", header.error_ratio, " are out of bounds");
  }
  const int64_t offset = CodeBlocksOffset(header);
  if (blob.size() != offset + BlocksBytes(header)) {
    return refuse(blob.size(), " bytes instead of ", offset + BlocksBytes(header));
  }
  RETURN_IF_ERROR(blob.Verify(0, offset));
  absl::string_view rest(blob.Address(kHeaderBytes), static_cast<size_t>(offset - kHeaderBytes));
  Take(header.head_dim, rest, decoder.centre);
  Take(header.bits * header.head_dim, rest, decoder.decoder);
  return header;
}

}  // namespace carrel::kvstore
