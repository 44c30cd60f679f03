// What:   what sparse attention with a budget of rows leaves of a KV head's output, measured when a
//         context is made: from it a decoder knows how many rows reach a wanted fidelity. With it
//         the share of the spread that the head's estimation term counts (summaries.h), and whether
//         the term helps the head at all.
// Math:   of a held-out query at position p and q head h, with the window W = [0, sink) and
//         (p - local, p], the zone Z between them, T the best `rows` of Z by group score, out(S) the
//         attention to rows S, and out(S, R) the same with the rest R estimated by summaries:
//           error[rows] = mean_{queries, h} |out - out(W + Z)|^2,  out = out(W + T) or
//           out(W + T, Z - T);  output = mean |out(W + Z)|^2.
//         The share of the spread is that of a few tried with the least error over three budgets;
//         the term is left out where none of them takes a fiftieth off the error.
// Source: ours (decisions 017, 028).
// Held out: samples from which no spread was learned (LearnedSamples), evenly spread over the last
//         half of the document, where zones are nearly as long as a decoder's.
// Errors: those of the rows and summaries; InvalidArgument a plan out of bounds.
// Threads: one. Deterministic.
// Cost:   of each query: one pass over the zone's K and V, and budgets times shares passes over
//         its summaries. Queries are at most max_queries, and so few that their zones have no more
//         than max_rows rows together.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/format/sampled_queries.h"
#include "kvstore/index/rows/rows.h"
#include "kvstore/index/summaries/summaries.h"

namespace carrel::kvstore {

inline constexpr std::array<int64_t, 10> kFidelityBudgets = {8,   16,  32,   64,   128,
                                                             256, 512, 1024, 2048, 4096};

struct FidelityPlan {
  int64_t sink = 4;  // the window of a decoder's defaults
  int64_t local = 64;
  int64_t max_queries = 32;
  int64_t max_rows = int64_t{1} << 20;  // but always four queries
};

struct HeadFidelity {
  int64_t queries = 0;     // tokens measured; 0: the document was too short, and nothing is known
  bool estimate = false;   // the term helps
  float spread_share = 0;  // of this head's term; kDefaultSpreadShare where nothing is known
  double output = 0;       // mean square of an output of a q head, as its norm's
  std::vector<double> with, without;  // [kFidelityBudgets]: errors with and without the term
};

// summaries: null: only `without` is measured.
absl::StatusOr<HeadFidelity> MeasureFidelity(const Rows& keys, const Rows& values,
                                             const SampledQueries& sampled,
                                             const Summaries* summaries,
                                             const FidelityPlan& plan = {});

}  // namespace carrel::kvstore
