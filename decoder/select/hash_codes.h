// What:   binary codes of keys: those of the context's code index, or random directions, the same on every device, and
//         keys made of codes again.
// Math:   random: rows of an orthonormal basis of head_dim, as many bases as it takes; rounded to bf16, as
//         a GPU's tensor cores want them. A key, less the mean of all, is about the sum of +-
//         decoder[i], where decoder[i] = spread[i] min(1, d / bits) directions[i], spread[i] the mean
//         of |<directions[i], key> - threshold[i]| over sampled keys.
// Shapes: directions, decoder [bits, d] f32; threshold [bits]: what the mean itself scores; keys
//         [samples, d].
// Errors: those of HostRows; DataLoss stored codes that do not fit the context.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "decoder/select/host_rows.h"
#include "decoder/select/selector_config.h"

namespace carrel::decoder {

// What kAuto means for a context; null: its rows are not in this host's memory, codes are random.
// Never kAuto.
absl::StatusOr<HashSource> SourceOfCodes(const HashConfig& config, const HostRows* rows);
// Of every row.
absl::StatusOr<HeadCodes> StoredCodesOf(const HostRows& rows, Layer layer, KvHead head, int64_t d);

std::vector<float> RandomRotations(int64_t bits, int64_t d, uint64_t seed);

// The keys that tell of the spread: every stride-th of a zone.
struct SpreadSample {
  explicit SpreadSample(int64_t rows)
      : stride(std::max<int64_t>(1, rows / 256)), count(std::min<int64_t>(256, rows)) {}
  int64_t stride, count;
};
std::vector<float> RotationDecoder(const std::vector<float>& directions,
                                   const std::vector<float>& threshold,
                                   const std::vector<float>& keys, int64_t d);

}  // namespace carrel::decoder
