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
// Errors: those of MakeRowSelector.
// Ownership: keeps the rows.
// Threads: one caller; the pool shares heads, and tokens where a layer attends to all rows.
// Cost:   turns every key that is scored or attended to: some 50 ns each.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "decoder/statistics.h"
#include "decoder/zone/zone_attention.h"
#include "model/config.h"
#include "model/transformer.h"

namespace carrel::decoder {

class RepositionedAttention : public model::Attention {
 public:
  // config.zone is HostZoneOptions, config.rope is kInfiniteHip; rows are given and hold the whole context,
  // keys before RoPE.
  static absl::StatusOr<std::unique_ptr<RepositionedAttention>> Create(
      const OpenedContext& context, const model::ModelConfig& model);

  // input's q and k are before RoPE.
  absl::Status Attend(const model::AttentionInput& input, float* attended) override = 0;
  virtual void set_reading_prompt(bool reading) = 0;
  // Forgets everything since the context, and the last `give_up` rows of that.
  virtual void StartSequence(int64_t give_up) = 0;
  virtual Statistics statistics() const = 0;
};

}  // namespace carrel::decoder
