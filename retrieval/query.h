// What:   what a decoder asks a store, in native types: the rows of a layer's zone that its queries select,
//         or rows as they are stored. Messages are made of it where it travels (decoder/client,
//         kvstore/service); within a process none is.
// Errors: whoever answers validates: InvalidArgument names the field, its value and its bounds.
// Ownership: a query owns its numbers.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "common/ids.h"
#include "common/selection.h"

namespace carrel::retrieval {

using RequestId = uint64_t;

// What a reply brings of each token and KV head: ids and scores; ids, K and V; ids, scores and V; partial attention.
enum class Want : uint8_t { kIds = 0, kRows = 1, kValues = 2, kAttend = 3 };

// Names and values; two fit if they hold the same names with the same values.
using FingerprintFields = std::vector<std::pair<std::string, std::string>>;

struct OpenRequest {
  std::string context;
  FingerprintFields fingerprint;  // of the decoder's model
  int64_t sink = 0;               // rows [0, sink) are the decoder's,
  int64_t local = 0;              // and the last `local` ones
  bool query_drift = false;       // wanted
  std::string content_id;         // the context's, or its first 12 digits or more; empty: any
};

struct Query {
  Layer layer;
  int64_t tokens = 0;
  std::vector<float> queries;  // [tokens, q_heads, head_dim], after RoPE
  select::Selection selection = select::TopK();
  Want want = Want::kIds;
  // Predicted queries, asked ahead. ROWS: candidates come. IDS: the store keeps them for the query that
  // names this one in among_candidates_of, and the reply is empty.
  bool speculative = false;
  RequestId among_candidates_of = 0;  // 0: none
  bool measure_mass = false;          // also the lse of each q head over the whole zone
  bool estimate = false;  // ATTEND: rows not selected count through their clusters' summaries
  int64_t effort = 0;     // how much an index does for recall; 0: the context's own
  // Every row of the zone is looked at, whatever the context's index is: the best are found. Within a process
  // alone (Session::attends).
  bool scan = false;
  // ROWS: of each KV head, rows that the asker holds, ascending: only their ids are given. Empty:
  // none.
  std::vector<std::vector<Position>> held;

  // Candidates that later queries may name.
  bool keeps_candidates() const { return speculative && want == Want::kIds; }
  // Memory that its numbers take.
  int64_t bytes() const {
    const auto* top_k = std::get_if<select::TopK>(&selection);
    size_t numbers = top_k == nullptr ? 0 : top_k->of_head.size();
    for (const auto& ids : held) numbers += ids.size();
    return static_cast<int64_t>(numbers * 8 + queries.size() * 4);
  }
};

struct Fetch {
  Layer layer;
  std::vector<KvHead> kv_heads;  // empty: all
  bool by_ids = false;
  RowRange range;             // !by_ids
  std::vector<Position> ids;  // by_ids

  int64_t bytes() const { return static_cast<int64_t>(ids.size()) * 8; }
};

}  // namespace carrel::retrieval
