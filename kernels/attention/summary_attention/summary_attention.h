// What:   attention of one token's group of q heads over clusters of rows, each known by an int8
//         mean of its keys and of its V rows, corrected by single V rows.
// Math:   ScoreSummaries, with mean = scale key_scale[c] <q[h], keys[c]>,
//                              variance = share spread[c] scale^2 |q[h]|^2:
//           scores[h, c] = mean + variance / 2
//         Rows whose scores are given, at most all of a cluster's, are taken out of its mean and its
//         variance, where some are left: away[j] = row_scores[h, j] - base[h] - mean,
//           shift = min(-sum_j away[j] / left[c], 0)
//           rest = (counts[c] variance - sum_j away[j]^2) / left[c] - shift^2, within [0, variance]
//           scores[h, c] = mean + shift + rest / 2
//         AttendSummaries, e[h, c] = exp(min(scores[h, c], bound[h])):
//           lse[h] = ln sum_c rests[c] e[h, c]
//           out[h] = (sum_c counts[c] e[h, c] value_scale[c] values[c] +
//                     row_weight sum_j e[h, row_cluster[j]] v[j]) / exp(lse[h])
//         so that rows with weight -1 are taken out of their clusters' sums, and rests[c] says how
//         many rows stay.
// Shapes: q, out [group, head_dim] f32; keys, values [clusters, head_dim] i8 at any byte address;
//         v[j] points at head_dim bf16, at any byte address; scores [group, clusters] f32; row_scores
//         [group, row_score_stride] f32; lse [group] f32; row_cluster[j] < clusters <= 256.
// Units:  scale includes 1/sqrt(head_dim); lse is a natural logarithm.
// Edge:   a cluster with rests = 0 does not count, nor do its rows, whatever its score; no cluster
//         counts => out = 0, lse = -inf, never NaN.
// Threads: reentrant. What a head gets does not depend on the others of the group, nor what a column gets on
//          the other columns.
// Cost:   reads keys and values once for the group (values once per 16 heads of a larger group).
#pragma once

#include <cstdint>

namespace carrel::kernels {

inline constexpr int64_t kMaxSummaryClusters = 256;

struct SummaryScoreParams {
  const float* q = nullptr;
  int64_t group = 0;
  int64_t head_dim = 0;
  float scale = 0;
  const void* keys = nullptr;
  const float* key_scale = nullptr;  // [clusters]
  const float* spread = nullptr;     // [clusters]
  float share = 1;
  int64_t clusters = 0;
  const uint8_t* row_cluster = nullptr;  // [rows]
  const float* row_scores = nullptr;
  int64_t row_score_stride = 0;
  int64_t rows = 0;               // with none, what stands beside them is not read
  const float* base = nullptr;    // [group]
  const float* counts = nullptr;  // [clusters]
  const float* left = nullptr;    // [clusters]: counts less the rows given
  float* scores = nullptr;
};

struct SummaryAttentionParams {
  const float* scores = nullptr;
  const float* bound = nullptr;  // [group], or null: none
  int64_t group = 0;
  int64_t head_dim = 0;
  const void* values = nullptr;
  const float* value_scale = nullptr;  // [clusters]
  const float* counts = nullptr;       // [clusters]
  const float* rests = nullptr;        // [clusters] >= 0
  int64_t clusters = 0;
  const void* const* v = nullptr;        // [rows]
  const uint8_t* row_cluster = nullptr;  // [rows]
  float row_weight = 1;                  // 1 or -1
  int64_t rows = 0;
  // Of out, which columns are wanted, and of V read: a multiple of 16, and so many; 0: those from there on.
  int64_t first_column = 0, columns = 0;
  float* out = nullptr;
  float* lse = nullptr;
};

void ScoreSummaries(const SummaryScoreParams& params);
void RefScoreSummaries(const SummaryScoreParams& params);

// scratch: SummaryAttentionScratchFloats(params) floats, not read before written.
int64_t SummaryAttentionScratchFloats(const SummaryAttentionParams& params);
void AttendSummaries(const SummaryAttentionParams& params, float* scratch);
void RefAttendSummaries(const SummaryAttentionParams& params);

}  // namespace carrel::kernels
