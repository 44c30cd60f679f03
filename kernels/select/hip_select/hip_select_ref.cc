#include "kernels/reference.h"
#include "kernels/select/hip_select/hip_select.h"
#include "kernels/select/topk/topk.h"

namespace carrel::kernels {
namespace {

struct Branch {
  int64_t begin = 0, end = 0;
};

}  // namespace

void RefHipSelect(const HipSelectParams& p) {
  const int64_t blocks = (p.rows + p.block_k - 1) / p.block_k;
  const int64_t wanted = std::max<int64_t>(1, p.budget / p.block_k);
  const int64_t chunks = std::min(wanted, blocks);
  const auto single = [](const Branch& b) { return b.end - b.begin == 1; };
  for (int64_t head = 0; head < p.kv_heads && p.rows > 0; ++head) {
    const Bf16* const q = p.q + head * p.group * p.head_dim;
    const Bf16* const k = p.kv.k + head * p.kv.row_stride * p.head_dim;
    std::vector<Branch> kept;
    for (int64_t i = 0; i < chunks; ++i) {
      kept.push_back({i * blocks / chunks, (i + 1) * blocks / chunks});
    }
    while (!std::all_of(kept.begin(), kept.end(), single)) {
      std::vector<Branch> branches;
      for (const Branch& b : kept) {
        const int64_t middle = (b.begin + b.end) / 2;
        if (!single(b)) branches.push_back({b.begin, middle});
        branches.push_back({middle, b.end});
      }
      std::vector<float> scores;
      for (const Branch& b : branches) {
        const int64_t first = (b.begin + b.end) / 2 * p.block_k;
        double best = -INFINITY;
        for (int64_t row = first; row < std::min(p.rows, first + p.block_k); ++row) {
          best = std::max(best, RefBestDot(q, p.group, k + row * p.head_dim, p.head_dim));
        }
        scores.push_back(static_cast<float>(best));
      }
      kept.clear();
      for (const int64_t i : RefBestIndices(scores, wanted)) {
        kept.push_back(branches[static_cast<size_t>(i)]);
      }
    }
    int64_t count = 0;
    for (const Branch& b : kept) {
      for (int64_t i = 0; i < p.block_k; ++i) {
        const int64_t row = b.begin * p.block_k + i;
        if (row < p.rows && count < p.budget) {
          p.ids[head * p.ids_stride + count++] = static_cast<int32_t>(row);
        }
      }
    }
    p.row_count[head] = static_cast<int32_t>(count);
  }
}

}  // namespace carrel::kernels
