// What:    a thread that checks bytes which no request reads (decision 035):
//          - every kLookEvery it looks at the files of the open contexts, so that a change is noticed
//            before the next read;
//          - it reads all contexts of the store again, one pass after another, at a bounded rate,
//            and checks every CRC (scrubbing). What is damaged becomes DataLoss where it is read.
// Edge:    requests go first: while some wait, scrubbing pauses, for kLongestPause at a time. Passes
//          begin at least kPassEvery apart. The thread has low priority.
// Errors:  none; what is found is logged and counted.
// Threads: counters from any. The callbacks are called on the thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace carrel::kvstore {

class StoredContext;

class BackgroundChecks {
 public:
  static constexpr absl::Duration kLookEvery = absl::Seconds(2);
  static constexpr absl::Duration kPassEvery = absl::Seconds(1);
  static constexpr absl::Duration kLongestPause = absl::Seconds(1);

  struct Source {
    std::function<void()> look;  // at the files of the open contexts
    std::function<absl::StatusOr<std::vector<std::string>>()> names;  // of the store's contexts
    // The one that is being read, if it is open.
    std::function<absl::StatusOr<std::shared_ptr<const StoredContext>>(const std::string&)> find;
    std::function<bool()> busy;  // requests wait
  };
  struct Counters {
    int64_t scrubbed_bytes = 0;
    int64_t passes = 0;
    int64_t failures = 0;
  };

  // bytes_per_s: of scrubbing; 0: none.
  BackgroundChecks(Source source, int64_t bytes_per_s);
  ~BackgroundChecks();

  Counters counters() const;

 private:
  void Run();
  void RunPass();
  // After a step of scrubbing; false: the engine ends.
  bool GoOn(int64_t bytes);
  void LookIfDue();
  // False: the engine ends.
  bool SleepUntil(absl::Time time);

  const Source source_;
  const int64_t bytes_per_s_;
  std::atomic<int64_t> scrubbed_bytes_{0}, passes_{0}, failures_{0};
  // Of the thread.
  absl::Time next_look_ = absl::InfinitePast();
  absl::Time next_step_ = absl::InfinitePast();

  absl::Mutex mu_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace carrel::kvstore
