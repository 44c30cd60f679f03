#include "kvstore/index/code/code.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/lab.h"
#include "common/status.h"
#include "kernels/score/dot_score/dot_score.h"
#include "kernels/score/group_score/group_score.h"
#include "kvstore/format/keys.h"
#include "kvstore/index/code/code_blob.h"
#include "kvstore/index/index_type.h"
#include "kvstore/index/search_util.h"

namespace carrel::kvstore {
namespace {

using kernels::kCodeBlockKeys;

constexpr int16_t kLowest = INT16_MIN;  // no row's score: such rows are never found
// A row scored exactly costs as much as this many rows read in order.
constexpr int64_t kScanRowsPerEffort = 4;
// Blocks whose scores stand for the zone: they set the heads' bases and the first bar.
constexpr int64_t kSampleBlocks = 32;
// Blocks scored at a time: their scores stay in the L1 cache.
constexpr int64_t kScanBlocks = 32;
// What AppendAbove wants beyond the rows that it may append.
constexpr int64_t kAppendRoom = 64;
// The first bar lets through this many times what is wanted, by the sample.
constexpr double kBarSlack = 1.25;
// Heap of an open index, at most: W, D and mean at 256 bits and the largest head_dim.
constexpr int64_t kMaxCodeHeapBytes = int64_t{16} << 20;
// By number.
constexpr absl::string_view kTrainings[] = {"off", "staged", "hata"};
constexpr absl::string_view kScans[] = {"asymmetric", "symmetric"};

class CodeIndex : public Index {
 public:
  CodeIndex(const IndexParams& params, const CodeHeader& header, CodeDecoder decoder, Blob blob,
            Rows keys)
      : params_(params),
        header_(header),
        blocks_offset_(CodeBlocksOffset(header)),
        block_bytes_(kernels::CodeBlockBytes(header.bits)),
        decoder_(std::move(decoder)),
        blob_(std::move(blob)),
        keys_(std::move(keys)) {}

  IndexKind kind() const override { return IndexKind::kCode; }
  int64_t resident_bytes() const override {
    return static_cast<int64_t>(sizeof(*this) + decoder_.centre.size() * 4 +
                                (decoder_.decoder.size() + decoder_.hash.size()) * 2) +
           (blob_.mapped() ? 0 : blob_.size());
  }
  absl::Status Search(const SearchRequest& request, SearchScratch& scratch,
                      SearchResult& result) const override;

 private:
  struct Scan {
    const SearchRequest& request;
    SearchScratch& s;
    int64_t wanted;  // rows to score exactly
    int16_t bar = kLowest;
    int64_t found = 0;
  };

  bool symmetric() const { return params_.code_scan == CodeScan::kSymmetric; }
  const void* Blocks(int64_t first, int64_t count, absl::Status& status) const;
  void PrepareTables(Scan& scan) const;
  void ScoreBlocks(const SearchScratch& s, const void* blocks, int64_t count, int16_t* out) const;
  absl::Status ReadSample(Scan& scan) const;
  int64_t SampleBlock(const Scan& scan, int64_t i) const;
  absl::Status ScanCodes(Scan& scan) const;
  void TakeAbove(Scan& scan, Position first, int64_t n) const;

