// What: what a store says of a context when it is opened, in native types.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/ids.h"

namespace carrel::retrieval {

// What rows leave of one KV head's outputs, as prefill measured it (carrel/v1/context.proto, HeadFidelity).
struct HeadFidelity {
  int64_t layer = 0, kv_head = 0;
  double output = 0;                         // mean square of the outputs
  std::vector<int64_t> rows;                 // ascending
  std::vector<double> error, error_without;  // [rows], with and without the estimation term
  bool probed = false;                       // measured on a probe's queries, too
};

struct ContextFacts {
  std::string name;
  std::string content_id;  // empty: it has none
  AttentionShape shape;
  int64_t tokens = 0;
  int64_t summary_rows = 0;            // of a cluster; 0: there are no summaries
  std::vector<HeadFidelity> fidelity;  // [layers, kv_heads]; empty: not measured
};

// What one session may ask.
struct Limits {
  int64_t max_top_k = 0;
  int64_t max_query_tokens = 0;
  int64_t max_fetch_rows = 0;      // of one Fetch, over its heads
  int64_t max_candidate_sets = 0;  // that the store keeps: the latest
  int64_t max_result_bytes = 0;    // of results in flight
};

struct Opened {
  ContextFacts context;
  RowRange zone;  // that the store searches
  Limits limits;
  // [layers], of the attention that prefill sampled: mean over q heads and samples. Empty: none was sampled.
  std::vector<float> layer_entropy_nats;
  // If asked for and known, [layers] of [q_heads, head_dim], empty where it is not known of a layer: what
  // predicted queries lack before RoPE.
  std::vector<std::vector<float>> query_drift;
  // The context's manifest as its store serialises it: equal ones are of one context.
  std::string manifest;
};

}  // namespace carrel::retrieval
