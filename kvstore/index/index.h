// What:   the one interface of all index kinds: which keys of a zone score highest with the queries
//         of a GQA group.
// Math:   candidates of a group = rows with the largest group score max_h (scale * <q[h], k[j]> -
//         lse[h]) (kernels/score/group_score), where lse[h] is over the zone: exactly in flat, over
//         scores in 8 bits in what a store scans flat heads by (int8_scan.h), estimated from the rows
//         found and a sample of the rest in the others. Larger is better, ties by smaller id. What is
//         returned is always scored exactly.
// Shapes: queries [group, head_dim] f32.
// Errors: DataLoss from rows or blob; InvalidArgument names field, value and bounds. Faiss's
//         exceptions are caught here and become Internal.
// Threads: Search is const and may run concurrently, each with its own scratch; no allocation per
//         key once the scratch has grown.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "kernels/score/block_hamming/block_hamming.h"
#include "kernels/score/code_score/code_score.h"
#include "kernels/score/int8_score/int8_score.h"
#include "kernels/select/bounded_topk/bounded_topk.h"
#include "kvstore/index/rows/blob.h"
#include "kvstore/index/rows/rows.h"

namespace carrel {
class ThreadPool;
}

namespace carrel::kvstore {

class Accelerator;
struct SampledQueries;

inline constexpr int32_t kMaxEffort = 65536;

// Their numbers are of this process alone: what is kept and sent says their names.
enum class IndexKind : uint8_t {
#define CARREL_INDEX_KIND(Name, folder) k##Name,
#include "kvstore/index/index_kinds.def"
#undef CARREL_INDEX_KIND
};
inline constexpr IndexKind kAllIndexKinds[] = {
#define CARREL_INDEX_KIND(Name, folder) IndexKind::k##Name,
#include "kvstore/index/index_kinds.def"
#undef CARREL_INDEX_KIND
};

// How code learns the directions whose signs are a key's bits. In manifests and blobs.
enum class CodeTraining : uint8_t { kOff = 0, kStaged = 1, kHata = 2 };
// What code scans by: the query's own numbers, or its signs.
enum class CodeScan : uint8_t { kAsymmetric = 0, kSymmetric = 1 };

struct IndexParams {
  IndexKind kind = IndexKind::kFlat;
  // hnsw: links per key (twice that on the lowest level); graph: half the links per key. 4 .. 64
  int32_t m = 16;
  int32_t ef_construction = 100;  // hnsw: beam width of construction, m .. 4096
  // Default effort of a search, 0 .. 65536; more finds more. hnsw, graph: beam width (at least as
  // many as rows are wanted). ivf: lists probed. code, int8: rows scored exactly (at least as many
  // as are wanted). 0: IndexType::DefaultEffort.
  int32_t effort = 0;
  int32_t code_bits = 128;  // code: 64, 128 or 256
  // code: random directions, or learned (needs sampled queries), see code.h.
  CodeTraining code_training = CodeTraining::kOff;
  CodeScan code_scan = CodeScan::kAsymmetric;  // code: not in the blob
  int32_t ivf_lists = 0;                       // ivf: 0 (4 sqrt(rows), at least 1) .. 65536
};

absl::StatusOr<IndexKind> ParseIndexKind(absl::string_view name);  // "flat", "code", ...
absl::string_view IndexKindName(IndexKind kind);
absl::StatusOr<CodeTraining> ParseCodeTraining(absl::string_view name);  // "off", "staged", "hata"
absl::string_view CodeTrainingName(CodeTraining training);
absl::StatusOr<CodeScan> ParseCodeScan(absl::string_view name);  // "asymmetric", "symmetric"
absl::string_view CodeScanName(CodeScan scan);
absl::Status ValidateIndexParams(const IndexParams& params);
// Whether this program builds it, too. Unimplemented what is in the lab, of a program without it.
absl::Status CheckIndexBuild(const IndexParams& params);

// Memory of one searching thread, reused between searches (of any index); grows to what was needed.
struct SearchScratch {
  std::vector<float> scores;  // [group, rows scored]
  std::vector<float> group_scores;
  std::vector<int64_t> ids;
  std::vector<int64_t> best;
  std::vector<uint64_t> topk;
  std::vector<const void*> pointers;
  std::vector<float> base;
  std::vector<float> log_sizes;   // ivf: of each list
  std::vector<uint64_t> marked;   // ivf: a bit per row of the zone
  std::vector<uint32_t> visited;  // [rows]: the walk that last came by; see NextWalk
  uint32_t walk = 0;
  std::vector<std::pair<float, uint32_t>> frontier, beam;  // heaps of (score, row)
  kernels::CodeTables tables;
  kernels::HammingTables hamming;
  kernels::Int8Queries int8_queries;
  kernels::BoundedTopK bounded;
  std::vector<float> errors;    // [group]
  std::vector<float> placed;    // group scores in the order in which rows were scored
  std::vector<int16_t> codes;   // approximate scores
  std::vector<uint32_t> above;  // rows whose approximate score is above a bar, ...
  std::vector<int16_t> above_scores;
  std::vector<uint64_t> ties;
  std::vector<float> sample_scores;  // [group, samples], and the codes' scores of the same rows
  std::vector<int16_t> sample_codes;

