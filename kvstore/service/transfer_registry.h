// What:    the exports and imports of a server: how many there may be, and which are to end, as they
//          ran out of time or their callers may not have them any more.
// Threads: any.
#pragma once

#include <chrono>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "kvstore/service/service_limits.h"

namespace carrel::kvstore {

class Transfer {
 public:
  virtual ~Transfer() = default;
  virtual void EndIfOver(std::chrono::steady_clock::time_point now,
                         const ServiceLimits& limits) = 0;
};

class TransferRegistry {
 public:
  explicit TransferRegistry(const ServiceLimits& limits) : limits_(limits) {}

  // ResourceExhausted names the limit. It is kept until Remove.
  absl::Status Add(std::shared_ptr<Transfer> transfer);
  void Remove(const Transfer* transfer);

  // Call it about every second.
  void EndThoseThatAreOver();

  int64_t size() const;

 private:
  const ServiceLimits limits_;
  mutable absl::Mutex mu_;
  absl::flat_hash_map<const Transfer*, std::shared_ptr<Transfer>> transfers_ ABSL_GUARDED_BY(mu_);
};

}  // namespace carrel::kvstore
