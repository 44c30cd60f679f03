#include "kvstore/index/summaries/summaries_header.h"

#include <cstring>

#include "common/checksum.h"
#include "common/status.h"
#include "kvstore/index/rows/blob_header.h"
#include "kvstore/index/summaries/summaries.h"

namespace carrel::kvstore {
namespace {

constexpr char kMagic[] = {'C', 'S', 'U', 'M'};
constexpr uint16_t kVersion = 2, kUnfittedVersion = 1;
constexpr int64_t kHeaderBytes = 64;
constexpr int64_t kAlignment = 4096;
constexpr uint64_t kMaxRows = uint64_t{1} << 40;
constexpr uint32_t kMaxHeadDim = 4096;

#pragma pack(push, 1)
struct RawHeader {
  char magic[4];
  uint16_t version;
  uint16_t left_out;
  uint64_t rows;
  uint32_t head_dim;
  uint32_t cluster_rows;
  float spread_share;
  char zeros[32];
  uint32_t crc;
};
#pragma pack(pop)
static_assert(sizeof(RawHeader) == kHeaderBytes);

uint32_t Crc(const RawHeader& raw, const void* centre) {
  std::string covered(reinterpret_cast<const char*>(&raw), kHeaderBytes - 4);
  covered.append(static_cast<const char*>(centre), size_t{4} * raw.head_dim);
  return Crc32c(covered);
}

}  // namespace

int64_t SummaryFirstOffset(int64_t head_dim) {
  return (kHeaderBytes + 4 * head_dim + kAlignment - 1) / kAlignment * kAlignment;
}

std::string EncodeSummaryHeader(const SummaryHeader& header, const std::vector<float>& centre) {
  RawHeader raw = {};
  std::memcpy(raw.magic, kMagic, sizeof(kMagic));
  raw.version = kVersion;
  raw.rows = static_cast<uint64_t>(header.rows);
  raw.head_dim = static_cast<uint32_t>(header.head_dim);
  raw.cluster_rows = static_cast<uint32_t>(header.cluster_rows);
  raw.left_out = header.fit.left_out ? 1 : 0;
  raw.spread_share = header.fit.spread_share;
  raw.crc = Crc(raw, centre.data());
  std::string bytes(reinterpret_cast<const char*>(&raw), sizeof(raw));
  bytes.append(reinterpret_cast<const char*>(centre.data()), centre.size() * sizeof(float));
  bytes.resize(static_cast<size_t>(SummaryFirstOffset(header.head_dim)), '\0');
  return bytes;
}

absl::StatusOr<SummaryHeader> DecodeSummaryHeader(const Blob& blob, std::vector<float>& centre) {
  const auto refuse = [](const auto&... what) {
    return absl::DataLossError(absl::StrCat("summaries: ", what...));
  };
  if (blob.size() < kHeaderBytes) return refuse(blob.size(), " bytes hold no header");
  RETURN_IF_ERROR(blob.Verify(0, kHeaderBytes));
  RawHeader raw;
  std::memcpy(&raw, blob.Address(0), sizeof(raw));
  if (std::memcmp(raw.magic, kMagic, sizeof(kMagic)) != 0) return refuse("no magic CSUM");
  if (raw.rows > kMaxRows || raw.head_dim < 1 || raw.head_dim > kMaxHeadDim ||
      raw.cluster_rows < kMinSummaryRows || raw.cluster_rows > kMaxSummaryRows) {
    return refuse("rows=", raw.rows, " head_dim=", raw.head_dim, " cluster_rows=", raw.cluster_rows,
                  " are out of bounds");
  }
  const int64_t offset = SummaryFirstOffset(raw.head_dim);
  if (blob.size() < offset) return refuse(blob.size(), " bytes instead of ", offset, " or more");
  RETURN_IF_ERROR(blob.Verify(0, offset));
  if (raw.crc != Crc(raw, blob.Address(kHeaderBytes))) {
    return refuse("the header's CRC does not fit");
  }
  RETURN_IF_ERROR(CheckBlobVersion("summaries", raw.version, {kVersion, kUnfittedVersion}));
  if (raw.version == kUnfittedVersion) {
    raw.spread_share = kDefaultSpreadShare;
    raw.left_out = 0;
  }
  if (!(raw.spread_share >= 0 && raw.spread_share <= 1) || raw.left_out > 1) {
    return refuse("spread share ", raw.spread_share, " left out ", raw.left_out,
                  " are out of bounds");
  }
  centre.resize(raw.head_dim);
  std::memcpy(centre.data(), blob.Address(kHeaderBytes), centre.size() * sizeof(float));
  SummaryHeader header;
  header.rows = static_cast<int64_t>(raw.rows);
  header.head_dim = raw.head_dim;
  header.cluster_rows = raw.cluster_rows;
  header.fit = {raw.spread_share, raw.left_out != 0};
  return header;
}

void SetEstimateFit(const EstimateFit& fit, std::string& blob) {
  CARREL_CHECK(static_cast<int64_t>(blob.size()) >= kHeaderBytes);
  RawHeader raw;
  std::memcpy(&raw, blob.data(), sizeof(raw));
  raw.version = kVersion;
  raw.left_out = fit.left_out ? 1 : 0;
  raw.spread_share = fit.spread_share;
  raw.crc = Crc(raw, blob.data() + kHeaderBytes);
  std::memcpy(blob.data(), &raw, sizeof(raw));
}

}  // namespace carrel::kvstore
