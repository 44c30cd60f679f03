// What:   the attention of one decoding sequence on the CPU, whatever it attends to and wherever
//         keys stand: plugged into model::Transformer by cpu_forward_pass.
// Threads: one caller.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "decoder/sources/attended_rows.h"
#include "decoder/statistics.h"
#include "model/transformer.h"

namespace carrel::decoder {

class SequenceAttention;

// A layer's tokens of one of several sequences, and what becomes of them.
struct SequenceBlock {
  SequenceAttention* attention = nullptr;
  model::AttentionInput input;
  float* attended = nullptr;  // [n, q_heads, head_dim]
  absl::Status* status = nullptr;
};

class SequenceAttention : public model::Attention {
 public:
  // Whether tokens of the other's may go with those of this one's: FinishTogether then gives each what
  // its Attend gives alone, bit for bit, and asks for all at once.
  virtual bool GoesWith(const SequenceAttention&) const { return false; }
  virtual int64_t most_together() const { return 1; }  // tokens
  // Blocks of sequences that go with this one, the first of which is its own. Start asks, and the caller
  // may start others' before it calls Finish, which sets every status; each on any thread, beside
  // others'. Where asking together fails, each asks alone.
  virtual void StartTogether(absl::Span<const SequenceBlock>) {}
  virtual void FinishTogether(absl::Span<const SequenceBlock> blocks) {
    for (const SequenceBlock& one : blocks)
      *one.status = one.attention->Attend(one.input, one.attended);
  }

  // Asks for the rows of `layer` ahead of time, with predicted queries [n, q_heads, head_dim].
  virtual absl::Status Prefetch(Layer layer, const float* predicted_q, int64_t n) = 0;
  virtual void set_reading_prompt(bool reading) = 0;
  // Forgets everything since the context: the next token continues the document again, but for its last
  // `give_up` tokens (MostGivenUp), whose rows nobody attends to until the next such call. Statistics
  // stay.
  virtual void StartSequence(int64_t give_up) = 0;
  // Forgets all but the first `tokens` since the context. False: it cannot, and nothing changed.
  virtual bool KeepSequence(int64_t) { return false; }
  // As Window's; empty and false where rows are not kept so.
  virtual std::vector<float> CopyRows(int64_t) const { return {}; }
  virtual bool RestoreRows(const std::vector<float>&, int64_t) { return false; }
  virtual Statistics statistics() const = 0;
  // What it attends from now on is added to the trace, which outlives that; null: no longer.
  virtual absl::Status set_trace(QueryTrace*) {
    return absl::UnimplementedError("sources: not told where positions are given by attention");
  }
  // Of the document's rows that are held here.
  virtual void AttendedHere(const QueryTrace&, Layer, std::vector<AttendedRow>&) const {}
};

}  // namespace carrel::decoder
