// What:      a held zone whose rows lie on the GPU. A block of a prompt attends to all of them in one pass
//            (PromptTakesAll).
// Shapes:    of each layer k, v [kv_heads, rows, head_dim] bf16.
// Errors:    those of cuda_held_zone.h.
// Ownership: as OpenedContext.
// Threads:   one.
#pragma once

#include <memory>

#include "decoder/window/cuda_window.h"
#include "decoder/zone/cuda_held_zone.h"

namespace carrel::decoder {

class CudaDeviceZone final : public CudaHeldZone {
 public:
  explicit CudaDeviceZone(const OpenedContext& context);

 private:
  // Of all sequences over the content.
  struct Rows {
    CudaWindow values;
    model::GpuReservation reserved;
  };
  Shared<const Rows>::Made ReadRows() const;

  int64_t RowBytes() const override {
    return CudaWindow::Bytes(shape().heads, shape().zone.rows());
  }
  absl::Status HoldRows() override;
  std::shared_ptr<const void> rows_held() const override { return rows_; }
  CudaKeys Keys(cuda::PinnedBuffer<uint16_t>&) const override;
  kernels::KvView AllRows(Layer layer) const override { return rows_->values.kv(layer); }
  bool attends_in_place() const override { return true; }
  Places Bring(Layer layer, const CudaSelection&, bool, CudaZoneWork&) const override {
    return {AllRows(layer)};
  }

  std::shared_ptr<const Rows> rows_;
};

}  // namespace carrel::decoder
