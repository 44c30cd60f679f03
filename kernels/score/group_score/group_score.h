// What:   one score per row for a group of q heads that share a KV head, so that the group selects
//         one set of rows.
// Math:   given scores[h, j] and base[h]: out[j] = max_h (scores[h, j] - base[h]). With base[h] =
//         lse_j(scores[h, .]) over the rows searched, out[j] is the largest log-probability that
//         any head of the group gives row j.
// Source: ours (docs/decisions): raw maxima favour heads with long queries; sums let one
//         indifferent head outvote a sharp one.
// Shapes: scores [group, stride >= rows] f32; base [group] f32; out [rows] f32.
// Edge:   base[h] = -inf (no rows) never occurs with rows > 0.
// Threads: reentrant.
#pragma once

#include <cstdint>
#include <limits>

namespace carrel::kernels {

void GroupScore(const float* scores, int64_t group, int64_t rows, int64_t stride, const float* base,
                float* out);

void RefGroupScore(const float* scores, int64_t group, int64_t rows, int64_t stride,
                   const float* base, float* out);

// ln sum_j exp(scores[j]), -inf for none; relative error of the sum <= 1e-6.
float LogSumExp(const float* scores, int64_t rows);

// The same of scores that are looked at in parts, by several threads, say.
struct LsePart {
  float max = -std::numeric_limits<float>::infinity();
  double sum = 0;  // of exp(score - max)
};
LsePart LsePartOf(const float* scores, int64_t rows);
// Of parts[i * stride], i < count, in this order.
float LogSumExp(const LsePart* parts, int64_t count, int64_t stride);
double RefLogSumExp(const float* scores, int64_t rows);

}  // namespace carrel::kernels
