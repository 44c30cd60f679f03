// What:   the part of decoding that depends on the device: takes blocks of new tokens through every
//         layer, with the window here and the zone at the store, and gives logits.
// Errors: Run: InvalidArgument a token outside the vocabulary; ResourceExhausted more new tokens
//         than a GPU's window has room for; what the store and the device say. Making one:
//         Unavailable no such device, FailedPrecondition a build without CUDA, Unimplemented a
//         shape that the device's kernels do not run, ResourceExhausted memory.
// Ownership: of what is made: as OpenedContext; the checkpoint outlives it, too.
// Threads: one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "decoder/sources/attended_rows.h"
#include "decoder/statistics.h"
#include "decoder/zone/opened_context.h"
#include "model/checkpoint.h"
#include "model/transformer.h"

namespace carrel::decoder {

class ForwardPass;

// One sequence's next tokens, and what became of them.
struct PassBlock {
  ForwardPass* pass = nullptr;
  absl::Span<const TokenId> tokens;
  Position first_position = 0;
  bool wants_logits = true;  // of the last token, soon
  absl::Status status;
};

class ForwardPass {
 public:
  virtual ~ForwardPass() = default;

  virtual int64_t max_tokens() const = 0;  // of one Run
  virtual absl::Status Run(absl::Span<const TokenId> tokens, Position first_position) = 0;
  // A block of each of several passes like this one over the same checkpoint, this one perhaps among
  // them. Equivalent to calling Run on each, bit for bit; reads the weights once. A sequence fails alone.
  virtual void RunTogether(absl::Span<PassBlock> blocks) {
    for (PassBlock& one : blocks) one.status = one.pass->Run(one.tokens, one.first_position);
  }
  // Of the last `count` tokens of the last Run, [count, vocab_size], to host memory.
  virtual absl::Status Logits(int64_t count, float* logits) = 0;
  // The most likely token after the last Run; Internal if a logit is NaN.
  virtual absl::StatusOr<TokenId> Greedy() = 0;

  virtual void set_reading_prompt(bool reading) = 0;
  // Asked while a Run goes on, as often as the device allows; false: it is Cancelled.
  // NOLINTNEXTLINE(performance-unnecessary-value-param): passes keep it
  virtual void set_wanted(std::function<bool()>) {}
  // As SequenceAttention's.
  virtual void StartSequence(int64_t give_up) = 0;
  // As SequenceAttention's.
  virtual bool KeepSequence(int64_t) { return false; }
  virtual std::vector<float> CopyRows(int64_t) const { return {}; }
  virtual bool RestoreRows(const std::vector<float>&, int64_t) { return false; }
  virtual Statistics statistics() const = 0;
  // As SequenceAttention's.
  virtual absl::Status set_trace(QueryTrace*) {
    return absl::UnimplementedError("sources: told by a decoder on the CPU, not on a GPU");
  }
  virtual void AttendedHere(const QueryTrace&, Layer, std::vector<AttendedRow>&) const {}
};

// Sees every layer's input and attended output. Tests.
using Observer = std::function<void(const model::AttentionInput&, const float* attended)>;

// Both fetch sink and local rows before they return. context.rows: where NeedsHostRows, and what a
// GPU's host zone copies, or null.
// *observer outlives the pass and may change.
absl::StatusOr<std::unique_ptr<ForwardPass>> MakeCpuForwardPass(const model::Checkpoint& checkpoint,
                                                                const OpenedContext& context,
                                                                const Observer* observer);
absl::StatusOr<std::unique_ptr<ForwardPass>> MakeCudaForwardPass(
    const model::Checkpoint& checkpoint, const OpenedContext& context);

}  // namespace carrel::decoder
