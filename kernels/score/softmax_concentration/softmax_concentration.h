// What:   how concentrated a softmax is: its entropy, and how many of its elements carry a given
//         share of it.
// Math:   p = softmax(scores); entropy = -sum p ln p (nats); elements = the least number of p that
//         sum to at least `share`.
// Shapes: scores [count] f32, count >= 1; scratch [count] f32, written. 0 < share < 1.
// Edge:   of scores of which the largest is not finite, entropy is NaN and elements is anything in
//         0 .. count.
// Source: ours: weights are taken once; then the weight of the last element that counts is sought
//         by halving, in units of the last place, among fewer and fewer of them.
// Threads: reentrant.
// Cost:   one pass of exponentials and some three of comparisons. Sums are fp32 over 256 elements
//         and fp64 beyond: where the share is reached to 1e-6, `elements` may be one off.
#pragma once

#include <cstdint>

namespace carrel::kernels {

struct Concentration {
  double entropy_nats = 0;
  int64_t elements = 0;
};

Concentration SoftmaxConcentration(const float* scores, int64_t count, double share,
                                   float* scratch);
Concentration RefSoftmaxConcentration(const float* scores, int64_t count, double share,
                                      float* scratch);

}  // namespace carrel::kernels