  // Forgets what was visited, for an index of `rows` rows, and returns the mark of the new walk.
  uint32_t NextWalk(int64_t rows);
};

// What a scan of a zone in 8 bits gives (int8_scan.h).
struct Int8ZoneScores {
  const float* scores = nullptr;  // [group, stride], from the zone's first row on
  int64_t stride = 0;
  const float* lse = nullptr;  // [group], of the zone's
  kernels::Int8Error error;    // of the zone's rows
};

struct SearchRequest {
  const float* queries = nullptr;  // [group, head_dim]
  int64_t group = 0;
  float scale = 0;  // > 0
  RowRange zone;    // only rows in it are returned
  // Wanted rows; fewer are returned only if the zone holds fewer or the graph finds fewer.
  int64_t top_k = 0;
  int32_t effort = 0;  // see IndexParams; 0: the index's own
  // What the scan of the zone gives, [group, zone rows], where the caller has scored it already
  // (ScoreZone); ignored by kinds that do not scan.
  const float* zone_scores = nullptr;
  const Int8ZoneScores* int8_scores = nullptr;  // likewise: of Int8Scan::Score
  // zone_lse is wanted exactly: 8-bit scans fall back to stored keys. Other kinds ignore this
  // flag.
  bool exact_lse = false;
  // ids ascend, instead of their group scores descending: enough where rows are only summed.
  bool by_id = false;
  // Whose threads may help, where a KV head's scan is long and heads are too few to keep all busy.
  ThreadPool* pool = nullptr;
};

struct SearchResult {
  std::vector<Position> ids;  // by group score descending, then id; or by id
  std::vector<float> scores;  // [group, ids.size()], scaled, exact
  float least = 0;            // group score of ids; 0: none
  int64_t visited = 0;        // keys compared, over the group's heads
  // [group]: lse over the whole zone: exact if the index scored all of it exactly (flat always does,
  // the others where that is cheaper), else an estimate. The group scores of ids are by it.
  std::vector<float> zone_lse;
  bool zone_scored = false;
};

class Index {
 public:
  virtual ~Index() = default;
  virtual IndexKind kind() const = 0;
  virtual absl::Status Search(const SearchRequest& request, SearchScratch& scratch,
                              SearchResult& result) const = 0;
  // Heap bytes that this object holds, mapped rows excluded: what the engine's budget counts.
  virtual int64_t resident_bytes() const = 0;
};

// The blob of an index over rows; empty for flat. Deterministic: the same rows, queries and params
// give the same bytes. One thread; rows are verified as they are read. queries: sampled queries of
// the head's group, whose keys the rows are; InvalidArgument if a kind needs them (graph; code when
// trained) and they are null. accelerator (accelerator.h), if not null, does what it can: then the
// bytes are the same only where it is.
absl::StatusOr<std::string> BuildIndex(const IndexParams& params, const Rows& keys,
                                       const SampledQueries* queries = nullptr,
                                       Accelerator* accelerator = nullptr);

// Opens an index from its blob over the rows it was built from. InvalidArgument or DataLoss if they
// do not fit. code and int8 keep the blob mapped; the others read it.
absl::StatusOr<std::unique_ptr<Index>> OpenIndex(const IndexParams& params, Blob blob, Rows keys);

// What a search does where the request does not say: the params' effort, else the kind's own (index_type.h).
int64_t EffortOf(const IndexParams& params, int64_t top_k, int64_t rows);

}  // namespace carrel::kvstore
