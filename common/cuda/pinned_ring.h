// What:      equal slots of pinned memory in turn, for copies to or from the device that overlap
//            the filling or reading of the next slot.
// Invariants: 1. Acquire gives a slot only after the copies that its last user enqueued are done.
//            2. Slots come in turn: the n-th Acquire gives slot n mod slots.
// Errors:    those of CUDA. FailedPrecondition if a slot is acquired or released out of turn.
// Ownership: of the memory; a slot's pointer is valid until the ring goes.
// Threads:   one thread at a time.
// Cost:      Acquire waits for the device only if it is `slots` copies behind.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/cuda/buffer.h"
#include "common/cuda/stream.h"

namespace carrel::cuda {

class PinnedRing {
 public:
  // slots >= 1, slot_bytes >= 1
  static absl::StatusOr<PinnedRing> Create(int64_t slots, int64_t slot_bytes);

  absl::StatusOr<absl::Span<uint8_t>> Acquire();
  // All that uses the acquired slot has been enqueued on the stream.
  absl::Status Release(const Stream& stream);

 private:
  PinnedRing(PinnedBuffer<uint8_t> bytes, std::vector<Event> done, int64_t slot_bytes)
      : bytes_(std::move(bytes)), done_(std::move(done)), slot_bytes_(slot_bytes) {}

  PinnedBuffer<uint8_t> bytes_;
  std::vector<Event> done_;
  int64_t slot_bytes_;
  int64_t acquired_ = 0, released_ = 0;
};

}  // namespace carrel::cuda
