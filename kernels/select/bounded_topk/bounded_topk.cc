#include "kernels/select/bounded_topk/bounded_topk.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "common/thread_pool.h"
#include "kernels/score/group_score/group_score.h"
#include "kernels/select/topk/topk.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/select/bounded_topk/bounded_topk.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace carrel::kernels::HWY_NAMESPACE {

// s and u of a vector of rows from j on. kHeads: of the group, or 0 where they are counted.
template <int kHeads>
HWY_INLINE void Bounds(const BoundedScores& p, const float* upper_base, int64_t j, FloatVec& score,
                       FloatVec& upper) {
  const FloatTag d;
  const int64_t heads = kHeads > 0 ? kHeads : p.group;
  const FloatVec of_first = hn::LoadU(d, p.scores + j);
  score = hn::Sub(of_first, hn::Set(d, p.base[0]));
  upper = hn::Sub(of_first, hn::Set(d, upper_base[0]));
  for (int64_t h = 1; h < heads; ++h) {
    const FloatVec of_head = hn::LoadU(d, p.scores + h * p.stride + j);
    score = hn::Max(score, hn::Sub(of_head, hn::Set(d, p.base[h])));
    upper = hn::Max(upper, hn::Sub(of_head, hn::Set(d, upper_base[h])));
  }
}

// Where a vector's rows with u > bar, their s and u are appended, all lanes stored: compressing into
// memory takes AMD's processors hundreds of cycles.
struct Listed {
  uint32_t* rows;
  float* s;
  float* u;
  int64_t count;
};

template <int kHeads>
int64_t CollectHeads(const BoundedScores& p, const float* upper_base, int64_t begin, int64_t end,
                     float bar, Listed to) {
  const FloatTag d;
  const hn::RebindToUnsigned<FloatTag> du;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const FloatVec bars = hn::Set(d, bar);
  int64_t j = begin;
  for (; j + lanes <= end; j += lanes) {
    FloatVec score, upper;
    Bounds<kHeads>(p, upper_base, j, score, upper);
    const auto above = hn::Gt(upper, bars);
    // Nobody foresees which vectors have none: to append none is cheap where there is an instruction.
    if (HWY_TARGET > HWY_AVX3 && hn::AllFalse(d, above)) continue;
    const auto row = hn::Iota(du, static_cast<uint32_t>(j));
    hn::StoreU(hn::Compress(row, hn::RebindMask(du, above)), du, to.rows + to.count);
    hn::StoreU(hn::Compress(score, above), d, to.s + to.count);
    hn::StoreU(hn::Compress(upper, above), d, to.u + to.count);
    to.count += static_cast<int64_t>(hn::CountTrue(d, above));
  }
  for (; j < end; ++j) {
    float score = p.scores[j] - p.base[0], upper = p.scores[j] - upper_base[0];
    for (int64_t h = 1; h < p.group; ++h) {
      score = std::max(score, p.scores[h * p.stride + j] - p.base[h]);
      upper = std::max(upper, p.scores[h * p.stride + j] - upper_base[h]);
    }
    if (!(upper > bar)) continue;
    to.rows[to.count] = static_cast<uint32_t>(j);
    to.s[to.count] = score;
    to.u[to.count] = upper;
    ++to.count;
  }
  return to.count;
}

// s of `sampled` rows, spread over all in runs: what a line of a cache holds costs one look.
void SampleImpl(const BoundedScores& p, int64_t sampled, float* sample) {
  constexpr int64_t kRunRows = 4;
  const int64_t runs = sampled / kRunRows;
  for (int64_t run = 0; run < runs; ++run) {
    const int64_t at = (2 * run + 1) * p.rows / (2 * runs) / kRunRows * kRunRows;
#if HWY_TARGET == HWY_SCALAR
    for (int64_t i = at; i < at + kRunRows; ++i) {
      float score = p.scores[i] - p.base[0];
      for (int64_t h = 1; h < p.group; ++h) {
        score = std::max(score, p.scores[h * p.stride + i] - p.base[h]);
      }
      *sample++ = score;
    }
#else
    const hn::FixedTag<float, kRunRows> d;
    auto score = hn::Sub(hn::LoadU(d, p.scores + at), hn::Set(d, p.base[0]));
    for (int64_t h = 1; h < p.group; ++h) {
      const auto of_head = hn::LoadU(d, p.scores + h * p.stride + at);
      score = hn::Max(score, hn::Sub(of_head, hn::Set(d, p.base[h])));
    }
    hn::StoreU(score, d, sample + run * kRunRows);
#endif
  }
}

