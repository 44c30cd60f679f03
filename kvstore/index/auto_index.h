// What:   per head the cheapest index, and effort, that finds what is wanted for queries that it
//         was not built with.
// Math:   the head's sampled queries are split: even ones build (graph, trained codes), odd ones
//         judge. recall = share of the exact `wanted` best rows, mass = share of the softmax that
//         the rows found carry; both over what the query could see. Cost is counted, not timed, so
//         that the same input gives the same choice: rows visited by kind, weighted with what
//         reading one costs (index_type.h, from measurements on the reference machine).
// Errors: those of the builders; InvalidArgument a config out of bounds.
// Cost:   builds every kind that is tried.   Threads: reentrant.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/index/index.h"

namespace carrel::kvstore {

// Those of this program that say so (IndexType::automatic), and of these the one with the most bytes per key.
std::vector<IndexKind> AutomaticKinds();
IndexKind LargestAutomaticKind(int64_t head_dim);

struct AutoIndexConfig {
  double want_recall = 0.95;  // 0 < want_recall <= 1
  int64_t wanted = 128;       // rows; >= 1
  // Tried in this order; a kind that fails to reach want_recall at any effort is not taken. flat
  // always does.
  std::vector<IndexKind> kinds = AutomaticKinds();
  IndexParams params;  // what the kinds are built with; kind and effort are chosen
};

struct AutoIndex {
  IndexParams params;
  std::string blob;
  double recall = 1, mass = 1;
  double cost_us = 0, exact_us = 0;  // as timed, medians: for information
  int64_t queries = 0;               // that judged; 0: none could, and the index is flat
};

absl::Status ValidateAutoIndexConfig(const AutoIndexConfig& config);

absl::StatusOr<AutoIndex> BuildAutoIndex(const AutoIndexConfig& config, const Rows& keys,
                                         const SampledQueries& queries,
                                         Accelerator* accelerator = nullptr);

}  // namespace carrel::kvstore
