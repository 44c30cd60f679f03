// What:   Hopper's copies into shared memory that no thread waits for, and the barriers that count
//         their bytes. Thin wrappers; every number is an operand of the PTX instruction.
// Source: PTX ISA 8.x, "cp.async.bulk", "mbarrier".
#pragma once

#include <cstdint>

namespace carrel::kernels::hopper {

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
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

// Enqueues the copy of contiguous bytes, a multiple of 16 at multiples of 16, from device or mapped
// host memory.
__device__ __forceinline__ void CopyBytes(void* to, const void* from, uint32_t bytes,
                                          uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(SharedAddress(to)),
      "l"(from), "r"(bytes), "r"(SharedAddress(barrier))
      : "memory");
}

}  // namespace carrel::kernels::hopper
