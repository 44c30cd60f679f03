// What:   the one interface of all index kinds: which keys of a zone score highest with the queries
//         of a GQA group.
// Math:   candidates of a group = rows with the largest group score max_h (scale * <q[h], k[j]> -
//         lse[h]) (kernels/group_score), where lse[h] is over the zone's rows that the index scored
//         for head h. Larger is better, ties by smaller id.
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
#include "kvstore/index/rows.h"

namespace carrel::kvstore {

inline constexpr int32_t kMaxEfSearch = 65536;

enum class IndexKind : uint8_t { kFlat = 0, kHnsw = 1 };

struct IndexParams {
  IndexKind kind = IndexKind::kFlat;
  int32_t m = 16;                 // hnsw: links per key (twice that on the lowest level), 4 .. 64
  int32_t ef_construction = 100;  // hnsw: beam width of construction, m .. 4096
  // hnsw: beam width of a search (at least as many as candidates are wanted), 1 .. 65536
  int32_t ef_search = 128;
};

absl::StatusOr<IndexKind> ParseIndexKind(absl::string_view name);  // "flat", "hnsw"
absl::string_view IndexKindName(IndexKind kind);
absl::Status ValidateIndexParams(const IndexParams& params);

// Memory of one searching thread, reused between searches (of any index); grows to what was needed.
struct SearchScratch {
  std::vector<float> scores;  // [group, rows scored]
  std::vector<float> group_scores;
  std::vector<int64_t> ids;
  std::vector<int64_t> best;
  std::vector<uint32_t> topk;
  std::vector<const void*> pointers;
  std::vector<float> misc;
  std::vector<uint32_t> visited;  // [rows]: the walk that last came by; see NextWalk
  uint32_t walk = 0;
  std::vector<std::pair<float, uint32_t>> frontier, beam;  // heaps of (score, row)

  // Forgets what was visited, for an index of `rows` rows, and returns the mark of the new walk.
  uint32_t NextWalk(int64_t rows);
};

struct SearchRequest {
  const float* queries = nullptr;  // [group, head_dim]
  int64_t group = 0;
  float scale = 0;  // > 0
  RowRange zone;    // only rows in it are returned
  // Wanted rows; fewer are returned only if the zone holds fewer or the graph finds fewer.
  int64_t top_k = 0;
  int32_t ef_search = 0;  // 0: the index's own
};

struct SearchResult {
  std::vector<Position> ids;  // by group score descending, then id
  std::vector<float> scores;  // [group, ids.size()], scaled, exact
  int64_t visited = 0;        // keys compared, over the group's heads
  // [group]: over the whole zone, if the index scored all of it (flat always does, the others where
  // that is cheaper); else empty.
  std::vector<float> zone_lse;
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

// The blob of an index over rows; empty for flat. Deterministic: the same rows and params give the
// same bytes. One thread; rows are verified as they are read.
absl::StatusOr<std::string> BuildIndex(const IndexParams& params, const Rows& keys);

// Opens an index from its blob (verified by the caller) over the rows it was built from.
// InvalidArgument or DataLoss if they do not fit.
absl::StatusOr<std::unique_ptr<Index>> OpenIndex(const IndexParams& params, std::string blob,
                                                 Rows keys);

}  // namespace carrel::kvstore