  const IndexParams params_;
  const CodeHeader header_;
  const int64_t blocks_offset_, block_bytes_;
  const CodeDecoder decoder_;
  const Blob blob_;
  const Rows keys_;
};

void Enlarge(SearchScratch& s, int64_t rows) {
  if (static_cast<int64_t>(s.above.size()) < rows) s.above.resize(static_cast<size_t>(rows));
  if (static_cast<int64_t>(s.above_scores.size()) < rows) {
    s.above_scores.resize(static_cast<size_t>(rows));
  }
}

// The `wanted` best of the first `count` of scratch.above stay, ascending; the bar rises to the worst
// of them. Returns how many stay.
int64_t CutToBest(SearchScratch& s, int64_t count, int64_t wanted, int16_t& bar) {
  if (count <= wanted) return count;
  constexpr int kBins = 1024;
  int16_t* const scores = s.above_scores.data();
  uint32_t* const rows = s.above.data();
  const auto [least, most] = std::minmax_element(scores, scores + count);
  const int32_t low = *least, high = *most;
  int shift = 0;
  while ((high - low) >> shift >= kBins) ++shift;
  int64_t bins[kBins] = {};
  for (int64_t i = 0; i < count; ++i) ++bins[(scores[i] - low) >> shift];
  int bin = kBins - 1;
  int64_t better = 0;
  while (better + bins[bin] <= wanted) better += bins[bin--];
  // Of the bin in which the cut lies, the best by score, then by id.
  s.ties.clear();
  const auto rank = [&](int64_t i) {
    return static_cast<uint64_t>(static_cast<uint16_t>(INT16_MAX - scores[i])) << 32 | rows[i];
  };
  for (int64_t i = 0; i < count; ++i) {
    if ((scores[i] - low) >> shift == bin) s.ties.push_back(rank(i));
  }
  const int64_t places = wanted - better;
  uint64_t last = 0;
  const bool some = places > 0;
  if (some) {
    std::nth_element(s.ties.begin(), s.ties.begin() + places - 1, s.ties.end());
    last = s.ties[static_cast<size_t>(places - 1)];
  }
  int64_t kept = 0;
  int16_t worst = INT16_MAX;
  for (int64_t i = 0; i < count; ++i) {
    const int at = (scores[i] - low) >> shift;
    const bool stays = (at > bin) | ((at == bin) & some & (rank(i) <= last));
    worst = std::min(worst, stays ? scores[i] : worst);
    // Written in any case: whether it stays is not foreseen.
    rows[kept] = rows[i];
    scores[kept] = scores[i];
    kept += stays;
  }
  bar = worst;
  return kept;
}

// Verified.
const void* CodeIndex::Blocks(int64_t first, int64_t count, absl::Status& status) const {
  const int64_t begin = blocks_offset_ + first * block_bytes_;
  status = blob_.Verify(begin, begin + count * block_bytes_);
  return blob_.Address(begin);
}

void CodeIndex::PrepareTables(Scan& scan) const {
  const SearchRequest& r = scan.request;
  SearchScratch& s = scan.s;
  s.scores.resize(static_cast<size_t>(r.group * header_.bits));
  kernels::DotScore(r.queries, r.group, header_.head_dim, decoder_.decoder.data(), header_.bits,
                    r.scale, s.scores.data(), header_.bits);
  kernels::MakeCodeTables(s.scores.data(), r.group, header_.bits, s.tables);
  if (!symmetric()) return;
  if (!decoder_.hash.empty()) {  // else the products are those with the decoder
    kernels::DotScore(r.queries, r.group, header_.head_dim, decoder_.hash.data(), header_.bits,
                      1.0f, s.scores.data(), header_.bits);
  }
  kernels::MakeHammingTables(s.scores.data(), r.group, header_.bits, s.hamming);
}

// What orders the rows: the best head's score, or the bits that agree over the heads.
void CodeIndex::ScoreBlocks(const SearchScratch& s, const void* blocks, int64_t count,
                            int16_t* out) const {
  if (symmetric()) return kernels::BlockHammingScore(s.hamming, blocks, count, out);
  kernels::CodeScore(s.tables, blocks, count, out);
}

int64_t CodeIndex::SampleBlock(const Scan& scan, int64_t i) const {
  const int64_t first = (scan.request.zone.begin + kCodeBlockKeys - 1) / kCodeBlockKeys;
  const int64_t whole = scan.request.zone.end / kCodeBlockKeys - first;
  return first + i * whole / kSampleBlocks;
}

// Scores of the sample's blocks: each head's totals become its base and, kept in scratch.scores as
// scores, its part of the lse; their maximum over the group, in scratch.codes, the first bar.
absl::Status CodeIndex::ReadSample(Scan& scan) const {
  const SearchRequest& r = scan.request;
  SearchScratch& s = scan.s;
  constexpr int64_t kSamples = kSampleBlocks * kCodeBlockKeys;
  s.codes.resize(static_cast<size_t>(std::max(r.group * kSamples, kScanBlocks * kCodeBlockKeys)));
  for (int64_t i = 0; i < kSampleBlocks; ++i) {
    absl::Status status;
    const void* block = Blocks(SampleBlock(scan, i), 1, status);
    RETURN_IF_ERROR(status);
    kernels::CodeTotals(s.tables, block, 1, s.codes.data() + i * kCodeBlockKeys, kSamples);
  }
  s.scores.resize(static_cast<size_t>(r.group * kSamples));
  s.base.resize(static_cast<size_t>(r.group));
  std::vector<float>& offset = s.group_scores;
  offset.resize(static_cast<size_t>(r.group));
  const float spread = std::log(static_cast<float>(r.zone.rows()) / kSamples);
  for (int64_t h = 0; h < r.group; ++h) {
    const float* q = r.queries + h * header_.head_dim;
    float norm = 0, on_centre = 0;
    for (int64_t c = 0; c < header_.head_dim; ++c) {
      norm += q[c] * q[c];
      on_centre += q[c] * decoder_.centre[static_cast<size_t>(c)];
    }
    // The estimate is the mean of a score given its code: the mean of the exponential is more. Not
    // without bound: errors are less Gaussian the larger they are.
    const float noise = std::min(2.0f, 0.5f * header_.error_ratio * norm * r.scale * r.scale);
    const float least = r.scale * on_centre - s.tables.sum[static_cast<size_t>(h)];
    const float step = s.tables.step[static_cast<size_t>(h)];
    float* scores = s.scores.data() + h * kSamples;
    for (int64_t j = 0; j < kSamples; ++j) {
      scores[j] = least + step * s.codes[static_cast<size_t>(h * kSamples + j)] + noise + spread;
    }
    s.base[static_cast<size_t>(h)] = kernels::LogSumExp(scores, kSamples);
    offset[static_cast<size_t>(h)] = r.scale * on_centre - s.base[static_cast<size_t>(h)];
  }
  kernels::SetCodeOffsets(offset.data(), s.tables);
  for (int64_t i = 0; i < kSampleBlocks; ++i) {
    absl::Status status;
    const void* block = Blocks(SampleBlock(scan, i), 1, status);
    RETURN_IF_ERROR(status);
    ScoreBlocks(s, block, 1, s.codes.data() + i * kCodeBlockKeys);
  }
  // The rank in the sample that stands for what is wanted of the zone.
  const double share = static_cast<double>(scan.wanted) / static_cast<double>(r.zone.rows());
  const auto rank = static_cast<int64_t>(share * kBarSlack * kSamples) + 8;
  if (rank < kSamples) {
    std::vector<int16_t>& sorted = s.above_scores;
    sorted.assign(s.codes.begin(), s.codes.begin() + kSamples);
    std::nth_element(sorted.begin(), sorted.begin() + rank, sorted.end(), std::greater<>());
    scan.bar = sorted[static_cast<size_t>(rank)];
    if (symmetric()) --scan.bar;  // many rows have this very score: they may be wanted
  }
  return absl::OkStatus();
}

// The wanted best by estimate: the first scan.found of scratch.above, which keeps its length.
absl::Status CodeIndex::ScanCodes(Scan& scan) const {
  const RowRange zone = scan.request.zone;
  SearchScratch& s = scan.s;
  scan.found = 0;
  const int64_t room = 2 * scan.wanted + kScanBlocks * kCodeBlockKeys;
  Enlarge(s, room + kScanBlocks * kCodeBlockKeys + kAppendRoom);
  std::vector<int16_t>& scores = s.codes;
  const int64_t end = (zone.end + kCodeBlockKeys - 1) / kCodeBlockKeys;
  const int64_t chunk_blocks = kIndexChunkBytes / block_bytes_;
  const int64_t skipped = blocks_offset_ / block_bytes_;
  for (int64_t block = zone.begin / kCodeBlockKeys; block < end;) {
    // Blocks lie contiguously up to the end of a chunk of the blob.
    const int64_t contiguous = chunk_blocks - (block + skipped) % chunk_blocks;
    const int64_t count = std::min({kScanBlocks, end - block, contiguous});
    absl::Status status;
    const void* codes = Blocks(block, count, status);
    RETURN_IF_ERROR(status);
    ScoreBlocks(s, codes, count, scores.data());
    const Position first = block * kCodeBlockKeys;
    const int64_t n = count * kCodeBlockKeys;
    for (Position j = first; j < std::min(zone.begin, first + n); ++j) scores[j - first] = kLowest;
    for (Position j = std::max(zone.end, first); j < first + n; ++j) scores[j - first] = kLowest;
    TakeAbove(scan, first, n);
    if (scan.found > room) scan.found = CutToBest(s, scan.found, scan.wanted, scan.bar);
    block += count;
  }
  scan.found = CutToBest(s, scan.found, scan.wanted, scan.bar);
  return absl::OkStatus();
}

// Of n rows from `first` on, whose scores are in scratch.codes, those above the bar.
void CodeIndex::TakeAbove(Scan& scan, Position first, int64_t n) const {
  SearchScratch& s = scan.s;
  uint32_t* const rows = s.above.data() + scan.found;
  int64_t written = 0;
  kernels::AppendAbove(s.codes.data(), 0, n, scan.bar, rows, n + kAppendRoom, &written);
  int16_t* const scores = s.above_scores.data() + scan.found;
  for (int64_t i = 0; i < written; ++i) {
    scores[i] = s.codes[rows[i]];
    rows[i] += static_cast<uint32_t>(first);
  }
  scan.found += written;
}

absl::Status CodeIndex::Search(const SearchRequest& request, SearchScratch& s,
                               SearchResult& result) const {
  RETURN_IF_ERROR(ValidateRequest(request, keys_));
  Scan scan{request, s, std::max(EffortOf(request, params_, keys_.count()), request.top_k)};
  const int64_t zone = request.zone.rows();
  if (zone <= std::max(scan.wanted * kScanRowsPerEffort, 2 * kSampleBlocks * kCodeBlockKeys)) {
    return ScanZone(request, keys_, s, result);
  }
  if (symmetric() && request.group > kernels::kMaxHammingGroup) {
    return absl::InvalidArgumentError(absl::StrCat("search: group=", request.group,
                                                   ", a symmetric scan of codes takes at most ",
                                                   kernels::kMaxHammingGroup, " queries"));
  }
  PrepareTables(scan);
  RETURN_IF_ERROR(ReadSample(scan));
  // What the sample adds to each head's sum, by the group score up to which rows are not found.
  constexpr int64_t kSamples = kSampleBlocks * kCodeBlockKeys;
  s.sample_scores.assign(s.scores.begin(), s.scores.begin() + request.group * kSamples);
  s.sample_codes.assign(s.codes.begin(), s.codes.begin() + kSamples);
  const bool barred = scan.bar > kLowest;
  RETURN_IF_ERROR(ScanCodes(scan));
  if (barred && scan.found < scan.wanted) {
    scan.bar = kLowest;  // the sample promised too much
    RETURN_IF_ERROR(ScanCodes(scan));
  }
  const int64_t found = scan.found;
  s.scores.resize(static_cast<size_t>(request.group * found));
  RETURN_IF_ERROR(ScoreRows(request, keys_, s.above.data(), found, s, s.scores.data()));
  result.visited = request.group * (zone + found);
  result.zone_scored = false;
  result.zone_lse.resize(static_cast<size_t>(request.group));
  for (int64_t h = 0; h < request.group; ++h) {
    float* rest = s.sample_scores.data() + h * kSamples;
    int64_t count = 0;
    for (int64_t j = 0; j < kSamples; ++j) {
      rest[count] = rest[j];
      count += s.sample_codes[static_cast<size_t>(j)] <= scan.bar;
    }
    const float kept = kernels::LogSumExp(s.scores.data() + h * found, found);
    const float others = kernels::LogSumExp(rest, count);
    const float more = std::max(kept, others), less = std::min(kept, others);
    result.zone_lse[static_cast<size_t>(h)] = more + std::log1p(std::exp(less - more));
  }
  SelectBest(
      request, s.scores.data(), found, result.zone_lse.data(),
      [&s](int64_t i) { return static_cast<Position>(s.above[static_cast<size_t>(i)]); }, s,
      result);
  return absl::OkStatus();
}

class CodeType final : public IndexType {
 public:
  absl::string_view name() const override { return "code"; }
  std::string Describe(const IndexParams& params) const override {
    return absl::StrCat(
        params.code_bits, " bits, ",
        learns(params) ? absl::StrCat("learned (", TrainingOf(params), ")") : "random",
        " directions, ", CodeScanName(params.code_scan), " scan");
  }
  std::vector<IndexField> Fields(const IndexParams& params) const override {
    return {{"code_bits", params.code_bits},
            {"code_training", static_cast<int64_t>(params.code_training), TrainingOf(params)},
            {"code_scan", static_cast<int64_t>(params.code_scan), CodeScanName(params.code_scan)}};
  }
  absl::Status Validate(const IndexParams& params) const override {
    RETURN_IF_ERROR(CheckIndexField("code_training", static_cast<int>(params.code_training), 0,
                                    static_cast<int>(CodeTraining::kHata)));
    RETURN_IF_ERROR(CheckIndexField("code_scan", static_cast<int>(params.code_scan), 0,
                                    static_cast<int>(CodeScan::kSymmetric)));
    if (params.code_bits == 64 || params.code_bits == 128 || params.code_bits == 256) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(
        absl::StrCat("index: code_bits=", params.code_bits, ", must be 64, 128 or 256"));
  }

