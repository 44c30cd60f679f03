// What:      device memory that one function plans and lays out: run once over a plan it counts bytes,
//            run again over an arena made for that plan it hands out addresses. What is counted and
//            what is used cannot differ.
// Invariants: 1. A plan's Take gives null. 2. Of an arena Take gives what it gave of the plan, in the
//            same order: other counts are a bug and end the program. 3. Addresses are aligned to 256
//            bytes. 4. Nothing is cleared.
// Errors:    ResourceExhausted names bytes wanted and bytes free.
// Ownership: move-only; what it handed out is freed with it.
// Threads:   one.
#pragma once

#include <cstdint>
#include <utility>

#include "absl/status/statusor.h"
#include "common/cuda/buffer.h"
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
    return arena;
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
