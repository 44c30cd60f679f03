// What:   one layer and KV head: what searches of an index find, measured against exact search and
//         exact attention over each query's whole zone.
// Math:   for a query at position p, zone Z = [sink, min(p, tokens - local)), group of q heads h,
//         P_h = softmax over Z, T the exact top_k rows by group score, F the rows found:
//         recall = |F n T| / |T|;  mass_h = sum of P_h over F;
//         out_h(S) = attention of q head h over the rows S alone, softmax renormalised;
//         error_h(S, R) = ||out_h(S) - out_h(R)|| / ||out_h(R)||  (||out_h(S)|| if out_h(R) = 0).
// Units:  search_us is CPU time of the searching thread, median over the queries.
// Errors: those of rows and indexes; Internal: an index returned rows outside the zone, or twice.
// Ownership: keeps a reference to the queries, which outlive it.
// Threads: a HeadMeasure is for one thread at a time; several may run at once.
// Cost:   Create: one exact search and one attention over the zone per query; Measure: one search
//         and one attention over top_k rows per query. Memory: about 2 head_dim floats per query
//         and q head, and while Create runs group + 4 words per row of a block.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "kvstore/format/sampled_queries.h"
#include "kvstore/index/index.h"
#include "kvstore/index/rows/rows.h"

namespace carrel::audit {

struct QueryPlan {
  int64_t sink = 0;   // first rows of the context, not searched
  int64_t local = 0;  // last rows of the context, not searched
  int64_t top_k = 0;
  std::vector<int64_t> samples;  // indices into SampledQueries, ascending; at least one
};

// What a query at a position may search; empty if nothing.
RowRange QueryZone(Position position, int64_t tokens, int64_t sink, int64_t local);

// Means over queries, and over the q heads of the group where not said otherwise.
struct ExactQuality {
  double mass = 0;          // of the exact top_k
  double mass_least = 0;    // of the group's q head that it serves worst
  double output_error = 0;  // error(T, Z): what top_k rows alone cannot give
  double visited = 0;       // keys compared, over the group's heads
  double search_us = 0;     // median
};

struct Measured {
  int32_t effort = 0;  // 0: flat
  double recall = 0;
  double recall_least = 0;  // of the worst query
  double mass = 0;
  double mass_least = 0;          // mean over queries of the group's worst q head
  double output_error = 0;        // error(F, Z)
  double output_error_exact = 0;  // error(F, T)
  double visited = 0;             // keys compared, over the group's heads
  double visited_share = 0;       // of those that exact search compares, sums over queries
  double search_us = 0;           // median
  bool scanned = false;           // every search scored its whole zone
};

class HeadMeasure {
 public:
  // Answers every query of the plan exactly. The queries must outlive it.
  static absl::StatusOr<HeadMeasure> Create(const kvstore::Rows& keys, const kvstore::Rows& values,
                                            const kvstore::SampledQueries& queries,
                                            const QueryPlan& plan);

  const ExactQuality& exact() const { return exact_; }
  // effort as of SearchRequest, and recorded as it is.
  absl::StatusOr<Measured> Measure(const kvstore::Index& index, int32_t effort);

 private:
  struct Answer {
    RowRange zone;
    std::vector<Position> best;   // the exact top_k, ascending
    std::vector<float> lse;       // [group], over the zone
    std::vector<float> zone_out;  // [group, head_dim]
    std::vector<float> best_out;  // [group, head_dim]
  };
  struct State {
    std::vector<float> out, lse;  // [group, head_dim], [group]
  };

  HeadMeasure(const kvstore::Rows& keys, const kvstore::Rows& values,
              const kvstore::SampledQueries& queries, const QueryPlan& plan);
  kvstore::SearchRequest RequestOf(size_t query) const;
  absl::Status AnswerExactly();
  absl::Status AttendZone(size_t query, RowRange zone, State& state);
  absl::Status AttendRows(size_t query, absl::Span<const Position> rows, State& state);
  double MeanError(absl::Span<const float> out, absl::Span<const float> reference) const;
  void AddMass(const State& state, const Answer& answer, double& mean, double& least) const;

  kvstore::Rows keys_, values_;
  const kvstore::SampledQueries* queries_;
  QueryPlan plan_;
  float scale_ = 0;
  std::vector<Answer> answers_;  // [plan.samples]
  ExactQuality exact_;
  kvstore::SearchScratch scratch_;
  std::vector<const void*> k_, v_;
  std::vector<float> scores_;
};

}  // namespace carrel::audit
