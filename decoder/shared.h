// What:   what sequences of this process share, held once for all that want the same: parts of a zone that do
//         not change once they are made (a context's rows, what a method keeps of its keys), runners.
// Ownership: shared; freed with its last holder.
// Threads: any. Callers block while the value is being built; one mutex serves all keys of a type.
#pragma once

#include <list>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "common/status.h"

namespace carrel::decoder {

template <class T>
class Shared {
 public:
  using Made = absl::StatusOr<std::shared_ptr<T>>;

  // key: what says all that `make` depends on; empty: that cannot be said, and it is the caller's own.
  static Made Of(const std::string& key, absl::FunctionRef<Made()> make) {
    if (key.empty()) return make();
    Shared& all = OfProcess();
    absl::MutexLock lock(&all.mu_);
    if (std::shared_ptr<T> found = all.Find(key); found != nullptr) return found;
    ASSIGN_OR_RETURN(std::shared_ptr<T> made, make());
    all.held_.emplace_back(key, made);
    return made;
  }
  static bool Held(const std::string& key) {
    Shared& all = OfProcess();
    absl::MutexLock lock(&all.mu_);
    return !key.empty() && all.Find(key) != nullptr;
  }

 private:
  static Shared& OfProcess() {
    static auto* const all = new Shared;
    return *all;
  }
  std::shared_ptr<T> Find(const std::string& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    held_.remove_if([](const auto& one) { return one.second.expired(); });
    for (const auto& [of, held] : held_) {
      if (of == key) return held.lock();
    }
    return nullptr;
  }

  absl::Mutex mu_;
  std::list<std::pair<std::string, std::weak_ptr<T>>> held_ ABSL_GUARDED_BY(mu_);
};

}  // namespace carrel::decoder
