// What:   the payload of Kind::kSampledQueries: queries of one layer's group of q heads at sampled
//         positions, as attention saw them (after RoPE). They calibrate indexes and feed audits.
// Bytes:  samples u32 | group u32 | head_dim u32 | reserved u32 = 0 | positions i64 [samples],
//         ascending | queries f32 [samples, group, head_dim]; little-endian, unaligned.
// Errors: DataLoss from decoding, InvalidArgument from encoding: names field, value and bound.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/ids.h"

namespace carrel::kvstore {

inline constexpr int64_t kMaxSamples = int64_t{1} << 20;
inline constexpr int64_t kMaxGroup = 4096;
inline constexpr int64_t kMaxHeadDim = 65536;

struct SampledQueries {
  int64_t group = 0;
  int64_t head_dim = 0;
  std::vector<Position> positions;  // [samples], strictly ascending, from 0
  std::vector<float> queries;       // [samples, group, head_dim]

  int64_t samples() const { return static_cast<int64_t>(positions.size()); }
  const float* Query(int64_t sample, int64_t head_of_group) const {
    return queries.data() + (sample * group + head_of_group) * head_dim;
  }
};

absl::StatusOr<std::string> EncodeSampledQueries(const SampledQueries& sampled);
absl::StatusOr<SampledQueries> DecodeSampledQueries(absl::string_view payload);

}  // namespace carrel::kvstore
