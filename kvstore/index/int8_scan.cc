#include "kvstore/index/int8_scan.h"

#include <sys/mman.h>

#include <algorithm>
#include <span>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "common/dtype.h"
#include "common/status.h"
#include "kernels/score/dot_score/dot_score.h"
#include "kernels/score/group_score/group_score.h"
#include "kernels/select/topk/topk.h"
#include "kvstore/index/search_util.h"

namespace carrel::kvstore {
namespace {

using kernels::kInt8BlockRows;

// Below it a scan of the stored keys takes microseconds.
constexpr int64_t kLeastRows = 1024;
// Rows per wanted one: of fewer, so many remain to be scored exactly that the rest saves less.
constexpr int64_t kRowsPerWanted = 8;
// Blocks that a thread takes at a time: of heads that are few each core is to have a part, and parts whose sums
// are merged are not to be many. By the zone and the shape alone, for sums follow them.
constexpr int64_t kPartBytes = 128 << 10;
int64_t PartBlocks(int64_t blocks, int64_t block_bytes) {
  const int64_t most = std::max<int64_t>(1, kPartBytes / block_bytes);
  return std::clamp<int64_t>(blocks / 128, std::min<int64_t>(32, most), most);
}
// Rows that a thread scores as they are stored at a time: some microseconds.
constexpr int64_t kExactRows = 128;
// Blocks that are packed before they are scored, where they are not kept.
constexpr int64_t kBufferBlocks = 16;
constexpr int64_t kPageBytes = 4096;

}  // namespace

bool Int8ScanPays(int64_t zone_rows, int64_t top_k) {
  return top_k >= 1 && zone_rows >= kLeastRows && top_k <= zone_rows / kRowsPerWanted;
}

std::shared_ptr<Int8Memory> Int8Memory::Make(int64_t heads, int64_t rows, int64_t head_dim) {
  const int64_t blocks = (rows + kInt8BlockRows - 1) / kInt8BlockRows;
  const int64_t bytes = blocks * kernels::Int8BlockBytes(head_dim);
  const int64_t piece_bytes = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  if (heads < 1 || piece_bytes == 0) return nullptr;
  const auto all = static_cast<size_t>(heads * piece_bytes);
  void* const memory = mmap(nullptr, all, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  (void)madvise(memory, all, MADV_HUGEPAGE);  // speed alone
  return std::shared_ptr<Int8Memory>(
      new Int8Memory(heads, piece_bytes, static_cast<uint8_t*>(memory)));
}

Int8Memory::Int8Memory(int64_t heads, int64_t piece_bytes, uint8_t* bytes)
    : piece_bytes_(piece_bytes), bytes_(bytes), taken_(static_cast<size_t>(heads)) {}

Int8Memory::~Int8Memory() { munmap(bytes_, taken_.size() * static_cast<size_t>(piece_bytes_)); }

Int8Memory::Piece Int8Memory::Take(const std::shared_ptr<Int8Memory>& memory, int64_t head) {
  if (memory == nullptr || memory->taken_[static_cast<size_t>(head)].exchange(true)) return {};
  return Piece(memory, head);
}

Int8Memory::Piece::~Piece() {
  if (memory_ == nullptr) return;
  (void)madvise(data(), static_cast<size_t>(memory_->piece_bytes_), MADV_DONTNEED);
  memory_->taken_[static_cast<size_t>(head_)] = false;
}

Int8Scan::Int8Scan(Rows keys, Int8Memory::Piece piece)
    : keys_(std::move(keys)),
      block_bytes_(kernels::Int8BlockBytes(keys_.head_dim())),
      piece_(std::move(piece)) {
  if (!piece_.empty()) errors_.resize(static_cast<size_t>(LastBlock({0, keys_.count()})));
}

int64_t Int8Scan::resident_bytes() const {
  const auto blocks = static_cast<int64_t>(errors_.size());
  return blocks * (block_bytes_ + static_cast<int64_t>(sizeof(kernels::Int8Error)));
}

struct Int8Scan::Pass {
  RowRange zone;
  Blocks kept;  // of the zone's whole blocks, when it began
  Blocks keep;  // and when it ends
  const kernels::Int8Queries& queries;
  float* scores;
};

Int8Scan::Blocks Int8Scan::WholeBlocks(RowRange zone) const {
  const int64_t begin = (zone.begin + kInt8BlockRows - 1) / kInt8BlockRows;
  const int64_t end = zone.end == keys_.count() ? LastBlock(zone) : zone.end / kInt8BlockRows;
  return {begin, std::max(begin, end)};
}

kernels::Int8Error Int8Scan::PackBlock(int64_t block, RowRange zone, float* wide,
                                       uint8_t* to) const {
  const Position first = block * kInt8BlockRows;
  const RowRange rows = {std::max(first, zone.begin), std::min(first + kInt8BlockRows, zone.end)};
  const int64_t d = keys_.head_dim();
  std::fill_n(wide, (rows.begin - first) * d, 0.0f);
  keys_.ForEachPiece(rows, [&](Position at, const void* keys, int64_t count) {
    WidenToFloat(DType::kBf16, keys, count * d, wide + (at - first) * d);
  });
  return kernels::PackInt8(wide, rows.end - first, d, to);
}

absl::Status Int8Scan::ScorePart(const Pass& pass, Blocks part, kernels::Int8Error& error) const {
  thread_local std::vector<float> wide;
  thread_local std::vector<uint8_t> buffer;
  const RowRange zone = pass.zone;
  const int64_t first = zone.begin / kInt8BlockRows;
  RETURN_IF_ERROR(keys_.Verify({std::max(zone.begin, part.begin * kInt8BlockRows),
                                std::min(zone.end, part.end * kInt8BlockRows)}));
  for (int64_t block = part.begin; block < part.end;) {
    const uint8_t* blocks = nullptr;
    int64_t end = block;
    if (pass.kept.Has(block)) {
      end = std::min(part.end, pass.kept.end);
      blocks = piece_.data() + block * block_bytes_;
      for (int64_t i = block; i < end; ++i) error.Add(errors_[static_cast<size_t>(i)]);
    } else {
      const bool keep = pass.keep.Has(block);
      wide.resize(static_cast<size_t>(kInt8BlockRows * keys_.head_dim()));
      buffer.resize(static_cast<size_t>(kBufferBlocks * block_bytes_));
      uint8_t* const to = keep ? piece_.data() + block * block_bytes_ : buffer.data();
      const int64_t last = std::min(part.end, block + kBufferBlocks);
      for (; end < last && !pass.kept.Has(end) && pass.keep.Has(end) == keep; ++end) {
        const kernels::Int8Error of_block =
            PackBlock(end, zone, wide.data(), to + (end - block) * block_bytes_);
        error.Add(of_block);
        if (keep) errors_[static_cast<size_t>(end)] = of_block;
      }
      blocks = to;
    }
    kernels::Int8Score(pass.queries, blocks, end - block,
                       pass.scores + (block - first) * kInt8BlockRows, Stride(zone));
    block = end;
  }
  return absl::OkStatus();
}

void Int8Scan::SumPart(const Pass& pass, Blocks part, kernels::LsePart* sums) const {
  const Position first = pass.zone.begin / kInt8BlockRows * kInt8BlockRows;
  const Position begin = std::max(pass.zone.begin, part.begin * kInt8BlockRows);
  const Position end = std::min(pass.zone.end, part.end * kInt8BlockRows);
  for (int64_t i = 0; i < pass.queries.group; ++i) {
    const float* const scores = pass.scores + i * Stride(pass.zone) + (begin - first);
    sums[i] = kernels::LsePartOf(scores, end - begin);
  }
}

absl::Status Int8Scan::Score(const float* queries, int64_t vectors, float scale, RowRange zone,
                             ThreadPool* pool, float* scores, float* lse,
                             kernels::Int8Error& error) const {
  thread_local kernels::Int8Queries packed;
  kernels::MakeInt8Queries(queries, vectors, keys_.head_dim(), scale, packed);
  const Blocks of_zone = {zone.begin / kInt8BlockRows, LastBlock(zone)};
  const bool adds = !piece_.empty() && !adding_.exchange(true, std::memory_order_acquire);
  const absl::Cleanup done = [&] {
    if (adds) adding_.store(false, std::memory_order_release);
  };
  // Blocks with rows outside the zone, which are not looked at, are packed for each scan.
  const Blocks whole = WholeBlocks(zone), kept = Kept();
  const Blocks both = {std::max(whole.begin, kept.begin), std::min(whole.end, kept.end)};
  Blocks all = kept;
  if (kept.begin == kept.end) {
    all = whole;
  } else if (both.begin <= both.end) {  // one run
    all = {std::min(kept.begin, whole.begin), std::max(kept.end, whole.end)};
  }
  const bool more = adds && (all.begin != kept.begin || all.end != kept.end);
  const Pass pass = {zone, both, more ? whole : both, packed, scores};
  const int64_t part_blocks = PartBlocks(of_zone.end - of_zone.begin, block_bytes_);
  const int64_t parts = (of_zone.end - of_zone.begin + part_blocks - 1) / part_blocks;
  std::vector<kernels::Int8Error> errors(static_cast<size_t>(parts));
  std::vector<kernels::LsePart> sums(static_cast<size_t>(parts * vectors));
  keys_.AskAhead(zone);
  RETURN_IF_ERROR(ForEachPart(
      pool, {of_zone.begin, of_zone.end}, part_blocks, [&](RowRange range) -> absl::Status {
        const Blocks blocks = {range.begin, range.end};
        const int64_t part = (range.begin - of_zone.begin) / part_blocks;
        RETURN_IF_ERROR(ScorePart(pass, blocks, errors[static_cast<size_t>(part)]));
        SumPart(pass, blocks, &sums[static_cast<size_t>(part * vectors)]);
        return absl::OkStatus();
      }));
  for (int64_t i = 0; i < vectors; ++i) lse[i] = kernels::LogSumExp(&sums[i], parts, vectors);
  error = {};
  for (const kernels::Int8Error& of_part : errors) error.Add(of_part);
  if (more) {
    kept_.store(static_cast<uint64_t>(all.begin) << 32 | static_cast<uint64_t>(all.end),
                std::memory_order_release);
  }
  return absl::OkStatus();
}

absl::Status Int8Scan::Search(const SearchRequest& request, SearchScratch& s,
                              SearchResult& result) const {
  RETURN_IF_ERROR(ValidateRequest(request, keys_));
  const RowRange zone = request.zone;
  const int64_t rows = zone.rows(), group = request.group, d = keys_.head_dim();
  if (request.exact_lse || !Int8ScanPays(rows, request.top_k)) {
    return ScanZone(request, keys_, s, result);
  }
  result.zone_lse.resize(static_cast<size_t>(group));
  Int8ZoneScores of_zone;
  if (request.int8_scores != nullptr) {
    of_zone = *request.int8_scores;
    std::copy_n(of_zone.lse, group, result.zone_lse.begin());
  } else {
    of_zone.stride = Stride(zone);
    s.sample_scores.resize(static_cast<size_t>(group * of_zone.stride));
    RETURN_IF_ERROR(Score(request.queries, group, request.scale, zone, request.pool,
                          s.sample_scores.data(), result.zone_lse.data(), of_zone.error));
    of_zone.scores = s.sample_scores.data() + Offset(zone);
  }
  result.zone_scored = false;
  s.errors.resize(static_cast<size_t>(group));
  for (int64_t h = 0; h < group; ++h) {
    s.errors[static_cast<size_t>(h)] =
        kernels::Int8ScoreError(of_zone.error, request.queries + h * d, d, request.scale);
  }
  return SelectWithin(of_zone, request, s, result);
}

absl::Status Int8Scan::SelectWithin(const Int8ZoneScores& of_zone, const SearchRequest& request,
                                    SearchScratch& s, SearchResult& result) const {
  const RowRange zone = request.zone;
  const auto group = static_cast<size_t>(request.group);
  const float* const base = result.zone_lse.data();
  // Rows of the zone into s.ids, behind those there, as the context has them; their scores, [group, rows],
  // and their group scores behind the others'.
  const auto score = [&](std::span<const int64_t> rows) -> absl::Status {
    if (rows.empty()) return absl::OkStatus();
    const size_t before = s.ids.size(), count = rows.size();
    for (const int64_t row : rows) s.ids.push_back(zone.begin + row);
    s.scores.resize(std::max(s.scores.size(), group * s.ids.size()));
    s.placed.resize(s.ids.size());
    float* const scores = s.scores.data() + group * before;
    float* const group_scores = s.placed.data() + before;
    const int64_t* const ids = s.ids.data() + before;
    const auto n = static_cast<int64_t>(count);
    return ForEachPart(request.pool, {0, n}, kExactRows, [&](RowRange part) -> absl::Status {
      const void* keys[kExactRows];
      RETURN_IF_ERROR(keys_.VerifyRows(ids + part.begin, part.rows()));
      for (int64_t i = 0; i < part.rows(); ++i) keys[i] = keys_.Address(ids[part.begin + i]);
      kernels::DotScoreRows(request.queries, request.group, keys_.head_dim(), keys, part.rows(),
                            request.scale, scores + part.begin, n);
      kernels::GroupScore(scores + part.begin, request.group, part.rows(), n, base,
                          group_scores + part.begin);
      return absl::OkStatus();
    });
  };
  s.ids.clear();
  RETURN_IF_ERROR(score(s.bounded.First({.scores = of_zone.scores,
                                         .group = request.group,
                                         .rows = zone.rows(),
                                         .stride = of_zone.stride,
                                         .base = base,
                                         .error = s.errors.data()},
                                        request.top_k, request.pool)));
  const size_t first = s.ids.size();
  const auto found = static_cast<int64_t>(first);
  RETURN_IF_ERROR(
      score(s.bounded.Others(kernels::KthLargest(s.placed.data(), found, request.top_k))));
  result.visited = request.group * (zone.rows() + static_cast<int64_t>(s.ids.size()));
  if (s.ids.size() == first) {  // no others: ascending as they are
    s.group_scores.swap(s.placed);
    TakeBest(
        request, [&](int64_t i) { return s.ids[static_cast<size_t>(i)]; },
        [&](int64_t h, int64_t i) { return s.scores[static_cast<size_t>(h * found + i)]; }, s,
        result);
    return absl::OkStatus();
  }
  const std::span<const int32_t> ascending = s.bounded.Ascending();
  s.group_scores.resize(ascending.size());
  for (size_t i = 0; i < ascending.size(); ++i) {
    s.group_scores[i] = s.placed[static_cast<size_t>(ascending[i])];
  }
  const size_t others = s.ids.size() - first;
  TakeBest(
      request,
      [&](int64_t i) { return s.ids[static_cast<size_t>(ascending[static_cast<size_t>(i)])]; },
      [&](int64_t h, int64_t i) {
        const auto place = static_cast<size_t>(ascending[static_cast<size_t>(i)]);
        const auto head = static_cast<size_t>(h);
        return s.scores[place < first ? head * first + place
                                      : (group - 1) * first + head * others + place];
      },
      s, result);
  return absl::OkStatus();
}

}  // namespace carrel::kvstore