// Appends rows [begin, end) with u > bar behind `count`; returns how many there are then.
int64_t CollectImpl(const BoundedScores& p, const float* upper_base, int64_t begin, int64_t end,
                    float bar, int64_t count, uint32_t* rows, float* s, float* u) {
  static constexpr decltype(&CollectHeads<0>) kOfHeads[] = {
      CollectHeads<0>, CollectHeads<1>, CollectHeads<2>, CollectHeads<3>, CollectHeads<4>};
  const auto collect = kOfHeads[p.group < static_cast<int64_t>(std::size(kOfHeads)) ? p.group : 0];
  return collect(p, upper_base, begin, end, bar, {rows, s, u, count});
}

// Compresses those of n rows with bar <= u < below into out, which has room for a vector more.
int64_t TakeImpl(const uint32_t* rows, const float* u, int64_t n, float bar, float below,
                 int64_t* out) {
  const FloatTag d;
  const hn::RebindToUnsigned<FloatTag> du;
  const hn::Repartition<int64_t, FloatTag> dw;
  const hn::Rebind<uint32_t, decltype(dw)> dhalf;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d)),
                half = static_cast<int64_t>(hn::Lanes(dw));
  HWY_ALIGN uint32_t taken[HWY_MAX_BYTES / 4];
  int64_t count = 0, i = 0;
  for (; i + lanes <= n; i += lanes) {
    const FloatVec upper = hn::LoadU(d, u + i);
    const auto take = hn::And(hn::Ge(upper, hn::Set(d, bar)), hn::Lt(upper, hn::Set(d, below)));
    hn::Store(hn::Compress(hn::LoadU(du, rows + i), hn::RebindMask(du, take)), du, taken);
    // In any case: nobody foresees how many there are.
    for (int64_t at = 0; at < lanes; at += half) {
      hn::StoreU(hn::BitCast(dw, hn::PromoteTo(hn::RebindToUnsigned<decltype(dw)>(),
                                               hn::Load(dhalf, taken + at))),
                 dw, out + count + at);
    }
    count += static_cast<int64_t>(hn::CountTrue(d, take));
  }
  for (; i < n; ++i) {
    out[count] = rows[i];
    count += static_cast<int>(u[i] >= bar) & static_cast<int>(u[i] < below);
  }
  return count;
}

}  // namespace carrel::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace carrel::kernels {

HWY_EXPORT(SampleImpl);
HWY_EXPORT(CollectImpl);
HWY_EXPORT(TakeImpl);

namespace {

constexpr int64_t kSampledRows = 512;
// Rows that are collected before there is room for more, and a vector that is stored whole.
constexpr int64_t kPieceRows = 4096, kVectorFloats = 64;
// Rows that a thread takes at a time, some microseconds.
constexpr int64_t kLeastSharedRows = 256, kMostSharedRows = 2048;
// Numbers are rounded by 2^-24 of themselves, some times each.
constexpr double kRounding = 0x1p-21;

}  // namespace

float BoundedTopK::SampledBar(int64_t k) {
  const double expected =
      static_cast<double>(k) * static_cast<double>(kSampledRows) / static_cast<double>(given_.rows);
  const auto rank = static_cast<int64_t>(expected + 3 * std::sqrt(expected) + 4);
  if (given_.rows < 2 * kSampledRows || 2 * rank > kSampledRows) return -INFINITY;
  sample_.resize(static_cast<size_t>(kSampledRows));
  HWY_DYNAMIC_DISPATCH(SampleImpl)(given_, kSampledRows, sample_.data());
  return KthLargest(sample_.data(), kSampledRows, rank + 1);
}