  absl::Status CheckBuild(const IndexParams& params) const override {
    if (params.code_training != CodeTraining::kHata) return absl::OkStatus();
    return CheckLab("code-train=hata");
  }
  absl::StatusOr<std::string> Build(const IndexParams& params, const Rows& keys,
                                    const SampledQueries* queries,
                                    Accelerator* accelerator) const override {
    return BuildCode(params, keys, queries, accelerator);
  }
  absl::StatusOr<std::unique_ptr<Index>> Open(const IndexParams& params, Blob blob,
                                              Rows keys) const override {
    CodeDecoder decoder;
    ASSIGN_OR_RETURN(const CodeHeader header, DecodeCodeBlob(blob, decoder));
    if (header.bits != params.code_bits || header.training != params.code_training) {
      return absl::InvalidArgumentError(absl::StrCat(
          "code blob was built with bits=", header.bits,
          " training=", CodeTrainingName(header.training), ", not bits=", params.code_bits,
          " training=", CodeTrainingName(params.code_training)));
    }
    RETURN_IF_ERROR(CheckBuiltOver("code", header.rows, header.head_dim, header.rows_crc, keys,
                                   kCodeCheckedRows));
    return std::make_unique<CodeIndex>(params, header, std::move(decoder), std::move(blob),
                                       std::move(keys));
  }
  bool reads_few() const override { return true; }
  bool automatic() const override { return true; }
  bool learns(const IndexParams& params) const override {
    return params.code_training != CodeTraining::kOff;
  }

