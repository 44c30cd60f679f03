#include "kernels/reference.h"
#include "kernels/select/chunk_prune/chunk_prune.h"
#include "kernels/select/infinitehip_stage/infinitehip_stage.h"

namespace carrel::kernels {

void RefInfiniteHipStage(const InfiniteHipStageParams& p) {
  for (int64_t head = 0; head < p.kv_heads && p.rows > 0; ++head) {
    std::vector<RowRange> ranges;
    if (p.in == nullptr) ranges.push_back({0, p.rows});
    for (int32_t i = 0; p.in != nullptr && i < p.in_count[head]; ++i) {
      const InfiniteHipRange& range = p.in[head * p.in_stride + i];
      ranges.push_back({range.begin, range.end});
    }
    const Bf16* const q = p.q + head * p.group * p.head_dim;
    const Bf16* const k = p.kv.k + head * p.kv.row_stride * p.head_dim;
    const auto score = [&](absl::Span<const ChunkProbe> probes, std::vector<float>& scores) {
      for (size_t i = 0; i < probes.size(); ++i) {
        scores[i] =
            static_cast<float>(RefBestDot(q, p.group, k + probes[i].row * p.head_dim, p.head_dim));
      }
    };
    int32_t kept = 0, rows = 0;
    for (const RowRange& range : KeepBestChunks(ranges, p.chunk, p.wanted, score)) {
      p.out[head * p.out_stride + kept++] = {static_cast<int32_t>(range.begin),
                                             static_cast<int32_t>(range.end)};
      for (Position row = range.begin; p.ids != nullptr && row < range.end; ++row) {
        p.ids[head * p.ids_stride + rows++] = static_cast<int32_t>(row);
      }
    }
    p.out_count[head] = kept;
    if (p.ids != nullptr) p.row_count[head] = rows;
  }
}

}  // namespace carrel::kernels
