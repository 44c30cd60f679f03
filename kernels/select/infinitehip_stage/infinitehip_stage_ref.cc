#include <algorithm>
#include <cmath>
#include <vector>

#include "common/bf16.h"
#include "kernels/select/infinitehip_stage/infinitehip_stage.h"
#include "kernels/select/topk/topk.h"

namespace carrel::kernels {
namespace {

using Range = InfiniteHipRange;

double Score(const InfiniteHipStageParams& p, int64_t head, int64_t row) {
  double best = -INFINITY;
  for (int64_t h = 0; h < p.group; ++h) {
    double sum = 0;
    for (int64_t c = 0; c < p.head_dim; ++c) {
      sum += double{Bf16ToFloat(p.q[(head * p.group + h) * p.head_dim + c])} *
             Bf16ToFloat(p.kv.k[(head * p.kv.row_stride + row) * p.head_dim + c]);
    }
    best = std::max(best, sum);
  }
  return best;
}

double RepresentativeScore(const InfiniteHipStageParams& p, int64_t head, Range chunk) {
  if (chunk.end - chunk.begin == 1) return Score(p, head, chunk.begin);
  const int32_t middle = (chunk.begin + chunk.end) / 2;
  const double left = Score(p, head, (chunk.begin + middle) / 2);
  const double right = Score(p, head, (middle + chunk.end) / 2);
  const Range better = right > left ? Range{middle, chunk.end} : Range{chunk.begin, middle};
  return better.end - better.begin == 1 ? std::max(left, right)
                                        : RepresentativeScore(p, head, better);
}

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
  std::vector<float> scores;
  for (const Range& chunk : chunks) {
    scores.push_back(static_cast<float>(RepresentativeScore(p, head, chunk)));
  }
  std::vector<int64_t> best(static_cast<size_t>(p.wanted / p.chunk));
  best.resize(static_cast<size_t>(RefTopK(scores.data(), static_cast<int64_t>(scores.size()),
                                          p.wanted / p.chunk, best.data())));
  std::sort(best.begin(), best.end());
  std::vector<Range> kept;
  for (const int64_t i : best) kept.push_back(chunks[static_cast<size_t>(i)]);
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
