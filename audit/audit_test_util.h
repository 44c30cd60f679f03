// What: random rows and queries of a context, published with its indexes and sampled queries, and
//       the definitions of measure.h by plain loops in double. Tests only.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/ids.h"
#include "kvstore/format/sampled_queries.h"
#include "kvstore/index/index.h"
#include "kvstore/index/rows/rows.h"

namespace carrel::kvstore {
class StoredContext;
}

namespace carrel::audit {

struct RandomHead {
  int64_t tokens = 0;
  int64_t head_dim = 0;
  std::vector<uint16_t> keys, values;  // bf16 [tokens, head_dim]
  kvstore::SampledQueries queries;     // spread over all positions; each leans to some keys

  kvstore::Rows KeyRows() const { return kvstore::Rows::FromMemory(keys.data(), tokens, head_dim); }
  kvstore::Rows ValueRows() const {
    return kvstore::Rows::FromMemory(values.data(), tokens, head_dim);
  }
};
RandomHead MakeHead(uint64_t seed, int64_t tokens, int64_t head_dim, int64_t group,
                    int64_t samples);

// By plain loops.
struct PlainQuery {
  std::vector<Position> ranked;            // rows of the zone by group score, best first
  std::vector<std::vector<double>> share;  // [group][zone]: softmax
  RowRange zone;
};
PlainQuery AnswerPlainly(const RandomHead& head, int64_t sample, RowRange zone);
// Attention of a q head over the rows alone.
std::vector<double> AttendPlainly(const RandomHead& head, int64_t sample, int64_t head_of_group,
                                  const std::vector<Position>& rows);

struct RandomContextSpec {
  std::string name = "report";
  AttentionShape shape = {.layers = 2, .q_heads = 6, .kv_heads = 2, .head_dim = 32};
  int64_t tokens = 1500;
  int64_t segment_tokens = 512;
  int64_t samples = 40;                              // 0: none are stored
  std::vector<kvstore::IndexParams> indexes = {{}};  // one, or one per head: kind "auto"
  uint64_t seed = 1;
};

// Opened from a store below `folder`. heads, if given, are those it holds.
absl::StatusOr<std::shared_ptr<const kvstore::StoredContext>> PublishContext(
    const RandomContextSpec& spec, const std::string& folder,
    std::vector<RandomHead>* heads = nullptr);

}  // namespace carrel::audit
