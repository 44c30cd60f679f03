// What:   one budget of bytes for what all clients of a process make it hold: requests in flight,
//         their results, remembered candidates, parts of replies that wait to be sent.
// Errors: ResourceExhausted names the bytes and the bounds. Nobody waits: who is refused asks again.
// Ownership: the budget outlives its accounts and what they charged.
// Threads: any.
//
// Invariants
//   1. What is charged never exceeds the limit, but for the least parts (PartBytes).
//   2. No session can keep others from working: of what the others leave it holds at most half, and
//      a quarter is kept for small requests, an equal share of it for each session.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"

namespace carrel {

class ByteBudget {
 public:
  // A part is never made smaller than this for want of memory.
  static constexpr int64_t kLeastPartBytes = int64_t{16} << 10;

  explicit ByteBudget(int64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  class Account;

  // Bytes that are held; given back on destruction.
  class Charge {
   public:
    Charge() = default;
    ~Charge() { Return(); }
    Charge(Charge&& other) noexcept { *this = std::move(other); }
    Charge& operator=(Charge&& other) noexcept;

   private:
    friend class ByteBudget;
    Charge(ByteBudget* budget, std::shared_ptr<Account> account, int64_t bytes)
        : budget_(budget), account_(std::move(account)), bytes_(bytes) {}
    void Return();
    ByteBudget* budget_ = nullptr;
    std::shared_ptr<Account> account_;  // null: of a part
    int64_t bytes_ = 0;
  };

  // What one session holds. Owned by a shared pointer, as its charges keep it; the budget outlives it.
  class Account : public std::enable_shared_from_this<Account> {
   public:
    explicit Account(ByteBudget* budget);
    ~Account();
    Account(const Account&) = delete;
    Account& operator=(const Account&) = delete;

    absl::StatusOr<Charge> Take(absl::string_view what, int64_t bytes);

   private:
    friend class ByteBudget;
    ByteBudget* const budget_;
    int64_t held_bytes_ = 0;  // guarded by the budget's mu_
  };

  // The size of the next part of a reply: at most `most`, and less the more bytes of parts wait to be
  // sent already.
  int64_t PartBytes(int64_t most) const;
  // Never refused: it is bounded by PartBytes and by the parts that a session makes ahead.
  Charge TakePart(int64_t bytes);

  int64_t limit_bytes() const { return limit_bytes_; }
  int64_t used_bytes() const;  // without parts
  int64_t part_bytes() const { return part_bytes_.load(std::memory_order_relaxed); }
  int64_t refused() const { return refused_.load(std::memory_order_relaxed); }

 private:
  // Of the limit: for parts, and for small requests.
  int64_t parts_share() const { return limit_bytes_ / 4; }
  int64_t floors_share() const { return limit_bytes_ / 4; }

  const int64_t limit_bytes_;
  std::atomic<int64_t> part_bytes_{0}, refused_{0};
  mutable absl::Mutex mu_;
  int64_t used_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t accounts_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace carrel
