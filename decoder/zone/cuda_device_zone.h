// What:      the zone held on the GPU: its rows, a method that chooses among them there, and their
//            attention.
// Math:      dense layers attend to every row, the others to those that the method chooses within
//            the layer's budget (decoder/select/cuda_row_selector.h), and with estimate=on to summaries
//            of the rest. A block of a prompt attends to every row in one pass (PromptRows).
// Shapes:    of each layer k, v [kv_heads, rows, head_dim] bf16; of the method what it keeps.
// Errors:    ResourceExhausted device memory; those of the store while it is filled; those of
//            MakeCudaRowSelector.
// Ownership: as OpenedContext. Rows, and what method=hash keeps of them, are shared with other sequences
//            over the same content.
// Threads:   one. Attend only enqueues and can be captured.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/cuda/arena.h"
#include "common/cuda/stream.h"
#include "common/ids.h"
#include "decoder/select/cuda_row_selector.h"
#include "decoder/window/cuda_window.h"
#include "decoder/zone/cuda_shared.h"
#include "decoder/zone/cuda_summaries.h"
#include "decoder/zone/cuda_zone_attention.h"
#include "decoder/zone/opened_context.h"
#include "kernels/attention/sparse_attention/sparse_attention_cuda.h"
#include "kernels/attention/window_attention/window_attention_cuda.h"
#include "model/device.h"

namespace carrel::decoder {

class CudaDeviceZone final : public CudaZoneAttention {
 public:
  // The zone is not empty. context.rows: where NeedsHostRows, or estimate=on:
  // then it has summaries.
  CudaDeviceZone(const DeviceZoneOptions& options, const OpenedContext& context);

  absl::StatusOr<int64_t> Bytes() const override;
  absl::StatusOr<int64_t> ShareableBytes() const override;
  bool shareable_held() const override { return CudaShared<Parts>::Held(key_); }
  // Reads the zone from the store.
  absl::Status Load(int64_t block, const cuda::Stream& stream) override;

  int64_t phases() const override { return selector_ == nullptr ? 1 : selector_->phases(); }
  int64_t PhaseOf(int64_t step) const override {
    return selector_ == nullptr ? 0 : selector_->PhaseOf(step);
  }
  absl::Status Attend(Layer layer, const CudaQueries& queries, int64_t phase, const CudaPartial& to,
                      const cuda::Stream& stream) override;
  void set_reading_prompt(bool reading) override { reading_prompt_ = reading; }
  bool prompt_takes_all() const override { return prompt_takes_all_; }
  void Count(int64_t n, std::vector<LayerStatistics>& layers) const override;
  bool AddWork(Layer layer, const uint16_t* q, const CudaPartial& to,
               CudaZoneWork& work) const override;

 private:
  // Of all sequences over the content.
  struct Parts {
    CudaWindow values;  // the zone's rows
    // That others are made from; null: each sequence makes its own.
    std::unique_ptr<CudaRowSelector> selector;
    model::GpuReservation reserved;
  };
  CudaShared<Parts>::Made MakeParts(const cuda::Stream& stream) const;
  absl::StatusOr<std::unique_ptr<CudaRowSelector>> MakeSelector(const CudaWindow& values,
                                                                const cuda::Stream& stream) const;
  bool shares_selector() const { return shape_.largest_budget() > 0 && SelectorForks(method_); }
  kernels::KvView kv(Layer layer) const { return parts_->values.kv(layer); }

  // What lies on the device beside these and the method.
  struct Memory {
    uint8_t* workspace = nullptr;  // of attention
    CudaSummaries summaries;       // of the estimation term; empty: there is none
  };
  // Plans it, or lays it out.
  Memory Lay(cuda::DeviceArena& arena) const;

  bool takes_all() const { return reading_prompt_ && prompt_takes_all_; }
  int64_t attended(Layer layer) const override;
  // Where the method is calibrated by them.
  const HostRows* RowsForSelector() const;
  // A block, to every row.
  absl::Status AttendPrompt(Layer layer, const CudaQueries& queries, const CudaPartial& to,
                            const cuda::Stream& stream) const;
  // One token.
  absl::Status AttendToken(Layer layer, const uint16_t* q, int64_t phase, float* out, float* lse,
                           const cuda::Stream& stream) const;
  absl::Status AttendChosen(Layer layer, const uint16_t* q, int64_t phase, float* out, float* lse,
                            const cuda::Stream& stream) const;

  // Attention to the whole zone, and to what was selected.
  kernels::WindowAttentionCudaParams ToAll(Layer layer, const uint16_t* q,
                                           const CudaPartial& to) const;
  kernels::SparseAttentionCudaParams ToChosen(Layer layer, const uint16_t* q,
                                              const CudaPartial& to) const;

  const SelectorConfig method_;
  const OpenedContext context_;
  const CudaZoneShape shape_;
  const float scale_;
  const int64_t splits_;
  const std::string key_;  // of its parts
  std::shared_ptr<const Parts> parts_;
  std::unique_ptr<CudaRowSelector> selector_;  // null: every layer is dense
  cuda::DeviceArena arena_;
  Memory memory_;
  const bool prompt_takes_all_;
  bool reading_prompt_ = false;
};

}  // namespace carrel::decoder
