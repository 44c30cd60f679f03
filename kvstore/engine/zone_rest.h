// What:   what the rows of a zone beside given ones weigh, for queries near the one that found those.
// Math:   rest[h](q) = ln sum_{j not given} exp(scale * <q[h], k[j]>), to first order around q~:
//         rest[h](q~) + scale * <q[h] - q~[h], m[h]>,  m[h] = sum_j softmax_j(scale * <q~[h], k[j]>)
//         k[j] over a sample of those rows. rest is convex: with m over all of them the sum would
//         never be too large.
// Shapes: queries [group, head_dim] f32.
// Edge:   no such rows, or given ones that weigh as much as the zone is said to: -inf.
// Errors: those of rows.     Threads: constant after Make.
// Cost:   Make reads at most kSampleRuns * kSampleRunRows keys; Lse is one product of head_dim.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "kvstore/index/rows/rows.h"

namespace carrel::kvstore {

struct ZoneRestParams {
  const Rows* keys = nullptr;
  RowRange zone;
  absl::Span<const Position> given;  // ascending
  const float* queries = nullptr;    // q~
  int64_t group = 0;
  float scale = 0;
  const float* zone_lse = nullptr;   // [group], for q~; may be an estimate
  const float* given_lse = nullptr;  // [group], for q~
};

class ZoneRest {
 public:
  static constexpr int64_t kSampleRuns = 32;
  static constexpr int64_t kSampleRunRows = 8;

  static absl::StatusOr<ZoneRest> Make(const ZoneRestParams& params);
  // Of the zone less the given rows: runs evenly spread, less what is given; ascending.
  static std::vector<Position> Sample(RowRange zone, absl::Span<const Position> given);
  // Heap that Make's result takes.
  static int64_t Bytes(int64_t group, int64_t head_dim) { return 4 * group * (head_dim + 1); }

  // Of q head h of the group, for its query [head_dim].
  float Lse(int64_t h, const float* query) const;
  // [group, 1 + head_dim]: what the sum comes to at q = 0, and its slope, scale * m.
  absl::Span<const float> values() const { return values_; }

 private:
  int64_t head_dim_ = 0;
  std::vector<float> values_;
};

}  // namespace carrel::kvstore
