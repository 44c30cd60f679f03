#include "kernels/gather_pinned-inl.cuh"

namespace carrel::kernels {

cudaError_t GatherPackedRowsCuda(const GatherPackedRowsParams& p, cudaStream_t stream) {
  if (p.kv_heads < 1 || p.kv_heads > 65535 || (p.head_dim != 64 && p.head_dim != 128) ||
      p.packed.row_stride < 1 || p.packed.row_stride > INT32_MAX || p.count < 0 ||
      p.ids_stride < p.count || p.count > INT32_MAX || p.packed.rows == nullptr) {
    return cudaErrorInvalidValue;
  }
  if (p.count == 0) return cudaSuccess;
  bool early = false;
  if (const cudaError_t error = EarlyLaunchServed(&early); error != cudaSuccess) return error;
  GatherArgs args = {};
  args.packed = p.packed;
  args.ids = p.ids;
  args.ids_stride = p.ids_stride;
  args.count = static_cast<int>(p.count);
  args.to_rows = p.to;
  return LaunchGather(args, p.kv_heads, p.head_dim, early, stream);
}

}  // namespace carrel::kernels
