// What:   draws the rows and queries of one layer and KV head like those of a HeadModel, at another
//         length and head_dim.
// Math:   channel pair p of D / 2 takes after the pair of the source that turns about as fast;
//         where several take after one they are drawn independently. A longer document has more
//         topics: mixtures of the source's, moved a little. A query is a draw about its head's own
//         mean; one whose peak, taken from the source's, is beyond what chance gives is moved
//         along the whitened difference of one key from the others until that key stands out so
//         far. Last, the queries of a head are scaled until their mean entropy, at the positions
//         where the source's was measured, is the source's.
// Ownership: keeps a reference to the model, which outlives it.
// Threads: const methods are reentrant. Rows depend on seed and position only.
#pragma once

#include <cstdint>
#include <vector>

#include "common/ids.h"
#include "synth/head_model.h"
#include "synth/rotary.h"
#include "synth/sharpness.h"

namespace carrel::synth {

inline constexpr int64_t kBlockRows = 1024;

class HeadGenerator {
 public:
  HeadGenerator(const HeadModel& model, int64_t head_dim, int64_t tokens, uint64_t seed);

  // Rows [first, first + n) of k and v [n, head_dim] bf16; first is a multiple of kBlockRows and n
  // at most that. cos, sin [n, head_dim / 2]: of the rows' positions.
  void DrawRows(Position first, int64_t n, const float* cos, const float* sin, uint16_t* k,
                uint16_t* v) const;

  // After all rows are drawn. Sets the scale of the queries; returns how they fit.
  HeadFit Calibrate(const uint16_t* k, const Rotary& rotary);
  // [group, head_dim], after RoPE.
  // salt: another draw of the same heads.
  std::vector<float> DrawQueries(const uint16_t* k, const Rotary& rotary, Position position,
                                 uint64_t salt = 0) const;

 private:
  struct ZoneSample;
  void Stretch(const std::vector<float>& from, float* to) const;
  Factor Stretch(const Factor& from) const;
  void MakeTopics();
  ZoneSample SampleZone(const uint16_t* k, RowRange zone, uint64_t seed) const;
  void Point(const ZoneSample& sample, const uint16_t* key, double peak, float* q) const;
  std::vector<float> Draw(const uint16_t* k, const Rotary& rotary, Position position, RowRange zone,
                          uint64_t salt) const;

  const HeadModel& model_;
  const int64_t d_;
  const int64_t tokens_;
  const uint64_t seed_;
  std::vector<int64_t> channel_, copy_;  // [d]: the source's channel, and which of its copies
  int64_t copies_ = 1;
  std::vector<float> key_topics_, value_topics_;  // [topics, d]
  std::vector<double> up_to_;                     // [topics]: cumulated weights
  std::vector<float> key_sinks_, value_sinks_;
  Factor key_noise_, value_noise_;
  std::vector<Factor> query_spread_;  // [group]
  std::vector<std::vector<float>> query_mean_;
  std::vector<double> query_times_;  // [group]
};

}  // namespace carrel::synth
