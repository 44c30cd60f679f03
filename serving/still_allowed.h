// What:   asks twice a second of all that runs, waits or streams whether its caller's key still allows it.
// Edge:   a watched call ends itself; it returns false once it is over, and is forgotten then.
// Threads: any; calls run on a thread of this class, one after the other: they must not block.
#pragma once

#include <functional>
#include <list>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace carrel::serving {

class StillAllowed {
 public:
  explicit StillAllowed(absl::Duration every = absl::Milliseconds(500));
  ~StillAllowed();

  void Watch(std::function<bool()> look);

 private:
  void Work();

  const absl::Duration every_;
  absl::Mutex mu_;
  std::list<std::function<bool()>> looks_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace carrel::serving
