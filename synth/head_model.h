// What:   what is measured of one layer and KV head of a real context: enough to draw rows like it.
//         Keys are turned back by RoPE first, so that one distribution describes every position.
// Math:   a key is the centre of its token's topic plus noise; so is its value. Topics are k-means
//         clusters of keys; a token keeps the topic of the one before it with probability `stay`.
//         Noise is a covariance of low rank plus a diagonal (linear_algebra.h), and so is that of
//         the queries, about a mean of their own. `peaks`: how far the best key of each sampled
//         query stands out (sharpness.h): which queries point at single keys, and how sharply.
// Errors: DataLoss of rows; InvalidArgument a source without rows or queries enough.
// Cost:   reads at most kSampleRows rows and kSampledZones zones of kMaxZone rows.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "common/ids.h"
#include "synth/linear_algebra.h"

namespace carrel::kvstore {
class StoredContext;
}

namespace carrel::synth {

inline constexpr int64_t kSampleRows = 8192;
inline constexpr int64_t kMaxTopics = 64;
inline constexpr int64_t kNoiseRank = 16;
inline constexpr int64_t kSampledZones = 32;

// How queries and keys of one KV head lie to each other: means over queries and heads.
struct HeadFit {
  double gap = 0;
  double entropy = 0;
  double keys_for_75_mass = 0;
  double peak = 0;
  double topic_share = 0;  // of the variance of the keys, between topics
};

struct QueryModel {
  std::vector<float> mean;  // [d], before RoPE
  Factor spread;
  std::vector<float> peaks;  // ascending
  double entropy = 0;        // mean over the measured positions
};

struct HeadModel {
  int64_t head_dim = 0;
  int64_t tokens = 0;
  std::vector<float> weights;                   // [topics], sum 1
  std::vector<float> key_topics, value_topics;  // [topics, d]; keys before RoPE
  double stay = 0;
  Factor key_noise, value_noise;
  std::vector<float> key_sinks, value_sinks;  // [kSink, d]: the first rows, before RoPE
  std::vector<QueryModel> queries;            // [group]
  double shared_best = 0;          // how often two heads of the group have the same best key
  std::vector<Position> measured;  // positions at which sharpness was measured
  HeadFit fit;

  int64_t topics() const { return static_cast<int64_t>(weights.size()); }
};

// theta: of the source's RoPE; 0: rows are taken as they lie.
absl::StatusOr<HeadModel> MeasureHead(const kvstore::StoredContext& context, Layer layer,
                                      KvHead kv_head, double theta);

}  // namespace carrel::synth
