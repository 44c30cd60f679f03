#include "kvstore/engine/zone_rest.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "common/status.h"
#include "kernels/attention/sparse_attention/sparse_attention.h"

namespace carrel::kvstore {

std::vector<Position> ZoneRest::Sample(RowRange zone, absl::Span<const Position> given) {
  std::vector<Position> sample;
  sample.reserve(kSampleRuns * kSampleRunRows);
  Position next = zone.begin;  // no row twice, where a zone is short
  for (int64_t run = 0; run < kSampleRuns; ++run) {
    const Position first = std::max(next, zone.begin + zone.rows() * run / kSampleRuns);
    next = std::min(zone.end, first + kSampleRunRows);
    for (Position j = first; j < next; ++j) {
      if (!std::binary_search(given.begin(), given.end(), j)) sample.push_back(j);
    }
  }
  return sample;
}

absl::StatusOr<ZoneRest> ZoneRest::Make(const ZoneRestParams& p) {
  const std::vector<Position> sample = Sample(p.zone, p.given);
  const auto rows = static_cast<int64_t>(sample.size());
  const int64_t head_dim = p.keys->head_dim();
  RETURN_IF_ERROR(p.keys->VerifyRows(sample.data(), rows));
  thread_local std::vector<const void*> keys;
  thread_local std::vector<float> scores, lse, out;
  keys.clear();
  for (const Position j : sample) keys.push_back(p.keys->Address(j));
  scores.resize(static_cast<size_t>(std::max<int64_t>(1, p.group * rows)));  // never null
  lse.resize(static_cast<size_t>(p.group));
  ZoneRest rest;
  rest.head_dim_ = head_dim;
  rest.values_.resize(static_cast<size_t>(p.group * (head_dim + 1)));
  out.resize(static_cast<size_t>(p.group * head_dim));
  // The mean key is what attention gives with keys for values.
  kernels::SparseAttentionParams mean;
  mean.q = p.queries;
  mean.group = p.group;
  mean.k = keys.data();
  mean.v = keys.data();
  mean.rows = rows;
  mean.head_dim = head_dim;
  mean.scale = p.scale;
  mean.scores = scores.data();
  mean.out = out.data();
  mean.lse = lse.data();
  kernels::SparseAttention(mean);
  for (int64_t h = 0; h < p.group; ++h) {
    float* const at_zero = &rest.values_[static_cast<size_t>(h * (head_dim + 1))];
    float* const slope = at_zero + 1;
    for (int64_t c = 0; c < head_dim; ++c) slope[c] = p.scale * out[h * head_dim + c];
    const float over = p.given_lse[h] - p.zone_lse[h];
    const float here = over < 0 ? p.zone_lse[h] + std::log1p(-std::exp(over)) : -INFINITY;
    *at_zero = here - std::inner_product(slope, slope + head_dim, p.queries + h * head_dim, 0.0f);
  }
  return rest;
}

float ZoneRest::Lse(int64_t h, const float* query) const {
  const float* at_zero = &values_[static_cast<size_t>(h * (head_dim_ + 1))];
  return std::inner_product(at_zero + 1, at_zero + 1 + head_dim_, query, *at_zero);
}

}  // namespace carrel::kvstore
