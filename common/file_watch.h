// What:   calls when one of a few files was written, replaced, or came or went: looks at them every
//         `interval` (device, inode, size, times).
// Threads: one of its own, which makes the calls. The destructor waits for a call that runs.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace carrel {

class FileWatch {
 public:
  // What changes after this returns is seen.
  FileWatch(std::vector<std::string> paths, absl::Duration interval, std::function<void()> changed);
  ~FileWatch();

 private:
  using State = std::tuple<bool, dev_t, ino_t, off_t, int64_t, int64_t>;
  static std::vector<State> StatesOf(const std::vector<std::string>& paths);
  void Run();

  const std::vector<std::string> paths_;
  const absl::Duration interval_;
  const std::function<void()> changed_;
  std::vector<State> seen_;
  absl::Mutex mu_;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace carrel
