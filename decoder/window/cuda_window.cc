#include "decoder/window/cuda_window.h"

#include "common/cuda/status.h"
#include "common/status.h"

namespace carrel::decoder {

absl::StatusOr<CudaWindow> CudaWindow::Create(const AttentionShape& shape, int64_t capacity) {
  CudaWindow window;
  window.shape_ = shape;
  window.capacity_ = capacity;
  window.layer_elements_ = int64_t{shape.kv_heads} * capacity * shape.head_dim;
  ASSIGN_OR_RETURN(window.rows_, cuda::DeviceBuffer<uint16_t>::Create(Elements(shape, capacity)));
  return window;
}

absl::Status CudaWindow::CopyRows(Layer layer, KvHead head, int64_t at, int64_t rows, const void* k,
                                  const void* v) {
  CARREL_CHECK(at + rows <= capacity_);
  const int64_t to = (head.value() * capacity_ + at) * shape_.head_dim;
  const kernels::KvRows kv = this->kv(layer);
  const auto bytes = static_cast<size_t>(rows * shape_.head_dim * 2);
  RETURN_IF_CUDA_ERROR(cudaMemcpy(kv.k + to, k, bytes, cudaMemcpyHostToDevice));
  RETURN_IF_CUDA_ERROR(cudaMemcpy(kv.v + to, v, bytes, cudaMemcpyHostToDevice));
  return absl::OkStatus();
}

}  // namespace carrel::decoder
