// What:   attention over a context whose keys are stored before RoPE, at positions of its own
//         giving: for contexts longer than the model was trained for.
// Math:   a token attends to sink, chosen rows of the zone, local and new rows, T of them in the
//         order of the document. The r-th stands at position max(0, r - max(0, T - L)) and the
//         query at min(T, L) - 1, L the trained length: chosen rows are neighbours, the last row
//         stands where the query does, and what would be further away than L stands at the far end.
//         While rows are chosen keys stand elsewhere (select/row_selector.h, KeyPlacement):
//         chunk-indexed in layers 0 to 2, relative-style after.
// Source: InfiniteHiP (docs/methods.md): StreamingLLM-style positions of the attention, its
//         appendix D on layers. Differs: a layer that attends to all rows of a context longer than
//         L lets the earliest share a position; the paper has no such layer.
// Edge:   every row chosen and T <= L: dense attention with the model's own positions.
// Errors: Create: a build without the lab.
// Ownership: keeps the rows; the window outlives it.
// Threads: any, while nothing is appended to the window.
// Cost:   turns every key that is scored or attended to: some 50 ns each.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "decoder/select/row_selector.h"
#include "decoder/window/partial.h"
#include "decoder/window/window.h"
#include "decoder/zone/zone_attention.h"
#include "model/config.h"

namespace carrel::decoder {

class RepositionedAttention {
 public:
  // context.rows are given and hold the whole context, keys before RoPE. window: everything since the context,
  // keys before RoPE, and nothing else.
  static absl::StatusOr<std::unique_ptr<RepositionedAttention>> Create(
      const OpenedContext& context, const model::ModelConfig& model, const Window& window);
  virtual ~RepositionedAttention() = default;

  // Where keys stand while rows are chosen for the tokens from `first` on, of the n that were appended last.
  virtual KeyPlacement PlacementOf(Layer layer, int64_t n, int64_t first) const = 0;
  // Merges the attention of one KV head of one of these, q [n, q_heads, head_dim] before RoPE, to sink, local, new
  // and the chosen rows of the zone; null: all of them.
  virtual void Attend(Layer layer, KvHead head, const float* q, int64_t n, int64_t token,
                      const std::vector<Position>* chosen, Partial& partial) const = 0;
};

}  // namespace carrel::decoder
