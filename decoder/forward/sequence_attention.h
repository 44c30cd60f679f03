// What:   the attention of one decoding sequence on the CPU, whatever it attends to and wherever
//         keys stand: plugged into model::Transformer by cpu_forward_pass.
// Threads: one caller.
#pragma once

#include "decoder/statistics.h"
#include "model/transformer.h"

namespace carrel::decoder {

class SequenceAttention : public model::Attention {
 public:
  // Asks for the rows of `layer` ahead of time, with approximate queries [n, q_heads, head_dim].
  virtual absl::Status Prefetch(Layer layer, const float* approximate_q, int64_t n) = 0;
  virtual void set_reading_prompt(bool reading) = 0;
  // Forgets everything since the context: the next token continues the document again. Statistics
  // stay.
  virtual void StartSequence() = 0;
  virtual Statistics statistics() const = 0;
};

}  // namespace carrel::decoder
