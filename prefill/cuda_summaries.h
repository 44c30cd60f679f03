// What:   summaries (kvstore/index/summaries/summaries.h) of one head at a time on the GPU, some segments
//         after the other (kernels/encode/cluster_rows), from rows in pinned memory.
// Errors: Unimplemented a shape that is not served; ResourceExhausted and others of the device.
// Ownership: move-only; its device memory is that of the arena. Threads: one at a time.
// Cost:   of device memory 17.5 MB, whatever the tokens, less for fewer than 32,768; of pinned
//         memory 0.4 MB and half a byte per token. Keys cross the bus twice, V rows once.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "common/cuda/arena.h"
#include "common/cuda/buffer.h"
#include "common/cuda/stream.h"
#include "kvstore/index/building/accelerator.h"

namespace carrel::prefill {

class CudaSummaries {
 public:
  CudaSummaries() = default;  // serves nothing
  // tokens: rows of a head at most; more are not served.
  CudaSummaries(int64_t tokens, cuda::DeviceArena& arena);
  // Of pinned memory, once that of the device is there.
  absl::Status Allocate();

  // As kvstore::Accelerator's. Enqueues on the stream and waits for it at the event.
  absl::StatusOr<std::vector<float>> Summarise(const kvstore::SummaryPlan& plan,
                                               const kvstore::SummaryLayout& layout,
                                               const kvstore::Rows& keys,
                                               const kvstore::Rows& values,
                                               const cuda::Stream& stream, const cuda::Event& done,
                                               char* blob);

 private:
  struct Inputs;

  absl::StatusOr<std::vector<float>> MeanOf(const kvstore::Rows& keys, const cuda::Stream& stream,
                                            const cuda::Event& done);
  absl::Status PutInputs(const kvstore::SummaryPlan& plan, const std::vector<float>& centre,
                         const cuda::Stream& stream);
  // All that is enqueued of segments [first, end).
  absl::Status EnqueueSegments(const kvstore::SummaryPlan& plan,
                               const kvstore::SummaryLayout& layout, const kvstore::Rows& keys,
                               const kvstore::Rows& values, int64_t first, int64_t end,
                               const cuda::Stream& stream);

  int64_t tokens_ = 0;
  uint16_t* keys_ = nullptr;  // of a batch
  uint16_t* x_ = nullptr;     // the same as they are compared; then V rows
  uint16_t* means_ = nullptr;
  float* bias_ = nullptr;
  uint8_t* segments_ = nullptr;
  Inputs* inputs_ = nullptr;
  cuda::PinnedBuffer<Inputs> host_inputs_;
  cuda::PinnedBuffer<float> sums_;  // of keys
  cuda::PinnedBuffer<uint8_t> host_segments_;
};

}  // namespace carrel::prefill
