// What:   the part of decoding that depends on the device: takes slices through every layer of the model,
//         with each sequence's window here and its zone wherever it lives. A runner owns what a step needs
//         (backend, activations, streams), once for all sequences over a checkpoint on a device.
//         A step: the next tokens of each of some sequences, and what comes of them. One sequence is the
//         case of one slice. A prompt is tokens that are not computed yet.
// Shapes: logits [vocab_size] f32 of a token, in this host's memory.
// Bits:   batch-invariant: a slice gets beside others the bits that it gets alone. A step is cut where the
//         backend could not hold to that.
// Errors: Step, of each slice: InvalidArgument a token outside the vocabulary; ResourceExhausted more new
//         tokens than a GPU's window has room for; Cancelled nobody wants it any more; what the store and
//         the device say. Opening: Unavailable no such device, FailedPrecondition a build without CUDA,
//         Unimplemented a shape that the device's kernels do not run, ResourceExhausted memory.
// Ownership: sequences share their runner; it goes with the last. The checkpoint and the pool outlive them.
//         A step keeps nothing: who steps owns the sequences, the tokens and where logits go.
// Threads: any, with sequences of its own each. On a GPU one step at a time; others wait.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "decoder/runner/sequence.h"
#include "decoder/zone/zone_attention.h"
#include "model/checkpoint.h"

namespace carrel::decoder {

// A sequence occurs once in a step.
struct Slice {
  Sequence* sequence = nullptr;
  absl::Span<const TokenId> tokens;  // 1 to sequence->max_tokens(); they follow what it has
  bool of_prompt = false;            // or tokens that were generated
  bool wants_next = true;            // what follows the last token
  float* next_logits = nullptr;      // of the last token; null: the likeliest token is enough
  float* all_logits = nullptr;       // [tokens]; null: they are not wanted
};

struct SliceResult {
  absl::Status status;  // a slice fails alone
  // The likeliest token, where wants_next and next_logits is null; Internal a logit is NaN.
  absl::StatusOr<TokenId> next = TokenId{-1};
};

class Runner {
 public:
  virtual ~Runner() = default;
  // Of each slice, whose sequences this runner opened, its result.
  virtual std::vector<SliceResult> Step(absl::Span<const Slice> batch) = 0;
};

// A step in parts: as many of the slices of `order` together as have at most so many tokens; what has more is
// a part of its own. Those of few tokens come first, those of as many in order: answers stay together whatever
// prompts there are, and the same answers are the same part in the next step.
std::vector<std::vector<size_t>> PartsOf(absl::Span<const Slice> batch,
                                         absl::Span<const size_t> order, int64_t most);

// Names what a runner computes with: checkpoints with one key are one model with the same weights and adapter in
// memory, which somebody holds, so that their sequences may share a runner.
std::string RunnerKey(const model::Checkpoint& checkpoint);

// Both fetch sink and local rows before they return. context.rows: where NeedsHostRows, and what a GPU's
// host zone copies, or null.
absl::StatusOr<std::unique_ptr<Sequence>> OpenCpuSequence(const model::Checkpoint& checkpoint,
                                                          const OpenedContext& context);
absl::StatusOr<std::unique_ptr<Sequence>> OpenCudaSequence(const model::Checkpoint& checkpoint,
                                                           const OpenedContext& context);
// With rope=infinitehip, by lab/positions: Unimplemented a shape or stages that the kernels do not run, named.
absl::StatusOr<std::unique_ptr<Sequence>> OpenCudaRepositioned(const model::Checkpoint& checkpoint,
                                                               const OpenedContext& context);

}  // namespace carrel::decoder
