// What:   one token each of several sequences through every layer on a GPU: weights are read once for all
//         of them; RoPE, window and zone are each sequence's own. Windows, and zones that can (AddWork),
//         are launched for a share of the sequences at once, shares side by side on streams; other zones
//         each by itself.
// Bits:   of each what it gets alone (CudaBackend::tokens_alike).
// Shapes: at most kMembers at once.
// Errors: those of a zone are its sequence's own, in its status: what it computes from there on means
//         nothing. What is returned is the device's, and everybody's.
// Ownership: shared by all passes over the same weights, of which it keeps hold; goes with the last that
//         took part. Keeps nothing of a member after Step.
// Threads: any; one step at a time, others wait.
// Cost:   Of allocates all memory. Steps of the same members, where no zone asks this host, become one
//         graph after some.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "common/cuda/arena.h"
#include "common/cuda/buffer.h"
#include "common/cuda/graph.h"
#include "common/cuda/stream.h"
#include "decoder/window/cuda_window.h"
#include "decoder/zone/cuda_zone_attention.h"
#include "kernels/attention/window_attention/window_attention_cuda.h"
#include "kernels/most_together.h"
#include "model/cuda_backend.h"
#include "model/device.h"

namespace carrel::decoder {

class CudaTogether {
 public:
  static constexpr int64_t kMembers = model::CudaBackend::tokens_alike();

  struct Member {
    int64_t id = 0;  // no other sequence of this process has it, nor will
    TokenId token = 0;
    Position position = 0;
    int64_t row = 0;  // of the window, that the token becomes
    const CudaWindow* window = nullptr;
    CudaZoneAttention* zone = nullptr;
    int64_t phase = 0;             // of the zone
    int64_t splits = 0;            // of the window's attention
    uint8_t* workspace = nullptr;  // likewise
    float* hidden = nullptr;       // device: what leaves the last layer is copied here
    absl::Status* status = nullptr;
  };

  static absl::StatusOr<std::shared_ptr<CudaTogether>> Of(
      const model::ModelConfig& config, const std::shared_ptr<const model::CudaWeights>& weights);

  // Waits for the end. Work on what members point to that was enqueued elsewhere is done.
  // best [members]: the most likely next tokens, below 0 where a logit is NaN. Gives the step's number.
  absl::StatusOr<int64_t> Step(absl::Span<const Member> members, std::vector<TokenId>& best);
  // Of the i-th member of that step, to host memory; false if a later step overwrote the logits.
  absl::StatusOr<bool> CopyLogits(int64_t step, int64_t i, float* logits);

 private:
  static constexpr int64_t kStreams = 4;  // that sequences' attention is spread over

  // What changes from step to step.
  struct Table {
    kernels::RopeCudaRow rows[kMembers];
    int32_t ids[kMembers];
    int32_t window_rows[kMembers];
  };
  struct Memory {
    Memory(const model::ModelConfig& config, cuda::DeviceArena& arena);
    Table* table;
    int32_t* best;
    float *hidden, *q_exact, *logits, *no_lse;
    CudaPartial window, zone;
    uint16_t *q, *attended;
  };

  explicit CudaTogether(const model::ModelConfig& config);
  absl::Status Allocate(const std::shared_ptr<const model::CudaWeights>& weights);
  int64_t width() const { return int64_t{config_.shape.q_heads} * config_.shape.head_dim; }
  const cuda::Stream& main() const { return backend_->stream(); }
  // Of what the i-th sequence enqueues alone.
  const cuda::Stream& StreamOf(size_t i) const { return streams_[i % kStreams]; }
  // Sequences that share launches, and their stream: while one share's rows cross the bus, the next one's are
  // chosen.
  static size_t Shares(size_t members) {
    return (members + kernels::kMostTogether - 1) / kernels::kMostTogether;
  }
  static size_t ShareOf(size_t i, size_t members) { return i * Shares(members) / members; }
  const cuda::Stream& ShareStream(size_t share) const { return streams_[share % kStreams]; }
  CudaQueries Queries(size_t i) const;
  CudaPartial ZoneOf(size_t i) const;

  void FillTable(absl::Span<const Member> members) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status Launch(absl::Span<const Member> members) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The parts of a step. Each enqueues only, but for Answer.
  absl::Status Enqueue(absl::Span<const Member> members) const;
  absl::Status Begin(int64_t n) const;
  absl::Status Project(Layer layer, absl::Span<const Member> members) const;
  absl::Status Attend(Layer layer, absl::Span<const Member> members) const;
  kernels::WindowAttentionCudaParams WindowOf(Layer layer, const Member& member, size_t i) const;
  absl::Status Answer(Layer layer, absl::Span<const Member> members) const;
  absl::Status FinishLayer(Layer layer, int64_t n) const;
  absl::Status End(absl::Span<const Member> members) const;

  const model::ModelConfig config_;
  const float scale_;
  cuda::DeviceArena plan_, arena_;
  model::GpuReservation reserved_;
  std::unique_ptr<model::CudaBackend> backend_;
  std::vector<cuda::Stream> streams_;
  cuda::Event projected_;
  std::vector<cuda::Event> attended_;  // [kStreams]
  Memory memory_;
  cuda::PinnedBuffer<Table> host_table_;
  cuda::PinnedBuffer<int32_t> host_best_;
  cuda::PinnedBuffer<float> host_logits_;

  absl::Mutex mu_;
  int64_t step_ ABSL_GUARDED_BY(mu_) = 0;
  // Of the last step: who took part, how often so since, and the graph of it if there is one.
  std::vector<std::pair<int64_t, int64_t>> members_ ABSL_GUARDED_BY(mu_);
  int64_t repeated_ ABSL_GUARDED_BY(mu_) = 0;
  cuda::Graph graph_ ABSL_GUARDED_BY(mu_);
};

}  // namespace carrel::decoder
