#include "kvstore/index/int8/int8.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/dtype.h"
#include "common/status.h"
#include "kernels/score/group_score/group_score.h"
#include "kernels/score/int8_score/int8_score.h"
#include "kernels/select/topk/topk.h"
#include "kvstore/format/keys.h"
#include "kvstore/index/index_type.h"
#include "kvstore/index/rows/blob_header.h"
#include "kvstore/index/search_util.h"

namespace carrel::kvstore {
namespace {

using kernels::kInt8BlockRows;

constexpr char kMagic[] = {'C', 'I', 'N', '8'};
constexpr uint16_t kVersion = 1;
constexpr int64_t kMaxRows = int64_t{1} << 31;
constexpr int64_t kMaxInt8HeadDim = 4096;
// Rows whose bytes tie a blob to the rows it was built from.
constexpr int64_t kInt8CheckedRows = 8;
// Heap of an open index, at most: its blob stays mapped.
constexpr int64_t kMaxInt8HeapBytes = 4096;
// Bytes verified, then scored while they are still in the cache.
constexpr int64_t kScanBytes = 256 << 10;

#pragma pack(push, 1)
struct RawHeader {
  char magic[4];
  uint16_t version;
  uint16_t reserved;
  uint64_t rows;
  uint32_t head_dim;
  uint32_t rows_crc;
  char zeros[36];
  uint32_t crc;
};
#pragma pack(pop)

absl::StatusOr<RawHeader> ReadHeader(const Blob& blob) {
  const auto refuse = [](const auto&... what) {
    return absl::DataLossError(absl::StrCat("int8 blob: ", what...));
  };
  const int64_t bytes = std::min(blob.size(), kBlobHeaderBytes);
  RETURN_IF_ERROR(blob.Verify(0, bytes));
  ASSIGN_OR_RETURN(const RawHeader raw,
                   ReadBlobHeader<RawHeader>("int8", kMagic, {kVersion}, blob.View(0, bytes)));
  const uint64_t rows = raw.rows;
  const uint32_t head_dim = raw.head_dim;
  if (rows > static_cast<uint64_t>(kMaxRows) || head_dim < 1 || head_dim > kMaxInt8HeadDim) {
    return refuse("rows=", rows, " head_dim=", head_dim, " are out of bounds");
  }
  const Int8Layout layout(static_cast<int64_t>(rows), head_dim, kIndexChunkBytes);
  if (blob.size() == layout.blob_bytes()) return raw;
  return refuse(blob.size(), " bytes instead of ", layout.blob_bytes());
}

class Int8Index : public Index {
 public:
  Int8Index(const IndexParams& params, Blob blob, Rows keys)
      : params_(params),
        layout_(keys.count(), keys.head_dim(), kIndexChunkBytes),
        blob_(std::move(blob)),
        keys_(std::move(keys)) {}

  IndexKind kind() const override { return IndexKind::kInt8; }
  int64_t resident_bytes() const override {
    return static_cast<int64_t>(sizeof(*this)) + (blob_.mapped() ? 0 : blob_.size());
  }
  absl::Status Search(const SearchRequest& request, SearchScratch& scratch,
                      SearchResult& result) const override;

 private:
  // Scores of blocks [begin, end) for every head: scratch.sample_scores [group, their rows].
  absl::Status Scan(const SearchRequest& request, int64_t begin, int64_t end,
                    SearchScratch& scratch) const;

  const IndexParams params_;
  const Int8Layout layout_;
  const Blob blob_;
  const Rows keys_;
};

absl::Status Int8Index::Scan(const SearchRequest& request, int64_t begin, int64_t end,
                             SearchScratch& s) const {
  const int64_t stride = (end - begin) * kInt8BlockRows;
  s.sample_scores.resize(static_cast<size_t>(request.group * stride));
  kernels::MakeInt8Queries(request.queries, request.group, keys_.head_dim(), request.scale,
                           s.int8_queries);
  const int64_t at_once = std::max<int64_t>(1, kScanBytes / layout_.block_bytes());
  for (int64_t block = begin; block < end;) {
    const int64_t count = std::min({at_once, end - block, layout_.Contiguous(block)});
    const int64_t offset = layout_.Offset(block);
    RETURN_IF_ERROR(blob_.Verify(offset, offset + count * layout_.block_bytes()));
    kernels::Int8Score(s.int8_queries, blob_.Address(offset), count,
                       s.sample_scores.data() + (block - begin) * kInt8BlockRows, stride);
    block += count;
  }
  return absl::OkStatus();
}

absl::Status Int8Index::Search(const SearchRequest& request, SearchScratch& s,
                               SearchResult& result) const {
  RETURN_IF_ERROR(ValidateRequest(request, keys_));
  const int64_t wanted = std::max(EffortOf(request, params_, keys_.count()), request.top_k);
  const RowRange zone = request.zone;
  const int64_t rows = zone.rows();
  if (rows <= wanted) return ScanZone(request, keys_, s, result);

  const int64_t begin = zone.begin / kInt8BlockRows;
  const int64_t end = (zone.end + kInt8BlockRows - 1) / kInt8BlockRows;
  RETURN_IF_ERROR(Scan(request, begin, end, s));
  const int64_t stride = (end - begin) * kInt8BlockRows;
  float* scores = s.sample_scores.data() + (zone.begin - begin * kInt8BlockRows);
  result.zone_scored = false;
  result.zone_lse.resize(static_cast<size_t>(request.group));
  for (int64_t h = 0; h < request.group; ++h) {
    result.zone_lse[static_cast<size_t>(h)] = kernels::LogSumExp(scores + h * stride, rows);
  }
  s.group_scores.resize(static_cast<size_t>(rows));
  kernels::GroupScore(scores, request.group, rows, stride, result.zone_lse.data(),
                      s.group_scores.data());
  s.ids.resize(static_cast<size_t>(wanted));
  s.ids.resize(static_cast<size_t>(
      kernels::TopK(s.group_scores.data(), rows, wanted, s.ids.data(), s.topk)));
  std::sort(s.ids.begin(), s.ids.end());  // read in order; ties go by id
  for (int64_t& id : s.ids) id += zone.begin;
  RETURN_IF_ERROR(ScoreIds(request, keys_, s));
  const auto found = static_cast<int64_t>(s.ids.size());
  result.visited = request.group * (rows + found);
  // Where few rows carry the sum, they are among those now known exactly.
  for (int64_t h = 0; h < request.group; ++h) {
    float& lse = result.zone_lse[static_cast<size_t>(h)];
    double exact = 0, rest = 1;
    for (int64_t i = 0; i < found; ++i) {
      const Position row = s.ids[static_cast<size_t>(i)] - zone.begin;
      exact += std::exp(double{s.scores[static_cast<size_t>(h * found + i)]} - lse);
      rest -= std::exp(double{scores[h * stride + row]} - lse);
    }
    lse = static_cast<float>(lse + std::log(exact + std::max(0.0, rest)));
  }
  SelectBest(
      request, s.scores.data(), found, result.zone_lse.data(),
      [&s](int64_t i) { return static_cast<Position>(s.ids[static_cast<size_t>(i)]); }, s, result);
  return absl::OkStatus();
}

class Int8Type final : public IndexType {
 public:
  absl::string_view name() const override { return "int8"; }
  std::string Describe(const IndexParams&) const override { return "every row scored in 8 bits"; }

