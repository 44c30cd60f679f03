// What:   a stored context as it is measured: some of its heads, the queries asked of them, and
//         what each query's right answer is.
// Math:   of the sampled queries of a head every second one, from the latest half of the document,
//         is asked of the whole zone; the others are what an index may be built from.
//         mass = sum over the returned rows of softmax over the zone, mean over q heads.
// Errors: DataLoss of the context.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/ids.h"
#include "common/thread_pool.h"
#include "kvstore/format/sampled_queries.h"
#include "kvstore/index/rows/rows.h"
#include "kvstore/storage/store.h"

namespace carrel::bench {

inline constexpr int64_t kSink = 4;
inline constexpr int64_t kLocal = 64;

struct Truth {
  std::vector<float> scores;  // [group, zone], scaled
  std::vector<float> lse;     // [group]
  std::vector<Position> ids;  // the best rows, as many as the largest top_k
  std::vector<float> dense;   // [group, head_dim]: attention over the zone
};

struct HeadCase {
  Layer layer;
  KvHead kv_head;
  kvstore::Rows keys, values;
  kvstore::SampledQueries train;
  std::vector<std::vector<float>> queries;  // each [group, head_dim]
  std::vector<Truth> truths;                // one per query
};

struct Case {
  std::string name;
  int64_t tokens = 0;
  AttentionShape shape;   // as stored
  int32_t as_layers = 0;  // times are scaled to so many layers
  bool synthetic = false;
  RowRange zone;
  float scale = 0;
  std::vector<HeadCase> heads;
  std::shared_ptr<const kvstore::StoredContext> context;

  int32_t layers_measured() const;
  // By how much what was measured of the heads in hand is less than the whole context's.
  double times() const {
    return static_cast<double>(as_layers) * shape.kv_heads / static_cast<double>(heads.size());
  }
};

struct CaseConfig {
  int64_t heads = 0;    // measured, spread over the layers
  int64_t queries = 0;  // per head
  int64_t max_top_k = 0;
  int32_t as_layers = 0;  // 0: those of the context
};

// The heads of which a case of `count` heads is made, of all layers and heads in hand.
std::vector<std::pair<Layer, KvHead>> SpreadHeads(const AttentionShape& shape, int64_t count);

// Rows and index of one head, opened afresh.
absl::StatusOr<HeadCase> OpenHead(const kvstore::StoredContext& context, Layer layer,
                                  KvHead kv_head, int64_t queries);

absl::StatusOr<int64_t> TokensOf(const kvstore::Store& store, const std::string& name);

// Reads and verifies the rows of the heads, and computes the truths.
absl::StatusOr<Case> OpenCase(const kvstore::Store& store, const std::string& name,
                              const CaseConfig& config, ThreadPool& pool);

struct Quality {
  double recall = 0;
  double mass = 0;
  double output_error = 0;        // of attention over the rows found, against the whole zone's
  double output_error_exact = 0;  // of attention over as many exact rows, against the whole zone's
  double output_error_rows = 0;   // against attention over as many exact rows
  double rows = 0;
};
// Of one answer; InvalidArgument if it is no answer: rows outside the zone, twice, or too many.
absl::StatusOr<Quality> Judge(const Case& c, const HeadCase& head, int64_t query, int64_t top_k,
                              const std::vector<Position>& ids);

}  // namespace carrel::bench
