#include "kernels/reference.h"
#include "kernels/select/chunk_prune/chunk_prune.h"
#include "kernels/select/hip_select/hip_select.h"

namespace carrel::kernels {

void RefHipSelect(const HipSelectParams& p) {
  const RowRange zone{0, p.rows};
  for (int64_t head = 0; head < p.kv_heads && p.rows > 0; ++head) {
    const Bf16* const q = p.q + head * p.group * p.head_dim;
    const Bf16* const k = p.kv.k + head * p.kv.row_stride * p.head_dim;
    const auto score = [&](absl::Span<const ChunkProbe> probes, std::vector<float>& scores) {
      for (size_t i = 0; i < probes.size(); ++i) {
        scores[i] =
            static_cast<float>(RefBestDot(q, p.group, k + probes[i].row * p.head_dim, p.head_dim));
      }
    };
    int64_t count = 0;
    for (const ScoredBlock& found : HalveChunks(
             zone, p.block_k, std::max<int64_t>(1, p.budget / p.block_k), MiddleBlock, score)) {
      const RowRange rows = RowsOfBlock(zone, p.block_k, found.block);
      for (Position row = rows.begin; row < rows.end && count < p.budget; ++row) {
        p.ids[head * p.ids_stride + count++] = static_cast<int32_t>(row);
      }
    }
    p.row_count[head] = static_cast<int32_t>(count);
  }
}

}  // namespace carrel::kernels
