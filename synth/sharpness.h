// What:   how queries meet keys, measured alike on a real context and on a made one.
// Math:   p = softmax over a zone of scale * <q, k[j]>. entropy = -sum p ln p; keys_for_75_mass:
//         the least number of keys whose p sum to 0.75; peak = (max - mean) / deviation of the
//         scores: how far the best key stands out (of n keys of a normal distribution: sqrt(2 ln
//         n)). Query-key gap: mean Mahalanobis distance of queries to the distribution of the
//         keys, over that of other keys (RetrievalAttention, section 3; about 1 if queries were
//         like keys).
// Units:  zone: keys [kSink, position - kLocal), the latest kMaxZone of them: what sink and window
//         keep anyway says nothing about retrieval.
#pragma once

#include <cstdint>
#include <vector>

#include "common/ids.h"

namespace carrel::synth {

inline constexpr int64_t kSink = 4;
inline constexpr int64_t kLocal = 64;
inline constexpr int64_t kMaxZone = 16384;
inline constexpr int64_t kLeastZone = 64;  // positions whose zone is smaller tell nothing

RowRange ZoneBefore(Position position);

struct Sharpness {
  double entropy = 0;
  double keys_for_75_mass = 0;
  double peak = 0;
  Position best = 0;  // index into the scores
};

// Scores are scaled. `times` multiplies each first.
Sharpness SharpnessOf(const std::vector<float>& scores, double times = 1);
double EntropyOf(const std::vector<float>& scores, double times);

// scores[j] = scale * <q, rows[j]> for n rows of d bf16 from `rows` on.
void ScoreRows(const float* q, const uint16_t* rows, int64_t n, int64_t d, float scale,
               float* scores);

// keys [n, d]: a sample of the zone, half of which sets the distribution; queries [m, d].
double QueryKeyGap(const std::vector<float>& keys, const std::vector<float>& queries, int64_t d);

}  // namespace carrel::synth
