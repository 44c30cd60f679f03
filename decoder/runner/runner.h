// What:   the part of decoding that depends on the device: takes slices through every layer of the model,
//         with each sequence's window here and its zone wherever it lives. A runner owns what a step needs
//         (backend, activations, streams), once for all sequences over a checkpoint on a device.
// Bits:   batch-invariant: a slice gets beside others the bits that it gets alone. A step is cut where the
//         backend could not hold to that.
// Errors: Step, of each slice: InvalidArgument a token outside the vocabulary; ResourceExhausted more new
//         tokens than a GPU's window has room for; Cancelled nobody wants it any more; what the store and
//         the device say. Opening: Unavailable no such device, FailedPrecondition a build without CUDA,
//         Unimplemented a shape that the device's kernels do not run, ResourceExhausted memory.
// Ownership: sequences share their runner; it goes with the last. The checkpoint and the pool outlive them.
// Threads: any, with sequences of its own each. On a GPU one step at a time; others wait.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "decoder/runner/batch.h"
#include "decoder/runner/sequence.h"
#include "decoder/zone/opened_context.h"
#include "model/checkpoint.h"

namespace carrel::decoder {

class Runner {
 public:
  virtual ~Runner() = default;
  // Of each slice, whose sequences this runner opened, its result.
  virtual std::vector<SliceResult> Step(absl::Span<const Slice> batch) = 0;
};

// Both fetch sink and local rows before they return. context.rows: where NeedsHostRows, and what a GPU's
// host zone copies, or null.
absl::StatusOr<std::unique_ptr<Sequence>> OpenCpuSequence(const model::Checkpoint& checkpoint,
                                                          const OpenedContext& context);
absl::StatusOr<std::unique_ptr<Sequence>> OpenCudaSequence(const model::Checkpoint& checkpoint,
                                                           const OpenedContext& context);

}  // namespace carrel::decoder
