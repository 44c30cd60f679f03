// What:   the rows of each KV head whose binary codes the group's queries score best, on the GPU,
//         in one launch: each query weighs every bit of a code.
// Math:   a code has bits b_i in {-1, +1}. u[h, i] = scale * <q[h], decoder[g, i]>, g = h / group;
//         w[h, i] = 31 u[h, i] / max_i |u[h, i]| rounded to integers; score[h, j] = step[h] sum_i
//         w[h, i] b[j, i], step[h] = max_i |u[h, i]| / 31, or less, lest a score exceed 512.
//         base[h] = ln(rows / n sum exp(score[h, j]) over n = min(256, rows) rows j = floor(i rows
//         / n)): about what group_score's is. ids = the first min(k, rows) rows when all are
//         ordered by (max over h of the group of (score[h, j] - base[h]) descending, j ascending),
//         compared in steps of 1/16 from -24 to 8.
// Source: decision 043: where HATA (2025) compares the bits of query and key, an unrounded query
//         knows more. Bit planes on tensor cores, the selection of hamming_topk (decision 054).
// Shapes: q [kv_heads * group, head_dim] bf16; decoder [kv_heads, bits, head_dim] bf16: key ~
//         centre + sum_i b_i decoder[i]; codes [kv_heads, code_stride, bits / 32] uint32, of which
//         the first `rows` count, bit i in word i / 32 at i % 32; ids [kv_heads, k] int32. head_dim
//         64 or 128; bits 64, 128 or 256; group 1 .. 16; q, decoder and codes at multiples of 16
//         bytes.
// Units:  scale > 0 includes 1/sqrt(head_dim); natural logarithms.
// Order:  not by score: first the rows above the k-th score, ascending, then those equal to it,
//         ascending.
// Edge:   no rows or k == 0: nothing is enqueued; rows < k: places rows .. k - 1 are left as they
//         were. A query of zeros gives all rows the same score.
// Errors: InvalidValue for a shape that is not served, more KV heads than SMs included.
// Threads: reentrant, each call with a workspace of its own.
// Cost:   reads the codes once, and the decoder once per block of threads, from L2; one cooperative
//         launch, which may be captured in a graph. Of several sequences as many share a launch as have
//         all their scores in shared memory: what a launch costs beside reading is paid once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "common/cuda/runtime.h"
#include "kernels/kv_view.h"

namespace carrel::kernels {

struct CodeTopKParams {
  const Bf16* q = nullptr;
  const Bf16* decoder = nullptr;
  const uint32_t* codes = nullptr;
  int64_t kv_heads = 0;
  int64_t group = 0;
  int64_t head_dim = 0;
  int64_t bits = 0;
  int64_t rows = 0;
  int64_t code_stride = 0;  // codes from one KV head to the next
  int64_t k = 0;
  float scale = 0;
  int32_t* ids = nullptr;
  void* workspace = nullptr;  // CodeTopKWorkspaceBytes of these params
};

inline constexpr int kCodeTopKSamples = 256;
inline constexpr int kCodeTopKWeight = 31;    // the largest |w|
inline constexpr float kCodeTopKMost = 512;   // bound on |score|
inline constexpr float kCodeTopKSteps = 16;   // per unit of score
inline constexpr float kCodeTopKLeast = -24;  // of a score
inline constexpr int kCodeTopKBins = 512;

// Depends on kv_heads and rows. Zeroed once before its first use; every call leaves it ready for
// the next with the same kv_heads. One call at a time.
size_t CodeTopKWorkspaceBytes(const CodeTopKParams& params);
// One token each of several sequences, whose rows and k may differ: each gets what it gets alone.
cudaError_t CodeTopK(std::span<const CodeTopKParams> all, cudaStream_t stream);
inline cudaError_t CodeTopK(const CodeTopKParams& params, cudaStream_t stream) {
  return CodeTopK({&params, 1}, stream);
}
// Host pointers. The score of every row less its base, the best of the group, not rounded: scores
// [kv_heads, rows] f32.
void RefCodeTopKScores(const CodeTopKParams& params, float* scores);

}  // namespace carrel::kernels
