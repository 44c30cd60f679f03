// Peers without an index: exact fp32 by BLAS, and Quest-style bounds of pages.
#include <cblas.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "bench/retrieval/method.h"
#include "common/dtype.h"
#include "common/status.h"
#include "kernels/score/dot_score/dot_score.h"
#include "kernels/score/group_score/group_score.h"
#include "kernels/select/topk/topk.h"

namespace carrel::bench {
namespace {

constexpr int64_t kPageRows = 16;

struct Scratch {
  std::vector<float> scores, group_scores, base, queries;
  std::vector<int64_t> best;
  std::vector<uint64_t> topk;
  std::vector<const void*> pointers;
};
Scratch& ThreadScratch() {
  thread_local Scratch scratch;
  return scratch;
}

// The best `wanted` of n by group score.
int64_t Best(Scratch& s, const float* base, int64_t group, int64_t n, int64_t wanted) {
  s.group_scores.resize(n);
  kernels::GroupScore(s.scores.data(), group, n, n, base, s.group_scores.data());
  s.best.resize(std::min(wanted, n));
  return kernels::TopK(s.group_scores.data(), n, static_cast<int64_t>(s.best.size()), s.best.data(),
                       s.topk);
}

class BlasExact : public Method {
 public:
  explicit BlasExact(const kvstore::Rows& keys) : d_(keys.head_dim()), rows_(CopyRows(keys)) {}
  absl::Status Find(const Question& q, std::vector<Position>& ids) const override {
    Scratch& s = ThreadScratch();
    const int64_t n = q.zone.rows();
    s.scores.resize(q.group * n);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, static_cast<int>(q.group),
                static_cast<int>(n), static_cast<int>(d_), q.scale, q.queries, static_cast<int>(d_),
                &rows_[q.zone.begin * d_], static_cast<int>(d_), 0, s.scores.data(),
                static_cast<int>(n));
    s.base.resize(q.group);  // it scores all rows: the lse is its own
    for (int64_t h = 0; h < q.group; ++h) s.base[h] = kernels::LogSumExp(&s.scores[h * n], n);
    const int64_t found = Best(s, s.base.data(), q.group, n, q.top_k);
    ids.resize(found);
    for (int64_t i = 0; i < found; ++i) ids[i] = q.zone.begin + s.best[i];
    return absl::OkStatus();
  }
  int64_t bytes() const override { return static_cast<int64_t>(rows_.size() * sizeof(float)); }

 private:
  const int64_t d_;
  const std::vector<float> rows_;
};

// The largest and smallest value of each channel of a page bound its keys' scores: with q's
// positive and negative parts side by side, one inner product per page. (Tang et al. 2024, Quest,
// section 3.)
class PageBounds : public Method {
 public:
  explicit PageBounds(const kvstore::Rows& keys) : keys_(keys), d_(keys.head_dim()) {
    const int64_t pages = (keys.count() + kPageRows - 1) / kPageRows;
    bounds_.resize(pages * 2 * d_);
    std::vector<float> row(d_), low(d_), high(d_);
    for (int64_t page = 0; page < pages; ++page) {
      low.assign(d_, INFINITY);
      high.assign(d_, -INFINITY);
      const Position end = std::min(keys.count(), (page + 1) * kPageRows);
      for (Position at = page * kPageRows; at < end; ++at) {
        WidenToFloat(DType::kBf16, keys.Address(at), d_, row.data());
        for (int64_t c = 0; c < d_; ++c) {
          low[c] = std::min(low[c], row[c]);
          high[c] = std::max(high[c], row[c]);
        }
      }
      for (int64_t c = 0; c < d_; ++c) {  // values of bf16 keys: nothing is rounded
        bounds_[page * 2 * d_ + c] = FloatToBf16(high[c]);
        bounds_[page * 2 * d_ + d_ + c] = FloatToBf16(low[c]);
      }
    }
  }
  absl::Status Find(const Question& q, std::vector<Position>& ids) const override {
    Scratch& s = ThreadScratch();
    s.queries.resize(q.group * 2 * d_);
    for (int64_t h = 0; h < q.group; ++h) {
      for (int64_t c = 0; c < d_; ++c) {
        const float x = q.queries[h * d_ + c];
        s.queries[h * 2 * d_ + c] = std::max(x, 0.0f);
        s.queries[h * 2 * d_ + d_ + c] = std::min(x, 0.0f);
      }
    }
    const int64_t first = q.zone.begin / kPageRows;
    const int64_t pages = (q.zone.end + kPageRows - 1) / kPageRows - first;
    s.scores.resize(q.group * pages);
    kernels::DotScore(s.queries.data(), q.group, 2 * d_, &bounds_[first * 2 * d_], pages, q.scale,
                      s.scores.data(), pages);
    const int64_t wanted = (std::max<int64_t>(q.effort, q.top_k) + kPageRows - 1) / kPageRows;
    const int64_t found = Best(s, q.lse, q.group, pages, wanted);
    ids.clear();
    for (int64_t i = 0; i < found; ++i) {
      const Position begin = std::max(q.zone.begin, (first + s.best[i]) * kPageRows);
      const Position end = std::min(q.zone.end, (first + s.best[i] + 1) * kPageRows);
      for (Position at = begin; at < end; ++at) ids.push_back(at);
    }
    const auto n = static_cast<int64_t>(ids.size());
    s.pointers.resize(n);
    for (int64_t j = 0; j < n; ++j) s.pointers[j] = keys_.Address(ids[j]);
    s.scores.resize(q.group * n);
    // Attention needs the scores of the rows in any case; beyond top_k rows the best are kept.
    kernels::DotScoreRows(q.queries, q.group, d_, s.pointers.data(), n, q.scale, s.scores.data(),
                          n);
    if (n <= q.top_k) return absl::OkStatus();
    const int64_t kept = Best(s, q.lse, q.group, n, q.top_k);
    std::vector<Position> best(kept);
    for (int64_t i = 0; i < kept; ++i) best[i] = ids[s.best[i]];
    ids.swap(best);
    return absl::OkStatus();
  }
  int64_t bytes() const override { return static_cast<int64_t>(bounds_.size() * sizeof(uint16_t)); }

 private:
  const kvstore::Rows keys_;
  const int64_t d_;
  std::vector<uint16_t> bounds_;  // [pages, 2 head_dim]: largest, then smallest
};

template <typename T>
absl::StatusOr<std::unique_ptr<Method>> Build(const kvstore::Rows& keys,
                                              const kvstore::SampledQueries&) {
  return std::make_unique<T>(keys);
}

}  // namespace

std::vector<MethodKind> ExactPeers() {
  MethodKind blas{.name = "blas-fp32", .peer = true, .effort_name = "none", .exact_effort = 0};
  blas.efforts = [](int64_t) { return std::vector<int32_t>{0}; };
  blas.build = Build<BlasExact>;
  MethodKind pages{.name = "page-bounds", .peer = true, .effort_name = "rows of chosen pages"};
  pages.efforts = [](int64_t k) {
    return std::vector<int32_t>{static_cast<int32_t>(k), static_cast<int32_t>(4 * k),
                                static_cast<int32_t>(16 * k)};
  };
  pages.exact_effort = 1 << 30;
  pages.build = Build<PageBounds>;
  return {blas, pages};
}

}  // namespace carrel::bench
