// What:   the one interface of all index kinds: which keys of a zone score highest with the queries
// of a GQA group. Math:   candidates of a group = rows with the largest group score max_h (scale *
// <q[h], k[j]> - lse[h]) (kernels/group_score), where lse[h] is over the rows
//         that the index scored for head h. Larger is better, ties by smaller id.
// Shapes: queries [group, head_dim] f32.
// Errors: DataLoss from rows or blob. Faiss's exceptions are caught here and become Internal.
// Threads: Search is const and may run concurrently with its own scratch; no allocation per key.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "kvstore/index/rows.h"

namespace carrel::kvstore {

enum class IndexKind : uint8_t { kFlat = 0, kHnsw = 1 };

struct IndexParams {
  IndexKind kind = IndexKind::kFlat;
  int32_t m = 16;                 // hnsw: links per key (twice that on the lowest level), 4 .. 64
  int32_t ef_construction = 100;  // hnsw: beam width of construction, m .. 4096
  int32_t ef_search =
      128;  // hnsw: beam width of a search (at least as many as candidates are wanted), 1 .. 65536
};

absl::StatusOr<IndexKind> ParseIndexKind(
    absl::string_view name);  // InvalidArgument lists the kinds
absl::string_view IndexKindName(IndexKind kind);
absl::Status ValidateIndexParams(
    const IndexParams& params);  // InvalidArgument names field, value, bounds

// Memory of one searching thread, reused between searches; grows to what was needed.
struct SearchScratch {
  std::vector<float> scores;  // [group, ...]
  std::vector<float> group_scores;
  std::vector<int64_t> ids;
  std::vector<uint32_t> topk;
  std::vector<const void*> pointers;
  std::vector<float> misc;
};

struct SearchRequest {
  const float* queries = nullptr;  // [group, head_dim]
  int64_t group = 0;
  float scale = 0;
  RowRange zone;  // only rows in it may be returned
  int64_t top_k =
      0;  // wanted rows; fewer are returned only if the zone holds fewer or the graph finds fewer
  int32_t ef_search = 0;  // 0: the index's own
};

struct SearchResult {
  std::vector<Position> ids;  // by group score descending, then id
  std::vector<float> scores;  // [group, ids.size()], scaled, exact
  int64_t visited = 0;        // keys compared
  std::vector<float>
      zone_lse;  // [group]: over the whole zone, if the index scored all of it (flat); else empty
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
// same bytes, on one thread.
absl::StatusOr<std::string> BuildIndex(const IndexParams& params, const Rows& keys);

// Opens an index from its blob (verified by the caller) over the rows it was built from.
// InvalidArgument or DataLoss if they do not fit.
absl::StatusOr<std::unique_ptr<Index>> OpenIndex(const IndexParams& params, std::string blob,
                                                 Rows keys);

}  // namespace carrel::kvstore