// Each piece has room for all its rows; what it has found moves up behind the pieces before it.
void BoundedTopK::CollectOn(ThreadPool& pool, float bar) {
  const int64_t piece_rows =
      std::clamp(given_.rows / (pool.threads() + 1), kLeastSharedRows, kMostSharedRows);
  const int64_t piece_room = piece_rows + kVectorFloats;
  const int64_t pieces = (given_.rows + piece_rows - 1) / piece_rows;
  const auto room = static_cast<size_t>(pieces * piece_room);
  if (rows_.size() < room) {
    rows_.resize(room);
    s_.resize(room);
    u_.resize(room);
  }
  listed_of_piece_.resize(static_cast<size_t>(pieces));
  pool.ParallelFor(pieces, [&](int64_t piece) {
    const int64_t begin = piece * piece_rows, at = piece * piece_room;
    listed_of_piece_[static_cast<size_t>(piece)] = HWY_DYNAMIC_DISPATCH(CollectImpl)(
        given_, upper_base_.data(), begin, std::min(given_.rows, begin + piece_rows), bar, 0,
        &rows_[static_cast<size_t>(at)], &s_[static_cast<size_t>(at)],
        &u_[static_cast<size_t>(at)]);
  });
  listed_ = listed_of_piece_[0];
  for (int64_t piece = 1; piece < pieces; ++piece) {
    const int64_t at = piece * piece_room, count = listed_of_piece_[static_cast<size_t>(piece)];
    std::copy_n(rows_.begin() + at, count, rows_.begin() + listed_);
    std::copy_n(s_.begin() + at, count, s_.begin() + listed_);
    std::copy_n(u_.begin() + at, count, u_.begin() + listed_);
    listed_ += count;
  }
}

void BoundedTopK::Collect(float bar) {
  bar_ = bar;
  if (pool_ != nullptr && pool_->threads() > 0 && given_.rows > kLeastSharedRows) {
    return CollectOn(*pool_, bar);
  }
  listed_ = 0;
  for (int64_t begin = 0; begin < given_.rows; begin += kPieceRows) {
    const int64_t end = std::min(given_.rows, begin + kPieceRows);
    const auto room = static_cast<size_t>(listed_ + (end - begin) + kVectorFloats);
    if (rows_.size() < room) {
      rows_.resize(room);
      s_.resize(room);
      u_.resize(room);
    }
    listed_ = HWY_DYNAMIC_DISPATCH(CollectImpl)(given_, upper_base_.data(), begin, end, bar,
                                                listed_, rows_.data(), s_.data(), u_.data());
  }
}

void BoundedTopK::Take(float bar, float below, Taken& taken) {
  const auto room = static_cast<size_t>(listed_ + kVectorFloats);
  if (taken.room.size() < room) taken.room.resize(room);
  taken.count = HWY_DYNAMIC_DISPATCH(TakeImpl)(rows_.data(), u_.data(), listed_, bar, below,
                                               taken.room.data());
}

std::span<const int64_t> BoundedTopK::First(const BoundedScores& scores, int64_t k,
                                            ThreadPool* pool) {
  given_ = scores;
  pool_ = pool;
  k = std::clamp<int64_t>(k, 1, scores.rows);
  upper_base_.resize(static_cast<size_t>(scores.group));
  for (size_t h = 0; h < upper_base_.size(); ++h) {
    const double base = scores.base[h], error = scores.error[h];
    upper_base_[h] = static_cast<float>(base - error - kRounding * (std::abs(base) + error));
  }
  Collect(SampledBar(k));
  first_bar_ = listed_ < k ? -INFINITY : KthLargest(s_.data(), listed_, k);
  if (first_bar_ <= bar_ && bar_ > -INFINITY) {  // the sample was not like the rows
    group_scores_.resize(static_cast<size_t>(scores.rows));
    GroupScore(scores.scores, scores.group, scores.rows, scores.stride, scores.base,
               group_scores_.data());
    first_bar_ = KthLargest(group_scores_.data(), scores.rows, k);
    Collect(std::nextafter(first_bar_, -INFINITY));
  }
  Take(first_bar_, INFINITY, first_);
  others_.count = 0;
  return first_.span();
}

std::span<const int64_t> BoundedTopK::Others(float last) {
  const auto bar = static_cast<float>(last - kRounding * std::abs(double{last}));
  if (bar >= first_bar_) return {};
  if (bar <= bar_) Collect(std::nextafter(bar, -INFINITY));
  Take(bar, first_bar_, others_);
  return others_.span();
}

std::span<const int32_t> BoundedTopK::Ascending() {
  const auto firsts = static_cast<int32_t>(first_.count),
             others = static_cast<int32_t>(others_.count);
  ascending_.resize(static_cast<size_t>(firsts + others));
  int32_t first = 0, other = 0;
  for (int32_t& place : ascending_) {
    const bool is_first =
        other == others || (first < firsts && first_.room[static_cast<size_t>(first)] <
                                                  others_.room[static_cast<size_t>(other)]);
    place = is_first ? first++ : firsts + other++;
  }
  return ascending_;
}

}  // namespace carrel::kernels
#endif
