// What: the few instructions that the decode kernels are made of: loads past L1, early launches, the bf16
//       tensor core product of 16 x 16 by 16 x 8, and the layout of its operands.
//
// Lane l of a warp stands at g = l / 4, t = l % 4. Of A [16, 16] it holds rows g and g + 8, of
// B [16, 8] column g, and of both the inner indices 2t, 2t + 1, 2t + 8, 2t + 9; of C [16, 8] rows g
// and g + 8, columns 2t and 2t + 1. The inner index may be permuted if A and B agree: so a lane
// takes 8 consecutive elements of a row, one 16-byte load, as its share of two products, and rows
// go from memory to the tensor cores without passing shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace carrel::kernels {

// Read-only for the kernel's duration; device or mapped host memory.
__device__ __forceinline__ uint4 LoadStream16(const void* address) {
  uint4 r;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
               : "l"(address));
  return r;
}

__device__ __forceinline__ uint2 LoadStream8(const void* address) {
  uint2 r;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(r.x), "=r"(r.y)
               : "l"(address));
  return r;
}
__device__ __forceinline__ uint32_t LoadStream4(const void* address) {
  uint32_t r;
  asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(r) : "l"(address));
  return r;
}

// Of a launch that may begin while the one before it in its stream ends (launch-inl.cuh).
// Waits until that has finished and its writes are visible; before it, nothing may be read that
// others write.
__device__ __forceinline__ void WaitForEarlierLaunch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets the next launch begin as soon as there is room.
__device__ __forceinline__ void AllowNextLaunch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// c += a b
__device__ __forceinline__ void Mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                    uint32_t a3, uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Two products: lo and hi are a lane's 8 elements of rows g and g + 8 of A, b those of column g of
// B.
__device__ __forceinline__ void MmaPair(float (&c)[4], const uint4& lo, const uint4& hi,
                                        const uint4& b) {
  Mma(c, lo.x, hi.x, lo.y, hi.y, b.x, b.y);
  Mma(c, lo.z, hi.z, lo.w, hi.w, b.z, b.w);
}

// (low, high) as bf16, low in the low half.
__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

// The low, and the high, halves of a and b, a's in the low half.
__device__ __forceinline__ uint32_t LowHalves(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, 0x5410);
}
__device__ __forceinline__ uint32_t HighHalves(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, 0x7632);
}

}  // namespace carrel::kernels
