// What:    keeps mapped pages and loaded indexes within the memory budget: when they are above, what
//          can be spared is let go until it is a fifth below, and then the pages of the layers that
//          were not read for longest, until it is a tenth below.
//          The rest of the heap is not compared: letting pages go would not make it smaller.
//          They are only unmapped: a reader of such a layer reads it again, from the page
//          cache or the disk.
// Ownership: the budget outlives what is registered with it.
// Threads: any. One thread lets go at a time, others go on.
// Cost:    Enforce reads two numbers of the kernel (some 2 us), EnforceAtTimes a clock.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace carrel::kvstore {

class StoredContext;

class ResidentBudget {
 public:
  // heap_bytes: of what else counts. shed: lets as many of them go, where it can.
  explicit ResidentBudget(
      int64_t budget_bytes, std::function<int64_t()> heap_bytes = [] { return int64_t{0}; },
      std::function<void(int64_t)> shed = [](int64_t) {});
  ~ResidentBudget();

  // The layers of one context, for as long as this lives; before the budget's end.
  class Layers {
   public:
    Layers(ResidentBudget* budget, std::shared_ptr<const StoredContext> stored, int32_t layers);
    ~Layers();
    Layers(const Layers&) = delete;
    Layers& operator=(const Layers&) = delete;

    // The layer is about to be read.
    void Touch(int32_t layer);

   private:
    friend class ResidentBudget;
    ResidentBudget* const budget_;
    const std::shared_ptr<const StoredContext> stored_;
    // When it was touched last, in touches; 0: never, or let go since.
    std::vector<std::atomic<int64_t>> touched_;
  };

  void Enforce();
  // The same, where the last time is a millisecond ago: no disk gives much more than the tenth that is
  // kept free between two.
  void EnforceAtTimes();
  // Whether so much more keeps it within the budget.
  bool HasRoom(int64_t bytes) const { return HeldBytes() + bytes <= budget_bytes_; }
  // Whether so much more of what can be spared does: what was shed is not back at once.
  bool HasSpareRoom(int64_t bytes) const { return HasRoom(bytes + budget_bytes_ / 10); }
  int64_t releases() const { return releases_.load(std::memory_order_relaxed); }

  // Of this process: all of it, and the pages of files, which may be shared with others.
  int64_t ResidentBytes() const { return Read().first; }
  int64_t MappedBytes() const { return Read().second; }

 private:
  std::pair<int64_t, int64_t> Read() const;
  int64_t HeldBytes() const { return MappedBytes() + heap_bytes_(); }

  const int64_t budget_bytes_;
  const std::function<int64_t()> heap_bytes_;
  const std::function<void(int64_t)> shed_;
  int statm_ = -1;  // /proc/self/statm
  std::atomic<int64_t> clock_{0};
  std::atomic<int64_t> enforce_again_{0};  // ns of the steady clock
  std::atomic<int64_t> releases_{0};
  absl::Mutex mu_;
  std::vector<Layers*> contexts_ ABSL_GUARDED_BY(mu_);
};

}  // namespace carrel::kvstore
