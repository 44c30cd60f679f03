// What:   what sparse attention with a budget of rows leaves of a KV head's output, measured when a
//         context is made: from it a decoder knows how many rows reach a wanted fidelity. With it
//         the share of the spread that the head's estimation term counts (summaries.h), and whether
//         the term helps the head at all.
// Math:   of a query at position p and q head h, with the window W = [0, sink) and (p - local, p], the
//         zone Z between them, T the best `rows` of Z by group score, out(S) the attention to rows S,
//         and out(S, R) the same with the rest R estimated by summaries:
//           error_q[rows] = mean_h |out - out(W + Z)|^2,  out = out(W + T) or out(W + T, Z - T);
//           output_q = mean_h |out(W + Z)|^2.
//         Of a layer, with Y_q the mean of output_q over its KV heads, Y that of Y_q over queries:
//           error[rows] = Y max(mean_{q of document} error_q / Y_q, mean_{q of probe} error_q / Y_q),
//         so that error / Y is the mean square of what a decoder measures of every token.
//         The share of the spread is that of a few tried with the least error over three budgets;
//         the term is left out where none of them takes a fiftieth off the error.
// Source: ours (decisions 017, 028, 092).
// Queries: held-out ones of the document, from which no spread was learned (LearnedSamples), evenly
//         spread over its last half, where zones are nearly as long as a decoder's; and of the probe
//         (model/tokenizer/probe.h), which stands behind the document as a question does: W is sink,
//         the document's last `local` rows, and the probe's up to the query.
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
  int64_t max_queries = 32;             // half of them the probe's, where there is one
  int64_t max_rows = int64_t{1} << 20;  // but always four queries
};

// Tokens that stand behind the document: what they leave is a question's. Rows are bf16.
struct ProbeQueries {
  int64_t tokens = 0;
  const float* queries = nullptr;  // [tokens, group, head_dim]
  const uint16_t* k = nullptr;     // [tokens, head_dim]
  const uint16_t* v = nullptr;
};

// Of one query: means over the group.
struct QueryFidelity {
  bool of_probe = false;
  double output = 0;  // square of its norm
  std::array<double, kFidelityBudgets.size()> with = {}, without = {};
};

struct HeadFidelity {
  int64_t queries = 0;  // tokens measured; 0: the document was too short, and nothing is known
  int64_t probe_queries = 0;  // of them, the probe's
  bool estimate = false;      // the term helps
  float spread_share = 0;     // of this head's term; kDefaultSpreadShare where nothing is known
  double output = 0;          // mean square of an output of a q head, as its norm's, in the layer
  std::vector<double> with, without;  // [kFidelityBudgets]: errors with and without the term
  std::vector<QueryFidelity> of_query;
};

// summaries: null: only `without` is measured. What is given is of this head alone, until all of its
// layer's are combined.
absl::StatusOr<HeadFidelity> MeasureFidelity(const Rows& keys, const Rows& values,
                                             const SampledQueries& sampled,
                                             const ProbeQueries& probe, const Summaries* summaries,
                                             const FidelityPlan& plan = {});

// Of all heads of a layer, measured on the same queries: output, with and without as above.
void CombineFidelity(absl::Span<HeadFidelity> layer);

}  // namespace carrel::kvstore
