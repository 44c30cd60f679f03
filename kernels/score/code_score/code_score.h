// What:   approximate scores of a group's queries with binary codes: products of each query with
//         the bits, looked up four bits at a time.
// Math:   a code has bits b_i in {-1, +1}; the score of head h is offset[h] + sum_i u[h, i] b_i.
//         out[j] = max_h of it, as a 16-bit integer: the order is kept up to the tables' rounding
//         (each entry to 1/31 of its table's range) and the scores' (1/8 of the largest such step).
// Shapes: a block holds 64 keys in bits / 8 rows of 64 bytes. Row i holds bits 8i .. 8i + 7 of each
//         key, the first four in the low half of the byte; key r < 32 is at byte 2r, key r >= 32 at
//         byte 2(r - 32) + 1, so that scores come out in order of the keys. Any byte address.
// Source: table lookup in registers: "Quicker ADC" / fast scan (Andre et al. 2015, 1812.09162);
//         ours: binary codes, several queries at once with a common 16-bit scale, their maximum.
// Threads: reentrant.
// Cost:   reads a block once per four heads; at 128 bits and 4 heads some 3 cycles per key
//         (AVX-512).
#pragma once

#include <cstdint>
#include <vector>

namespace carrel::kernels {

inline constexpr int64_t kCodeBlockKeys = 64;
inline constexpr int64_t kMaxCodeBits = 256;

inline int64_t CodeBlockBytes(int64_t bits) { return bits / 8 * kCodeBlockKeys; }

// What the scan of one group looks up. score of head h = minimum[h] + step[h] * total, where total
// is the sum of its entries.
struct CodeTables {
  int64_t group = 0;
  int64_t bits = 0;
  std::vector<uint8_t> entries;  // [group, bits / 4, 16], 0 .. 31
  std::vector<float> minimum, step;
  std::vector<float> sum;  // [group]: of |u|
  // out = max_h (total * 8 * factor[h] / 2^15 + bias[h]), in units of `unit`, 0 at `zero`.
  std::vector<int16_t> factor, bias;
  float unit = 0, zero = 0;
};

// u [group, bits] f32; bits a multiple of 8 in 8 .. kMaxCodeBits. Offsets are 0. A query of zeros
// gives equal scores.
void MakeCodeTables(const float* u, int64_t group, int64_t bits, CodeTables& tables);
// offset [group] f32.
void SetCodeOffsets(const float* offset, CodeTables& tables);

// out [blocks * 64].
void CodeScore(const CodeTables& tables, const void* blocks, int64_t count, int16_t* out);
// Each head for itself: totals [group, stride >= blocks * 64].
void CodeTotals(const CodeTables& tables, const void* blocks, int64_t count, int16_t* totals,
                int64_t stride);

void RefCodeScore(const CodeTables& tables, const void* blocks, int64_t count, int16_t* out);
void RefCodeTotals(const CodeTables& tables, const void* blocks, int64_t count, int16_t* totals,
                   int64_t stride);

// Appends to out the indices j < n with scores[j] > bar, ascending, until none is left or fewer
// than 64 of the `places` are; returns where it stopped.
int64_t AppendAbove(const int16_t* scores, int64_t begin, int64_t n, int16_t bar, uint32_t* out,
                    int64_t places, int64_t* written);
int64_t RefAppendAbove(const int16_t* scores, int64_t begin, int64_t n, int16_t bar, uint32_t* out,
                       int64_t places, int64_t* written);

// Packs the signs of y [keys <= 64, bits] f32 (bit set: > 0) into a block; the keys that are left
// are zeros.
void PackCodes(const float* y, int64_t keys, int64_t bits, void* block);
// Bit i of key r of a block.
inline bool CodeBit(const void* block, int64_t key, int64_t bit) {
  const int64_t byte = key < 32 ? 2 * key : 2 * (key - 32) + 1;
  return static_cast<const uint8_t*>(block)[bit / 8 * kCodeBlockKeys + byte] >> (bit % 8) & 1;
}

}  // namespace carrel::kernels
