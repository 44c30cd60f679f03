// What:      a zone whose rows this process holds: a method that chooses among them on the GPU, and the
//            attention to what it chose. Where the rows lie, and what brings the chosen ones to where
//            attention reads them, is a place's: cuda_device_zone.h, cuda_host_zone.h.
// Math:      dense layers attend to every row, the others to those that the method chooses within the
//            layer's budget (decoder/select/cuda_row_selector.h), and with estimate=on to summaries of the
//            rest. Where a place lets a block of a prompt do so, it attends to every row in one pass.
// Errors:    ResourceExhausted device or pinned memory; those of the store while it is filled; those of
//            MakeCudaRowSelector.
// Ownership: as OpenedContext. Rows, and what method=hash keeps of them, are shared with other sequences
//            over the same content.
// Threads:   one. Add and Attend only enqueue and can be captured.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/cuda/arena.h"
#include "common/cuda/buffer.h"
#include "common/cuda/stream.h"
#include "common/ids.h"
#include "decoder/select/cuda_row_selector.h"
#include "decoder/shared.h"
#include "decoder/zone/cuda_summaries.h"
#include "decoder/zone/cuda_zone_attention.h"
#include "decoder/zone/opened_context.h"
#include "kernels/attention/sparse_attention/sparse_attention_cuda.h"
#include "kernels/attention/window_attention/window_attention_cuda.h"
#include "model/device.h"

namespace carrel::decoder {

class CudaHeldZone : public CudaZoneAttention {
 public:
  absl::StatusOr<int64_t> Bytes() final;
  absl::StatusOr<int64_t> ShareableBytes() const final;
  bool shareable_held() const final { return Shared<const Method>::Held(key_); }
  absl::Status Load(int64_t block, const cuda::Stream& stream) final;

  int64_t phases() const final { return selector_ == nullptr ? 1 : selector_->phases(); }
  int64_t PhaseOf(int64_t step) const final {
    return selector_ == nullptr ? 0 : selector_->PhaseOf(step);
  }
  bool adds_alone() const final;
  void Add(Layer layer, const uint16_t* q, int64_t phase, const CudaPartial& to,
           CudaZoneWork& work) const final;
  absl::Status Attend(Layer layer, const CudaQueries& queries, int64_t phase, const CudaPartial& to,
                      const cuda::Stream& stream) final;
  bool prompt_takes_all() const final { return prompt_takes_all_; }
  void Count(int64_t n) final;

 protected:
  // Where attention reads the rows of a selection.
  using Places = CudaSummaries::SelectedRows;

  // place: names it and what it makes of the rows. The zone is not empty. context.rows: where NeedsHostRows,
  // or estimate=on: then it has summaries.
  CudaHeldZone(const OpenedContext& context, CudaZoneShape shape, const std::string& place);

  // Of a place. What its rows take on the device, which is shared; takes hold of them.
  virtual int64_t RowBytes() const = 0;
  virtual absl::Status HoldRows() = 0;
  virtual std::shared_ptr<const void> rows_held() const = 0;
  // Its keys, as a method is made of them; where they have to be unpacked, into `room`, which they refer to.
  virtual CudaKeys Keys(cuda::PinnedBuffer<uint16_t>& room) const = 0;
  // All rows of a dense layer.
  virtual kernels::KvView AllRows(Layer layer) const = 0;
  // Whether the launch that chooses can attend to what it chose: keys and V lie on the device as they are.
  virtual bool attends_in_place() const { return false; }
  // Adds what brings a selection to where it is read. fetched: Predict was called for this layer and token.
  virtual Places Bring(Layer layer, const CudaSelection& selection, bool fetched,
                       CudaZoneWork& work) const = 0;
  // Its memory of a sequence's own: plans it, or lays it out; what it takes beside; what it does with it.
  virtual void LayPlace(cuda::DeviceArena&) {}
  virtual absl::StatusOr<int64_t> BytesBeside() const { return 0; }
  virtual absl::Status Fill(const cuda::Stream&) { return absl::OkStatus(); }

  const SelectorConfig& method() const { return method_; }
  const CudaZoneShape& shape() const { return shape_; }
  // Of what is shared; empty: it is this sequence's own.
  const std::string& key() const { return key_; }
  model::GpuReservation ReservedIfShared(int64_t bytes) const {
    return model::GpuReservation(key_.empty() ? 0 : bytes);
  }
  // Null: every layer is dense.
  const CudaRowSelector* selector() const { return selector_.get(); }
  // Where the method is calibrated by them.
  const HostRows* RowsForSelector() const;
  int64_t AttendedPerHead(Layer layer) const;  // the most of any KV head

 private:
  // What a method keeps of the zone, of all sequences over the content, and the rows that it was made of.
  struct Method {
    std::shared_ptr<const void> rows;
    std::unique_ptr<CudaRowSelector> selector;  // null: each makes its own, or none chooses
    model::GpuReservation reserved;
  };

  void Lay(cuda::DeviceArena& arena);
  Shared<const Method>::Made MakeMethod(const cuda::Stream& stream) const;
  absl::StatusOr<std::unique_ptr<CudaRowSelector>> MakeSelector(const cuda::Stream& stream) const;
  bool shares_selector() const { return shape_.largest_budget() > 0 && SelectorForks(method_); }
  bool takes_all() const { return reading_prompt_ && prompt_takes_all_; }
  int64_t Attended(Layer layer) const;  // rows of one token
  void AddToken(Layer layer, const uint16_t* q, int64_t phase, bool fetched, const CudaPartial& to,
                CudaZoneWork& work) const;
  // Attention to all rows that there is room for in kv; to what was selected.
  kernels::WindowAttentionCudaParams ToAll(const uint16_t* q, const kernels::KvView& kv,
                                           const CudaPartial& to) const;
  kernels::SparseAttentionCudaParams ToChosen(const uint16_t* q, const CudaSelection& selection,
                                              const Places& places, const CudaPartial& to) const;

  const SelectorConfig& method_ = *SelectorOf(context_.config);
  const CudaZoneShape shape_;
  const int64_t splits_;
  const std::string key_;
  const bool prompt_takes_all_ = PromptTakesAll(context_.config, context_.device);
  std::shared_ptr<const Method> shared_;
  std::unique_ptr<CudaRowSelector> selector_;
  cuda::DeviceArena arena_;
  uint8_t* workspace_ = nullptr;  // of attention
  CudaSummaries summaries_;       // of the estimation term; empty: there is none
};

}  // namespace carrel::decoder
