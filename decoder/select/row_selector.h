// What:   which rows of the zone a KV head attends to: one method behind one interface.
// Math:   given the queries of one or more tokens and q heads that share a KV head, and a budget of
//         rows, chooses at most `budget` distinct rows of the zone, at least one. A budget that
//         covers the zone gives every row.
// Source: docs/methods.md.
// Shapes: q [queries, head_dim] f32.
// State:  per layer and KV head: what a method caches between generated tokens. The same calls
//         since StartSequence give the same rows.
// Threads: Select of different heads may run at once; of one head, one at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "common/ids.h"
#include "common/thread_pool.h"
#include "decoder/select/host_rows.h"
#include "decoder/select/selector_config.h"
#include "kernels/layer/rope/rope_table.h"

namespace carrel::decoder {

inline constexpr int64_t kPromptStep = -1;

// Where keys that are stored before RoPE stand while rows are chosen. Queries are before RoPE too.
struct KeyPlacement {
  const kernels::RopeTable* rope = nullptr;
  // How far behind the query the last candidate stands: behind what is attended anyway.
  int64_t stream = 0;
  // All keys of a chunk stand where the chunk's number says (chunk-indexed); otherwise all stand
  // next to the stream, of two halves that are compared the earlier one a step further away
  // (relative-style).
  bool chunk_indexed = false;
};

struct SelectRequest {
  Layer layer;
  KvHead head;
  const float* q = nullptr;
  int64_t queries = 0;         // tokens of the block times q heads of the group, token by token
  int64_t budget = 0;          // >= 1
  int64_t step = kPromptStep;  // of a generated token: how many were generated before it
  const KeyPlacement* placement = nullptr;  // null: keys are stored after RoPE, as the queries are
};

struct SelectedRows {
  std::vector<Position> rows;  // ascending
  std::vector<float> bound;    // [queries]: no other candidate scores higher (scaled); none where
                               // the method does not know
  int64_t visited = 0;         // keys, codes or labels looked at
  int64_t keys_scored = 0;     // exact scores: keys read
  int64_t bytes_read = 0;      // to choose: of keys, codes or labels
};

class RowSelector {
 public:
  virtual ~RowSelector() = default;
  virtual void Select(const SelectRequest& request, SelectedRows& selection) = 0;
  // Forgets what was cached for the tokens so far.
  virtual void StartSequence() {}
  // Tokens of a prompt that share a selection.
  virtual int64_t block_tokens() const { return 1; }
};

// Reads and computes what the method needs (codes, labels): NotFound what the context lacks.
// rows and pool outlive the selector.
absl::StatusOr<std::unique_ptr<RowSelector>> MakeRowSelector(const SelectorConfig& config,
                                                             const AttentionShape& shape,
                                                             RowRange zone, const HostRows& rows,
                                                             ThreadPool* pool);

}  // namespace carrel::decoder
