// What:   buffers of one size that threads borrow for a unit of work. As many exist as were ever
//         borrowed at once; in steady state nothing is allocated.
// Edge:   a buffer's content is unspecified.   Threads: every method may be called concurrently.
// Ownership: the pool outlives what is borrowed.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace carrel::model {

class ScratchPool {
 public:
  explicit ScratchPool(int64_t floats) : floats_(floats) {}
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
    {
      absl::MutexLock lock(&mu_);
      if (!free_.empty()) {
        std::unique_ptr<float[]> buffer = std::move(free_.back());
        free_.pop_back();
        return buffer;
      }
    }
    return std::unique_ptr<float[]>(new float[static_cast<size_t>(floats_)]);
  }

  void Return(std::unique_ptr<float[]> buffer) {
    absl::MutexLock lock(&mu_);
    free_.push_back(std::move(buffer));
  }

  const int64_t floats_;
  absl::Mutex mu_;
  std::vector<std::unique_ptr<float[]>> free_ ABSL_GUARDED_BY(mu_);
};

}  // namespace carrel::model
