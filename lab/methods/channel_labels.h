// What:   4-bit labels of the important channels of every key of a zone (channel_selector.cc, Math).
// Errors: NotFound no sampled queries are stored (by = q, qk); Unimplemented an odd head_dim.
// Threads: reentrant.
// Cost:   reads every key.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "common/ids.h"
#include "common/thread_pool.h"
#include "decoder/select/host_rows.h"
#include "decoder/select/selector_config.h"

namespace carrel::decoder {

enum class ChannelScore : uint8_t { kQ = 0, kK = 1, kQK = 2 };
// channels:by=q|k|qk,share=,oversample=auto|N
struct ChannelConfig {
  // Which channels are important: those with the largest mean |q_c|, |k_c| or |q_c k_c|.
  ChannelScore by = ChannelScore::kQ;  // the paper's choice under GQA
  int64_t share = 4;                   // head_dim / share channels are kept: 4 .. 16
};

inline constexpr int kChannelLevels = 16;

struct ChannelLabels {
  std::vector<int64_t> channels;   // ascending; an even number
  std::vector<float> least, step;  // [channels]
  std::vector<uint8_t> bytes;      // [rows, channels / 2]: two channels a byte, the first one low
};

// How many channels a config keeps of head_dim.
int64_t ChannelsKept(const ChannelConfig& config, int64_t head_dim);

// [layers, kv_heads]
absl::StatusOr<std::vector<ChannelLabels>> MakeChannelLabels(const ChannelConfig& config,
                                                             const AttentionShape& shape,
                                                             RowRange zone, const HostRows& rows,
                                                             ThreadPool* pool);

}  // namespace carrel::decoder
