// What:   the zone's part of a sequence's attention, wherever the zone lives: store_zone.h asks a
//         store, host_zone.h attends to rows mapped here.
//         Per layer and block of tokens: Prefetch (optional), Start, Finish, then the measurements.
// Threads: one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/ids.h"
#include "decoder/window/partial.h"

namespace carrel::decoder {

class ZoneAttention {
 public:
  virtual ~ZoneAttention() = default;

  // predicted_q [n, q_heads, head_dim] for `layer`, while the layer before computes.
  virtual absl::Status Prefetch(Layer layer, const float* predicted_q, int64_t n) = 0;
  virtual absl::Status Start(Layer layer, const float* q, int64_t n) = 0;
  // partial gets the zone's attention, [n, q_heads].
  virtual absl::Status Finish(Layer layer, const float* q, int64_t n, Partial& partial) = 0;

  // After Finish, in this order; they add to the statistics what the config wants measured.
  // window_lse [n, q_heads] is of the rows that the decoder holds.
  virtual absl::Status Measure(Layer layer, const float* q, int64_t n, const Partial& zone,
                               const std::vector<float>& window_lse) = 0;
  // The error of the layer's output against attention over every row of the zone.
  virtual absl::Status MeasureOutput(Layer layer, const float* q, int64_t n, const Partial& zone,
                                     const Partial& window) = 0;

  // Zones with one key, unless it is empty, may be asked for each other's tokens in one question, each token
  // getting the bits that it gets alone: the same rows, chosen in the same way, by as many as are known
  // before; nothing of the answer is kept or measured.
  virtual std::string batch_key() const { return ""; }

  virtual void set_reading_prompt(bool reading) = 0;
  // Gives up what is in flight: the sequence is over or failed.
  virtual void Cancel() = 0;
};

}  // namespace carrel::decoder
