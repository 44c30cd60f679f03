// What:   codes of keys on the GPU, in the blocks that kernels/score/code_score scans: affine map, signs,
//         and where bits come in stages, what the bits of earlier stages say about later ones.
// Math:   y = matrix x + offset; stage by stage b_j = y_j > 0 ? 1 : -1 for its bits, then
//         y_i -= sum_j feedback[i, j] b_j for all bits i of later stages, j over the stage. Bit i
//         of the key is set exactly if b_i = 1. fp32.
// Source: the staged encoder of kvstore/index/code/code.h, with its affine maps multiplied out.
// Shapes: x [rows, head_dim] bf16, in device or pinned host memory; matrix [bits, head_dim], offset
//         [bits], feedback [bits, bits] f32 device memory, feedback null with one stage; blocks:
//         ceil(rows / 64) of CodeBlockBytes(bits), device or pinned host memory, 4-byte aligned,
//         keys that are not there are zeros. bits 64, 128 or 256; head_dim a multiple of 8 up to
//         256; bits * head_dim at most 32,768; x at a multiple of 16 bytes. stage_bits divides
//         bits, or there is one stage.
// Edge:   no rows: nothing is enqueued. NaN gives 0.
// Errors: InvalidValue for a shape that is not served.
// Threads: reentrant.
// Cost:   bits * head_dim products a key; reads x once. Few blocks of threads, so that the chip's
//         other work goes on: from pinned memory it is as fast as the bus.
#pragma once

#include <cstdint>

#include "common/cuda/runtime.h"
#include "kernels/kv_view.h"

namespace carrel::kernels {

struct CodeEncodeParams {
  const Bf16* x = nullptr;
  const float* matrix = nullptr;
  const float* offset = nullptr;
  const float* feedback = nullptr;
  uint8_t* blocks = nullptr;
  int64_t rows = 0;
  int64_t head_dim = 0;
  int64_t bits = 0;
  int64_t stage_bits = 0;
};

// Whether CodeEncode serves the shape on this device.
bool CodeEncodeHas(int64_t head_dim, int64_t bits);

cudaError_t CodeEncode(const CodeEncodeParams& params, cudaStream_t stream);
// Host pointers. margin, if not null: [rows, bits], |y| when its sign was taken.
void RefCodeEncode(const CodeEncodeParams& params, float* margin);

}  // namespace carrel::kernels
