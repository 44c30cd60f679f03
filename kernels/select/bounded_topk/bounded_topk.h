// What:   rows that can be among the k best of a group, where its scores are known up to an error: those
//         that look so, and what their exact scores leave possible.
// Math:   with s[h, j] off by at most error[h], row j's group score (kernels/score/group_score) is
//         max_h (s[h, j] - base[h]) by s, and at most u[j] = max_h (s[h, j] + error[h] - base[h]).
//         First: rows whose u is not below the k-th best by s, so at least k. The k-th best of their
//         exact group scores is no higher than that of all, so rows with a lower u are not among the
//         best. Others: the rest, few.
// Source: ours (decision 047). A bar of 2 error below the k-th best by s, which needs no exact score,
//         leaves two thirds more rows.
// Shapes: scores [group, stride >= rows] f32, base and error [group] f32; rows < 2^31.
// Edge:   scores are finite, errors >= 0, rows and k >= 1. Rounding of scores, base and what the caller subtracts is
//         allowed for.
// Ownership: Others looks at the scores that First was given.   Threads: one object, one thread.
// Cost:   one pass over the scores, as a rule, which a pool's threads share in pieces; what is found does
//         not depend on them. Memory for the rows above a sampled bar.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace carrel {
class ThreadPool;
}

namespace carrel::kernels {

struct BoundedScores {
  const float* scores = nullptr;
  int64_t group = 0;
  int64_t rows = 0;
  int64_t stride = 0;
  const float* base = nullptr;
  const float* error = nullptr;
};

class BoundedTopK {
 public:
  // Ascending, until the next call, as what the others return. pool: who else looks at the scores, until
  // the next First; or null.
  std::span<const int64_t> First(const BoundedScores& scores, int64_t k,
                                 ThreadPool* pool = nullptr);
  // last: the k-th best exact group score of First's rows.
  std::span<const int64_t> Others(float last);
  // Where a list of First's rows and then the others' has the rows in ascending order.
  std::span<const int32_t> Ascending();

 private:
  // A list whose room only grows: to make room anew would set it to zero each time.
  struct Taken {
    std::vector<int64_t> room;
    int64_t count = 0;
    std::span<const int64_t> span() const { return {room.data(), static_cast<size_t>(count)}; }
  };
  // Lists the rows with u > bar.
  void Collect(float bar);
  void CollectOn(ThreadPool& pool, float bar);
  float SampledBar(int64_t k);
  // Those listed with bar <= u < below.
  void Take(float bar, float below, Taken& taken);

  BoundedScores given_;
  ThreadPool* pool_ = nullptr;
  std::vector<float> upper_base_;  // [group]: base - error
  float bar_ = 0;                  // of what is listed
  float first_bar_ = 0;            // the k-th best by s
  int64_t listed_ = 0;
  std::vector<uint32_t> rows_;
  std::vector<float> s_, u_;
  std::vector<float> sample_, group_scores_;
  Taken first_, others_;
  std::vector<int64_t> listed_of_piece_;
  std::vector<int32_t> ascending_;
};

}  // namespace carrel::kernels
