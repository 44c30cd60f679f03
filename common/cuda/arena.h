// What:      device memory that one function plans and lays out: run once over a plan it counts bytes,
//            run again over an arena made for that plan it hands out addresses. What is counted and
//            what is used cannot differ.
// Invariants: 1. A plan's Take gives null. 2. Of an arena Take gives what it gave of the plan, in the
//            same order: other counts are a bug and end the program. 3. Addresses are aligned to 256
//            bytes. 4. All is zero at first, for every stream: workspaces of kernels are ready.
// Errors:    ResourceExhausted names bytes wanted and bytes free.
// Ownership: move-only; what it handed out is freed with it.
// Threads:   one.
#pragma once

#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"
#include "common/cuda/buffer.h"
#include "common/cuda/status.h"
#include "common/status.h"

namespace carrel::cuda {

class DeviceArena {
 public:
  // A plan.
  DeviceArena() = default;
  // Room for what the plan took.
  static absl::StatusOr<DeviceArena> Create(const DeviceArena& plan) {
    DeviceArena arena;
    ASSIGN_OR_RETURN(arena.memory_, DeviceBuffer<uint8_t>::Create(plan.bytes()));
    if (plan.bytes() == 0) return arena;
    RETURN_IF_CUDA_ERROR(cudaMemset(arena.memory_.data(), 0, static_cast<size_t>(plan.bytes())));
    RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(nullptr));  // our streams do not wait for that one
    return arena;
  }
  // The same in one: lay(arena) is run over the plan, then over the arena.
  template <typename Lay>
  static absl::StatusOr<DeviceArena> Of(Lay lay) {
    DeviceArena plan;
    lay(plan);
    ASSIGN_OR_RETURN(DeviceArena arena, Create(plan));
    lay(arena);
    return arena;
  }
  // What it would take.
  template <typename Lay>
  static int64_t BytesOf(Lay lay) {
    DeviceArena plan;
    lay(plan);
    return plan.bytes();
  }

  template <typename T>
  T* Take(int64_t count) {
    const int64_t at = taken_;
    taken_ += (count * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    if (memory_.data() == nullptr) return nullptr;
    CARREL_CHECK(taken_ <= memory_.size());
    return count == 0 ? nullptr : reinterpret_cast<T*>(memory_.data() + at);
  }
  int64_t bytes() const { return taken_; }

 private:
  static constexpr int64_t kAlignment = 256;
  DeviceBuffer<uint8_t> memory_;  // none: this is a plan
  int64_t taken_ = 0;
};

}  // namespace carrel::cuda
