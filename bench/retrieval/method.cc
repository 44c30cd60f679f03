#include "bench/retrieval/method.h"

#include <algorithm>

#include "common/dtype.h"
#include "kernels/score/group_score/group_score.h"
#include "kernels/select/topk/topk.h"

namespace carrel::bench {

std::vector<float> CopyRows(const kvstore::Rows& rows) {
  std::vector<float> copy(static_cast<size_t>(rows.count() * rows.head_dim()));
  rows.ForEachPiece({0, rows.count()}, [&](Position at, const void* from, int64_t n) {
    WidenToFloat(DType::kBf16, from, n * rows.head_dim(), &copy[at * rows.head_dim()]);
  });
  return copy;
}

void JoinHeads(const Question& q, const float* rows, int64_t d, std::vector<Position>& ids) {
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  const auto n = static_cast<int64_t>(ids.size());
  if (n <= q.top_k) return;
  thread_local std::vector<float> scores, group_scores;
  thread_local std::vector<int64_t> best;
  thread_local std::vector<uint64_t> scratch;
  scores.resize(q.group * n);
  group_scores.resize(n);
  for (int64_t j = 0; j < n; ++j) {
    const float* row = rows + ids[j] * d;
    for (int64_t h = 0; h < q.group; ++h) {
      const float* query = q.queries + h * d;
      float lanes[8] = {};
      for (int64_t c = 0; c + 8 <= d; c += 8) {
        for (int64_t l = 0; l < 8; ++l) lanes[l] += query[c + l] * row[c + l];
      }
      float sum = 0;
      for (int64_t c = d / 8 * 8; c < d; ++c) sum += query[c] * row[c];
      for (const float lane : lanes) sum += lane;
      scores[h * n + j] = q.scale * sum;
    }
  }
  kernels::GroupScore(scores.data(), q.group, n, n, q.lse, group_scores.data());
  best.resize(q.top_k);
  const int64_t kept = kernels::TopK(group_scores.data(), n, q.top_k, best.data(), scratch);
  std::vector<Position> joined(kept);
  for (int64_t i = 0; i < kept; ++i) joined[i] = ids[best[i]];
  ids.swap(joined);
}

}  // namespace carrel::bench
