// What:   the runner of a GPU. Weights are read once for all tokens of a step; RoPE, window and zone are each
//         sequence's own. Windows and zones of a share of the sequences are launched at once
//         (zone/cuda_zone_work.h), shares side by side on streams. A step of the same sequences, one token
//         each, becomes a graph: of one alone when it is opened, of several after some steps; where a zone
//         asks this host, the graphs of one end there.
// Bits:   as runner.h (CudaBackend::tokens_alike).
// Errors: those of a zone are its sequence's own, in its status: what it computes from there on means
//         nothing. What else fails is the device's, and everybody's.
// Ownership: as runner.h; keeps nothing of a sequence after Step but the graph of the last ones.
// Threads: any; one step, or capture, at a time.
// Cost:   Hold allocates all memory: weights, if nobody holds them, and what steps need.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "common/cuda/arena.h"
#include "common/cuda/buffer.h"
#include "common/cuda/stream.h"
#include "decoder/runner/cuda_sequence.h"
#include "decoder/runner/runner.h"
#include "kernels/attention/prefill_attention/prefill_attention_cuda.h"
#include "kernels/layer/rope/rope_cuda.h"
#include "model/checkpoint.h"
#include "model/cuda_backend.h"

namespace carrel::decoder {

class CudaRunner final : public Runner {
 public:
  static constexpr int64_t kBlockTokens = 256;  // of a slice

  struct Member {
    CudaSequence* sequence = nullptr;
    const Slice* slice = nullptr;
    SliceResult* result = nullptr;
    int64_t first = 0, n = 0;  // of the step's tokens
    int64_t phase = 0;         // of the zone

    absl::Status& status() const { return result->status; }
  };

  explicit CudaRunner(const model::Checkpoint& checkpoint);

  std::vector<SliceResult> Step(absl::Span<const Slice> batch) override;

  // Takes the memory, where that was not done. The pool shares the copying of weights.
  absl::Status Hold(ThreadPool* pool);
  // The device memory that it holds then, and what Hold would take of it now.
  int64_t Bytes() const { return WeightBytes() + own_bytes_; }
  int64_t WeightBytes() const { return model::CudaWeights::Bytes(config_); }
  int64_t MissingBytes();
  // Makes the graphs of a token of it. Runs one first, so that every kernel is loaded.
  absl::Status Capture(CudaSequence& sequence);

 private:
  using Members = absl::Span<const Member>;
  static constexpr int64_t kMembers = model::CudaBackend::tokens_alike();
  static constexpr int64_t kStreams = 4;  // that attention is spread over, the backend's the first

  // What changes from step to step; of tokens as many are copied as there are.
  struct Table {
    int32_t window_rows[kMembers];  // of each member
    int32_t steps[kMembers];        // where its first token stands, behind its context
    int32_t ids[kBlockTokens];
    kernels::RopeCudaRow rows[kBlockTokens];
  };
  struct Memory {
    Memory(const model::ModelConfig& config, cuda::DeviceArena& arena);
    Table* table;
    int32_t* best;
    float *hidden, *last, *q_exact, *logits, *no_lse, *room;
    CudaPartial window, zone;
    uint16_t *q, *attended;
  };

  // Of a token's attention in parts, for those that pass beside others.
  static int64_t room_floats(const model::ModelConfig& config) {
    return kernels::kMaxPrefillParts * config.shape.q_heads * (config.shape.head_dim + 1);
  }
  int64_t width() const { return int64_t{config_.shape.q_heads} * config_.shape.head_dim; }
  const cuda::Stream& main() const { return backend_->stream(); }
  const cuda::Stream& StreamOf(size_t share) const {
    return share % kStreams == 0 ? main() : streams_[share % kStreams - 1];
  }
  CudaQueries Queries(const Member& member) const;
  CudaPartial Of(const CudaPartial& partial, const Member& member) const;

  absl::Status CheckSlice(const Slice& slice) const;
  void StepPart(absl::Span<const Slice> batch, absl::Span<const size_t> part,
                std::vector<SliceResult>& results) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Waits for the end. Work that was enqueued elsewhere on what members point to is done.
  absl::Status Run(Members members) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status TakeLogits(Members members) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CopyLogits(const float* from, int64_t rows, float* to);
  void FillTable(Members members);
  // Null: there are none.
  absl::StatusOr<const StepGraphs*> GraphsOf(Members members) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<StepGraphs> CaptureStep(Members members) const;

  // The parts of a step. Each enqueues only, but for Answer.
  absl::Status Enqueue(Members members, const StepGraphs* graphs) const;
  absl::Status Begin(Members members) const;
  absl::Status Project(Layer layer, Members members) const;
  absl::Status Predict(Layer next, const Member& member, size_t i) const;
  absl::Status Attend(Layer layer, Members members) const;
  // Shares of the sequences are attended to side by side.
  absl::Status Fork(size_t shares) const;
  absl::Status Join(size_t shares) const;
  void Answer(Layer layer, Members members) const;
  absl::Status FinishLayer(Layer layer, Members members) const;
  absl::Status End(Members members) const;

  const model::Checkpoint checkpoint_;  // the sequences' own may go before
  const model::ModelConfig& config_;
  cuda::DeviceArena plan_, arena_;
  Memory memory_;
  const int64_t own_bytes_;  // beside the weights

  absl::Mutex mu_;
  std::unique_ptr<model::CudaBackend> backend_;  // null: nothing is held
  model::GpuReservation reserved_;
  std::vector<cuda::Stream> streams_;
  cuda::Event projected_;
  std::vector<cuda::Event> attended_;  // [streams_]
  cuda::PinnedBuffer<Table> host_table_;
  cuda::PinnedBuffer<int32_t> host_best_;
  cuda::PinnedBuffer<float> host_logits_;
  // Of the last step of several: who took part in which phase, how often so since, and its graphs.
  std::vector<std::pair<int64_t, int64_t>> members_ ABSL_GUARDED_BY(mu_);
  int64_t repeated_ ABSL_GUARDED_BY(mu_) = 0;
  StepGraphs graphs_ ABSL_GUARDED_BY(mu_);
};

}  // namespace carrel::decoder
