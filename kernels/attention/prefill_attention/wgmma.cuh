// What:   the Hopper instructions that PrefillAttentionWgmma is made of: wgmma, mbarriers, bulk
//         tensor copies. Thin wrappers; every number is an operand of the PTX instruction.
// Source: PTX ISA 8.x, "wgmma.mma_async", "Asynchronous warpgroup-level matrix shared memory
//         layout", "cp.async.bulk.tensor", "mbarrier".
// Shapes: accumulators of wgmma.m64nN: with t the thread of the warpgroup, element d[4 i + e] is
//         row 16 (t / 32) + t % 32 / 4 + 8 (e / 2), column 8 i + 2 (t % 4) + e % 2.
#pragma once

#include <cstdint>

namespace carrel::kernels::hopper {

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// A tile in shared memory whose rows are 128 bytes, swizzled over 1024-byte groups of eight rows.
// group_bytes: from one group of eight rows to the next; half_bytes: from one 64-column half to the
// next (of an operand whose columns are contiguous; else without meaning).
__device__ __forceinline__ uint64_t TileDescriptor(const void* tile, uint32_t half_bytes) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  constexpr uint64_t kGroupBytes = 1024;
  return kSwizzle128 | (kGroupBytes >> 4) << 32 | uint64_t{half_bytes >> 4} << 16 |
         uint64_t{(SharedAddress(tile) & 0x3ffff) >> 4};
}

__device__ __forceinline__ void WgmmaFence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void WgmmaCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void WgmmaWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Keeps the compiler from moving uses of registers that a wgmma in flight owns.
template <int N>
__device__ __forceinline__ void PinRegisters(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Operands %0 to %31 and %0 to %63 of an accumulator d, in the instruction's text and behind it.
#define CARREL_WGMMA_D32                                                                       \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define CARREL_WGMMA_D64                                                                    \
  CARREL_WGMMA_D32                                                                          \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
  "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define CARREL_WGMMA_OUT8(d, i)                                                               \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define CARREL_WGMMA_OUT32(d, i)                                                      \
  CARREL_WGMMA_OUT8(d, i), CARREL_WGMMA_OUT8(d, i + 8), CARREL_WGMMA_OUT8(d, i + 16), \
      CARREL_WGMMA_OUT8(d, i + 24)

// d [64, 128] = (accumulate ? d : 0) + a [64, 16] b [16, 128]; both K-major in shared memory.
__device__ __forceinline__ void WgmmaShared(float (&d)[64], uint64_t a, uint64_t b,
                                            int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" CARREL_WGMMA_D64
      "}, %64, %65, p, 1, 1, 0, 0;\n}"
      : CARREL_WGMMA_OUT32(d, 0), CARREL_WGMMA_OUT32(d, 32)
      : "l"(a), "l"(b), "r"(accumulate));
}

// d [64, 128] += a [64, 16] b [16, 128]; a in registers, b in shared memory with its 128 columns
// contiguous.
__device__ __forceinline__ void WgmmaRegisters(float (&d)[64], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" CARREL_WGMMA_D64
      "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"
      : CARREL_WGMMA_OUT32(d, 0), CARREL_WGMMA_OUT32(d, 32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}

// d [64, 64] += a [64, 16] b [16, 64]; a in registers, b in shared memory with its 64 columns
// contiguous.
__device__ __forceinline__ void WgmmaRegisters(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" CARREL_WGMMA_D32
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"
      : CARREL_WGMMA_OUT32(d, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}

__device__ __forceinline__ void InitBarrier(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(arrivals));
}
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void Arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}
__device__ __forceinline__ void ArriveExpecting(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
}
// Until the phase of the given parity is complete.
__device__ __forceinline__ void Wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(SharedAddress(barrier)),
      "r"(parity)
      : "memory");
}

// Enqueues the copy of a box of a tensor of rank 3, whose coordinates are given innermost first.
__device__ __forceinline__ void CopyBox(void* to, const void* tensor_map, int32_t x, int32_t y,
                                        int32_t z, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %4}], [%5];" ::"r"(SharedAddress(to)),
      "l"(tensor_map), "r"(x), "r"(y), "r"(z), "r"(SharedAddress(barrier))
      : "memory");
}

// Named barriers of a block, over `threads` threads; 0 is __syncthreads.
__device__ __forceinline__ void NamedSync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void NamedArrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void GiveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace carrel::kernels::hopper
