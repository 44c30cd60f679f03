// What:   one score per key for the q heads that share a KV head, from 4-bit labels of a few of the
//         keys' channels, on the GPU.
// Math:   s[h, j] = scale * sum_c q[h, C[g, c]] (least[g, c] + step[g, c] level[g, j, c]), g = h /
//         group, levels 0 .. 15; base[h] = ln sum_j exp(s[h, j]); scores[g, j] = max over h of the
//         group of (s[h, j] - base[h]) (group_score.h). Weights scale * q * step are taken as the
//         sum of two bf16 numbers, 2^-17 off at most; fp32 sums.
// Source: Double Sparsity (docs/methods.md), section 4: label cache; the layout is ours.
// Shapes: q [kv_heads * group, head_dim] bf16; channels, least, step [kv_heads, width], width 16 or
//         32 (channels that are too many: step 0, least 0); labels [kv_heads, label_stride / 8 *
//         width] uint32 as PackChannelLabels lays them; scores [kv_heads, score_stride] f32.
//         label_stride: keys from one KV head to the next, a multiple of 64. group 1 .. 16.
//         labels at multiples of 16 bytes.
// Edge:   no rows: nothing is enqueued.
// Errors: InvalidValue for a shape that is not served.
// Threads: reentrant, each call with a workspace of its own.
// Cost:   reads width / 2 bytes per key twice, for the whole group, and no s is written; two
//         launches, which may be captured in a graph.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/cuda/runtime.h"
#include "kernels/kv_view.h"

namespace carrel::kernels {

struct ChannelScoreParams {
  const Bf16* q = nullptr;
  const int32_t* channels = nullptr;
  const float* least = nullptr;
  const float* step = nullptr;
  const uint32_t* labels = nullptr;
  int64_t kv_heads = 0;
  int64_t group = 0;
  int64_t head_dim = 0;
  int64_t width = 0;
  int64_t rows = 0;
  int64_t label_stride = 0;
  int64_t score_stride = 0;
  float scale = 0;
  float* scores = nullptr;
  void* workspace = nullptr;  // ChannelScoreWorkspaceBytes
};

// Keys that the labels of one 16-byte load of 32 lanes belong to.
inline constexpr int64_t ChannelLabelKeys(int64_t width) { return width == 16 ? 64 : 32; }
inline constexpr int64_t ChannelLabelStride(int64_t rows) { return (rows + 63) / 64 * 64; }

// Where a channel's label of a key is. Lane 4 g + t of a warp takes words 16 g + 4 t + 0 .. 3 of
// every ChannelLabelKeys keys. Width 32: word i holds channels 8t .. 8t + 7 of key 8i + g. Width
// 16: channels 4t .. 4t + 3 of keys 16i + g and 16i + 8 + g. Channels 2e and 2e + 1 of a lane lie
// 16 bits apart, so that one mask takes both.
struct ChannelLabelPlace {
  int64_t word, shift;
};
constexpr ChannelLabelPlace PlaceOfChannelLabel(int64_t key, int64_t width, int64_t channel) {
  const int64_t keys = ChannelLabelKeys(width), lane_channels = width / 4;
  const int64_t tile = key % keys / 8, g = key % 8, t = channel / lane_channels;
  const int64_t e = channel % lane_channels;
  const int64_t word = width == 16 ? tile / 2 : tile;
  const int64_t pair = e / 2 + (width == 16 ? tile % 2 * 2 : 0);
  return {key / keys * 128 + 16 * g + 4 * t + word, 4 * pair + 16 * (e % 2)};
}

// levels [rows, width], each 0 .. 15 -> labels [ChannelLabelStride(rows) / 8 * width], of one KV
// head.
void PackChannelLabels(const uint8_t* levels, int64_t rows, int64_t width, uint32_t* labels);
size_t ChannelScoreWorkspaceBytes(int64_t kv_heads, int64_t group);
cudaError_t ChannelScore(const ChannelScoreParams& params, cudaStream_t stream);
void RefChannelScore(const ChannelScoreParams& params);  // host pointers; fp64

}  // namespace carrel::kernels