  absl::StatusOr<std::string> Build(const IndexParams&, const Rows& keys, const SampledQueries*,
                                    Accelerator*) const override {
    const int64_t d = keys.head_dim();
    if (d > kMaxInt8HeadDim) {
      return absl::InvalidArgumentError(
          absl::StrCat("int8: head_dim=", d, ", must be at most ", kMaxInt8HeadDim));
    }
    RETURN_IF_ERROR(keys.Verify({0, keys.count()}));
    RawHeader raw = {};
    raw.version = kVersion;
    raw.rows = static_cast<uint64_t>(keys.count());
    raw.head_dim = static_cast<uint32_t>(d);
    ASSIGN_OR_RETURN(raw.rows_crc, RowsCrc(keys, kInt8CheckedRows));
    SealBlobHeader(kMagic, raw);
    const Int8Layout layout(keys.count(), d, kIndexChunkBytes);
    std::string blob(static_cast<size_t>(layout.blob_bytes()), '\0');
    std::memcpy(blob.data(), &raw, sizeof(raw));
    std::vector<float> wide(static_cast<size_t>(kInt8BlockRows * d));
    for (int64_t block = 0; block < layout.blocks(); ++block) {
      const Position at = block * kInt8BlockRows;
      const int64_t count = std::min(kInt8BlockRows, keys.count() - at);
      keys.ForEachPiece({at, at + count}, [&](Position first, const void* rows, int64_t part) {
        WidenToFloat(DType::kBf16, rows, part * d, &wide[static_cast<size_t>((first - at) * d)]);
      });
      kernels::PackInt8(wide.data(), count, d, blob.data() + layout.Offset(block));
    }
    return blob;
  }
  absl::StatusOr<std::unique_ptr<Index>> Open(const IndexParams& params, Blob blob,
                                              Rows keys) const override {
    ASSIGN_OR_RETURN(const RawHeader header, ReadHeader(blob));
    const auto rows = static_cast<int64_t>(header.rows);
    const int64_t head_dim = header.head_dim;
    RETURN_IF_ERROR(
        CheckBuiltOver("int8", rows, head_dim, header.rows_crc, keys, kInt8CheckedRows));
    return std::make_unique<Int8Index>(params, std::move(blob), std::move(keys));
  }

  absl::string_view effort_word() const override { return "rows scored exactly"; }
  int64_t DefaultEffort(const IndexParams&, int64_t top_k, int64_t) const override {
    return std::max<int64_t>(64, 2 * top_k);
  }

  double SearchNs(const IndexParams&, const SearchResult& result, int64_t group,
                  int64_t zone_rows) const override {
    const auto scanned = static_cast<double>(group * zone_rows);
    return kInOrder8BitNs * scanned + kAtRandomNs * (static_cast<double>(result.visited) - scanned);
  }
  int64_t BytesPerKey(const IndexParams&, int64_t head_dim) const override { return head_dim + 4; }
  int64_t HeapBytes(int64_t blob_bytes) const override {
    return std::min(blob_bytes, kMaxInt8HeapBytes);
  }

 private:
  static constexpr double kInOrder8BitNs = 1.2;  // as kInOrderNs
};

}  // namespace

Int8Layout::Int8Layout(int64_t rows, int64_t head_dim, int64_t chunk_bytes)
    : blocks_((rows + kInt8BlockRows - 1) / kInt8BlockRows),
      block_bytes_(kernels::Int8BlockBytes(head_dim)),
      chunk_bytes_(chunk_bytes),
      chunk_blocks_((chunk_bytes - kFirst) / block_bytes_) {}

const IndexType& Int8IndexType() {
  static const Int8Type type;
  return type;
}

}  // namespace carrel::kvstore
