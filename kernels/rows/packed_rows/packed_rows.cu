#include <vector>

#include "kernels/gather_pinned-inl.cuh"

namespace carrel::kernels {
namespace {

bool Served(const GatherPackedRowsParams& p) {
  return p.kv_heads >= 1 && p.kv_heads <= 65535 && (p.head_dim == 64 || p.head_dim == 128) &&
         p.packed.row_stride >= 1 && p.packed.row_stride <= INT32_MAX && p.count >= 0 &&
         p.ids_stride >= p.count && p.count <= INT32_MAX && p.packed.rows != nullptr;
}

GatherShape ShapeOf(const GatherPackedRowsParams& p) { return {p.kv_heads, p.head_dim, true}; }

GatherArgs ArgsOf(const GatherPackedRowsParams& p) {
  GatherArgs args = {};
  args.packed = p.packed;
  args.ids = p.ids;
  args.ids_stride = p.ids_stride;
  args.count = static_cast<int>(p.count);
  args.to_rows = p.to;
  return args;
}

}  // namespace

cudaError_t GatherPackedRowsCuda(std::span<const GatherPackedRowsParams> all, cudaStream_t stream) {
  if (!std::all_of(all.begin(), all.end(), Served)) return cudaErrorInvalidValue;
  std::vector<GatherPackedRowsParams> wanted;
  for (const GatherPackedRowsParams& p : all) {
    if (p.count > 0) wanted.push_back(p);
  }
  return ForStretches(
      std::span<const GatherPackedRowsParams>(wanted),
      [](const auto& a, const auto& b) { return ShapeOf(a) == ShapeOf(b); },
      [&](std::span<const GatherPackedRowsParams> some) {
        return LaunchGather(some, ArgsOf, ShapeOf(some[0]), stream);
      });
}

}  // namespace carrel::kernels
