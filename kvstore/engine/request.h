// What:   requests of a session and the pieces of their replies, in the engine's types: the wire's
//         are converted in kvstore/service/convert.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "common/selection.h"

namespace carrel::kvstore {

// Until when an answer is waited for, by the steady clock.
using Deadline = std::chrono::steady_clock::time_point;
inline constexpr Deadline kNoDeadline = Deadline::max();

// DeadlineExceeded once it has passed.
inline absl::Status CheckDeadline(Deadline deadline) {
  if (deadline == kNoDeadline || std::chrono::steady_clock::now() < deadline) {
    return absl::OkStatus();
  }
  return absl::DeadlineExceededError("nobody waits for it any more: its time is over");
}

// Names and values; two fit if they hold the same names with the same values.
using FingerprintFields = std::vector<std::pair<std::string, std::string>>;

struct OpenRequest {
  std::string context;
  FingerprintFields fingerprint;  // of the decoder's model
  int64_t sink = 0;
  int64_t local = 0;
  bool query_drift = false;  // wanted
  std::string content_id;    // as CheckContentId; empty: any
  // Whose turn the session's requests take (WorkQueue); null: those without a turn of their own.
  std::shared_ptr<const void> tenant;
  Deadline deadline = kNoDeadline;
};

enum class Want : uint8_t { kIds = 0, kRows = 1, kValues = 2, kAttend = 3 };

struct QueryRequest {
  Layer layer;
  int64_t tokens = 0;
  std::vector<float> queries;  // [tokens, q_heads, head_dim]
  select::Selection selection = select::TopK();
  Want want = Want::kIds;
  bool speculative = false;
  uint64_t among_candidates_of = 0;  // 0: none
  bool measure_mass = false;
  bool estimate = false;  // ATTEND: rows not selected count through their clusters' summaries
  int64_t effort = 0;
  // ROWS: of each KV head, rows that the asker holds, ascending: only their ids are given. Empty:
  // none.
  std::vector<std::vector<Position>> held;
  Deadline deadline = kNoDeadline;
};

struct FetchRequest {
  Layer layer;
  std::vector<KvHead> kv_heads;  // empty: all
  bool by_ids = false;
  RowRange range;             // !by_ids
  std::vector<Position> ids;  // by_ids
  Deadline deadline = kNoDeadline;
};

struct QueryStatistics {
  int64_t candidates = 0;  // rows among which the selection was made by exact scores
  int64_t visited = 0;     // keys that the index looked at
  int64_t queue_us = 0;    // from acceptance to the start of the search
  int64_t search_us = 0;   // of the search; copying rows into the reply is not counted
  int64_t rows = 0;        // selected
};

// A run of rows of one token and KV head, verified. Pointers are valid while the Reply lives.
struct Piece {
  int64_t token = 0;
  KvHead kv_head;
  int64_t first_row = 0;  // index of its first row within this token's and head's rows
  int64_t rows = 0;
  std::vector<Position> ids;         // [rows]
  std::vector<float> scores;         // [group, rows], or empty
  std::vector<const void*> k, v;     // [rows] less those that the asker holds, or empty
  absl::Span<const float> out;       // [group, head_dim], or empty
  absl::Span<const float> lse;       // [group], or empty
  absl::Span<const float> zone_lse;  // [group], on the first piece of a token and head, or empty
  absl::Span<const float> rest;      // [group, 1 + head_dim], likewise
};

}  // namespace carrel::kvstore
