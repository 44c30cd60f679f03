// What:      arrays in device memory and in pinned host memory that are owned.
// Invariants: 1. data() is null exactly if size() is 0. 2. Device memory is what was there before:
//            nothing is cleared. 3. Pinned memory is readable from the device at the same address.
// Errors:    ResourceExhausted names bytes wanted and bytes free; InvalidArgument for a negative
//            size.
// Ownership: move-only; freed with the object, which waits for the device's work.
// Threads:   as an array.
// Cost:      allocation synchronises the device: at start, never inside a step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace carrel::cuda {

namespace internal {
absl::StatusOr<void*> AllocateDevice(int64_t count, int64_t element_bytes);
absl::StatusOr<void*> AllocatePinned(int64_t count, int64_t element_bytes);
void FreeDevice(void* data);
void FreePinned(void* data);
}  // namespace internal

template <typename T, absl::StatusOr<void*> (*kAllocate)(int64_t, int64_t), void (*kFree)(void*)>
class OwnedArray {
 public:
  static absl::StatusOr<OwnedArray> Create(int64_t size) {
    absl::StatusOr<void*> data = kAllocate(size, int64_t{sizeof(T)});
    if (!data.ok()) return data.status();
    return OwnedArray(static_cast<T*>(*data), size);
  }
  OwnedArray() = default;
  ~OwnedArray() { kFree(data_); }
  OwnedArray(OwnedArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  OwnedArray& operator=(OwnedArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }

  T* data() const { return data_; }
  int64_t size() const { return size_; }
  int64_t bytes() const { return size_ * int64_t{sizeof(T)}; }

 private:
  OwnedArray(T* data, int64_t size) : data_(data), size_(size) {}
  T* data_ = nullptr;
  int64_t size_ = 0;
};

template <typename T>
using DeviceBuffer = OwnedArray<T, internal::AllocateDevice, internal::FreeDevice>;
template <typename T>
using PinnedBuffer = OwnedArray<T, internal::AllocatePinned, internal::FreePinned>;

}  // namespace carrel::cuda
