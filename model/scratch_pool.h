// What:   buffers of one size that threads borrow for a unit of work. As many exist as were ever
//         borrowed at once; in steady state nothing is allocated, and nobody waits for a lock.
// Edge:   a buffer's content is unspecified.   Threads: every method may be called concurrently.
// Ownership: the pool outlives what is borrowed.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

namespace carrel::model {

class ScratchPool {
 public:
  explicit ScratchPool(int64_t floats) : floats_(floats) {}
  ~ScratchPool() {
    for (std::atomic<float*>& free : free_) delete[] free.load();
  }
  ScratchPool(const ScratchPool&) = delete;
  ScratchPool& operator=(const ScratchPool&) = delete;

  // Gives the buffer back when it goes out of scope; must not outlive the pool.
  class Lease {
   public:
    explicit Lease(ScratchPool* pool) : pool_(*pool), buffer_(pool_.Take()) {}
    ~Lease() { pool_.Return(std::move(buffer_)); }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    float* data() const { return buffer_.get(); }

   private:
    ScratchPool& pool_;
    std::unique_ptr<float[]> buffer_;
  };

 private:
  std::unique_ptr<float[]> Take() {
    for (std::atomic<float*>& free : free_) {
      if (free.load(std::memory_order_relaxed) == nullptr) continue;
      std::unique_ptr<float[]> buffer(free.exchange(nullptr, std::memory_order_acquire));
      if (buffer != nullptr) return buffer;
    }
    return std::unique_ptr<float[]>(new float[static_cast<size_t>(floats_)]);
  }

  void Return(std::unique_ptr<float[]> buffer) {
    for (std::atomic<float*>& free : free_) {
      float* none = nullptr;
      if (free.load(std::memory_order_relaxed) == nullptr &&
          free.compare_exchange_strong(none, buffer.get(), std::memory_order_release)) {
        buffer.release();
        return;
      }
    }
    // More than there are places for: it is let go.
  }

  static constexpr size_t kPlaces = 64;

  const int64_t floats_;
  std::array<std::atomic<float*>, kPlaces> free_{};
};

}  // namespace carrel::model