  absl::string_view effort_word() const override { return "rows scored exactly"; }
  int64_t DefaultEffort(const IndexParams&, int64_t top_k, int64_t) const override {
    return std::max<int64_t>(512, 4 * top_k);
  }

  double SearchNs(const IndexParams& params, const SearchResult& result, int64_t group,
                  int64_t zone_rows) const override {
    const auto scanned = static_cast<double>(group * zone_rows);
    return kAsCodeNs * params.code_bits / 128 * scanned +
           kAtRandomNs * (static_cast<double>(result.visited) - scanned);
  }
  int64_t BytesPerKey(const IndexParams& params, int64_t) const override {
    return params.code_bits / 8 + 1;
  }
  // The decoder, of hata twice; blocks are whole.
  int64_t FixedBytes(const IndexParams& params, int64_t head_dim) const override {
    const int64_t decoders = params.code_training == CodeTraining::kHata ? 2 : 1;
    return 4096 + decoders * 2 * params.code_bits * head_dim;
  }
  // What is kept beside the mapped blob.
  int64_t HeapBytes(int64_t blob_bytes) const override {
    return std::min(blob_bytes, kMaxCodeHeapBytes);
  }

 private:
  static constexpr double kAsCodeNs = 0.2;  // as kInOrderNs, of 128 bits

  static absl::string_view TrainingOf(const IndexParams& params) {
    return CodeTrainingName(params.code_training);
  }
};

}  // namespace

absl::StatusOr<CodeTraining> ParseCodeTraining(absl::string_view name) {
  for (size_t i = 0; i < std::size(kTrainings); ++i) {
    if (name == kTrainings[i]) return static_cast<CodeTraining>(i);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("index: code_training=\"", name, "\", must be off, staged or hata"));
}

absl::string_view CodeTrainingName(CodeTraining training) {
  const auto i = static_cast<size_t>(training);
  return i < std::size(kTrainings) ? kTrainings[i] : "unknown";
}

absl::StatusOr<CodeScan> ParseCodeScan(absl::string_view name) {
  for (size_t i = 0; i < std::size(kScans); ++i) {
    if (name == kScans[i]) return static_cast<CodeScan>(i);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("index: code_scan=\"", name, "\", must be asymmetric or symmetric"));
}

absl::string_view CodeScanName(CodeScan scan) {
  const auto i = static_cast<size_t>(scan);
  return i < std::size(kScans) ? kScans[i] : "unknown";
}

const IndexType& CodeIndexType() {
  static const CodeType type;
  return type;
}

}  // namespace carrel::kvstore
