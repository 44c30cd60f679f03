#include "library/layer_times.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <deque>
#include <memory>
#include <random>
#include <vector>

#include "absl/time/clock.h"
#include "common/bf16.h"
#include "common/status.h"
#include "kernels/attention/sparse_attention/sparse_spans.h"
#include "kernels/of_heads.h"
#include "kvstore/engine/attend_all.h"
#include "kvstore/index/int8_scan.h"

namespace carrel::library {
namespace {

using kvstore::Int8Memory;
using kvstore::Int8Scan;
using kvstore::MappedHead;
using kvstore::Rows;

// Between two visits of a layer's rows a token passes the model's weights: rows come from memory, not from a cache.
class Passage {
 public:
  void Pass() {
    for (size_t i = 0; i < bytes_.size(); i += kLine) passed_ += bytes_[i];
    // Read for its own sake: the compiler must not leave it out.
    asm volatile("" : : "r"(passed_) : "memory");
  }

 private:
  static constexpr size_t kBytes = size_t{128} << 20, kLine = 64;
  std::vector<uint8_t> bytes_ = std::vector<uint8_t>(kBytes, 1);
  uint64_t passed_ = 0;
};

// Rows that nobody made, of one layer.
class MadeUpLayer {
 public:
  MadeUpLayer(const AttentionShape& shape, int64_t tokens, ThreadPool* pool)
      : shape_(shape),
        zone_{0, tokens},
        pool_(pool),
        memory_(Int8Memory::Make(shape.kv_heads, tokens, shape.head_dim)) {
    std::mt19937_64 rng(1);
    std::normal_distribution<float> normal;
    const auto numbers = static_cast<size_t>(tokens * shape.head_dim);
    for (int32_t head = 0; head < shape.kv_heads; ++head) {
      for (std::vector<uint16_t>* rows : {&k_.emplace_back(numbers), &v_.emplace_back(numbers)}) {
        // Some thousands are drawn; the others repeat them.
        constexpr size_t kDrawn = 1 << 16;
        for (size_t i = 0; i < numbers; ++i)
          (*rows)[i] = i < kDrawn ? FloatToBf16(normal(rng)) : (*rows)[i - kDrawn + i % 7];
      }
      MappedHead& rows = heads_.emplace_back();
      rows.keys = Rows::FromMemory(k_.back().data(), tokens, shape.head_dim);
      rows.values = Rows::FromMemory(v_.back().data(), tokens, shape.head_dim);
      rows.scan = std::make_unique<Int8Scan>(rows.keys, Int8Memory::Take(memory_, head));
    }
  }

  // q [q_heads, head_dim]. Merging the spans is not timed.
  absl::Status AttendAll(const float* q) const {
    const std::vector<RowRange> spans =
        kvstore::AttendCut(zone_, /*tokens=*/1, shape_.kv_heads, pool_->threads() + 1);
    const auto count = static_cast<int64_t>(spans.size());
    const int64_t d = shape_.head_dim, group = shape_.group(), width = group * (d + 1);
    std::vector<float> states(static_cast<size_t>(shape_.kv_heads * count * width));
    const std::atomic<bool> cancelled{false};
    return InParallel(shape_.kv_heads * count, [&](int64_t i) {
      kvstore::AttendSpanParams params;
      params.rows = &heads_[static_cast<size_t>(i / count)];
      params.span = spans[static_cast<size_t>(i % count)];
      params.queries = q + i / count * group * d;
      params.tokens = 1;
      params.group = group;
      params.scale = kernels::ScaleOf(shape_);
      params.cancelled = &cancelled;
      params.out = &states[static_cast<size_t>(i * width)];
      params.lse = params.out + group * d;
      return kvstore::AttendSpan(params);
    });
  }

  absl::Status AttendBest(const float* q, int64_t budget) const {
    return InParallel(shape_.kv_heads, [&](int64_t head) -> absl::Status {
      thread_local kvstore::SearchScratch scratch;
      thread_local kvstore::SearchResult best;
      thread_local std::vector<const void*> v;
      thread_local std::vector<float> states;
      const MappedHead& rows = heads_[static_cast<size_t>(head)];
      const int64_t d = shape_.head_dim, group = shape_.group();
      RETURN_IF_ERROR(rows.scan->Search({.queries = q + head * group * d,
                                         .group = group,
                                         .scale = kernels::ScaleOf(shape_),
                                         .zone = zone_,
                                         .top_k = budget,
                                         .by_id = true,
                                         .pool = pool_},
                                        scratch, best));
      v.clear();
      for (const Position id : best.ids) v.push_back(rows.values.Address(id));
      auto params = kernels::OfHeads<kernels::SparseAttentionParams>(shape_);
      params.v = v.data();
      params.rows = static_cast<int64_t>(v.size());
      params.scores = best.scores.data();
      states.resize(static_cast<size_t>(group * (d + 1) + kernels::SparseSpanFloats(params)));
      params.out = states.data();
      params.lse = params.out + group * d;
      float* const others = params.lse + group;
      pool_->ParallelFor(kernels::SparseSpans(params.rows),
                         [&](int64_t span) { kernels::SparseAttentionSpan(params, span, others); });
      kernels::MergeSparseSpans(params, others);
      return absl::OkStatus();
    });
  }

 private:
  template <typename Body>
  absl::Status InParallel(int64_t count, const Body& body) const {
    std::vector<absl::Status> statuses(static_cast<size_t>(count));
    pool_->ParallelFor(count, [&](int64_t i) { statuses[static_cast<size_t>(i)] = body(i); });
    for (const absl::Status& status : statuses) RETURN_IF_ERROR(status);
    return absl::OkStatus();
  }

  const AttentionShape shape_;
  const RowRange zone_;
  ThreadPool* const pool_;
  const std::shared_ptr<Int8Memory> memory_;
  std::deque<std::vector<uint16_t>> k_, v_;
  std::deque<MappedHead> heads_;
};

}  // namespace

absl::StatusOr<decoder::TimedLayer> TimeHostLayer(const AttentionShape& shape, int64_t zone_rows,
                                                  int64_t budget, ThreadPool* pool) {
  constexpr int kTimes = 7;
  const MadeUpLayer layer(shape, zone_rows, pool);
  Passage between;
  std::mt19937_64 rng(2);
  std::normal_distribution<float> normal;
  std::vector<float> q(static_cast<size_t>(shape.q_heads * shape.head_dim));
  double seconds = INFINITY;
  for (int i = 0; i < kTimes; ++i) {
    for (float& x : q) x = normal(rng);
    between.Pass();
    const absl::Time start = absl::Now();
    RETURN_IF_ERROR(budget > 0 ? layer.AttendBest(q.data(), budget) : layer.AttendAll(q.data()));
    if (i == 0) continue;  // packs keys
    seconds = std::min(seconds, absl::ToDoubleSeconds(absl::Now() - start));
  }
  return decoder::TimedLayer{
      static_cast<double>(zone_rows),
      static_cast<double>(shape.kv_heads * (budget > 0 ? budget : zone_rows)), seconds};
}

}  // namespace carrel::library
