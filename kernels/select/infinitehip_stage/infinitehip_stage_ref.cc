#include "kernels/reference.h"
#include "kernels/select/infinitehip_stage/infinitehip_stage.h"
#include "kernels/select/topk/topk.h"

namespace carrel::kernels {
namespace {

using Range = InfiniteHipRange;

std::vector<Range> Prune(const InfiniteHipStageParams& p, int64_t head,
                         const std::vector<Range>& ranges) {
  int64_t rows = 0;
  std::vector<Range> chunks;
  for (const Range& range : ranges) {
    rows += range.end - range.begin;
    for (int64_t at = range.begin; at < range.end; at += p.chunk) {
      chunks.push_back({static_cast<int32_t>(at),
                        static_cast<int32_t>(std::min<int64_t>(range.end, at + p.chunk))});
    }
  }
  if (rows <= p.wanted) return ranges;
  const Bf16* const q = p.q + head * p.group * p.head_dim;
  const Bf16* const k = p.kv.k + head * p.kv.row_stride * p.head_dim;
  const auto score = [&](int64_t row, bool) {
    return RefBestDot(q, p.group, k + row * p.head_dim, p.head_dim);
  };
  std::vector<float> scores;
  for (const Range& chunk : chunks) {
    scores.push_back(static_cast<float>(RefRepresentative(chunk.begin, chunk.end, score)));
  }
  std::vector<Range> kept;
  for (const int64_t i : RefBestIndices(scores, p.wanted / p.chunk)) {
    kept.push_back(chunks[static_cast<size_t>(i)]);
  }
  return kept;
}

}  // namespace

void RefInfiniteHipStage(const InfiniteHipStageParams& p) {
  for (int64_t head = 0; head < p.kv_heads && p.rows > 0; ++head) {
    std::vector<Range> ranges = {{0, static_cast<int32_t>(p.rows)}};
    if (p.in != nullptr) {
      ranges.assign(p.in + head * p.in_stride, p.in + head * p.in_stride + p.in_count[head]);
    }
    const std::vector<Range> kept = Prune(p, head, ranges);
    std::copy(kept.begin(), kept.end(), p.out + head * p.out_stride);
    p.out_count[head] = static_cast<int32_t>(kept.size());
    if (p.ids == nullptr) continue;
    int32_t count = 0;
    for (const Range& range : kept) {
      for (int32_t row = range.begin; row < range.end; ++row) {
        p.ids[head * p.ids_stride + count++] = row;
      }
    }
    p.row_count[head] = count;
  }
}

}  // namespace carrel::kernels
