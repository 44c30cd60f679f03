// What:   how who submits a job wakes workers that wait. A convenience: what is not heard is found by looking, which
//         workers do all the same, more rarely.
// Threads: any; one waits.
#pragma once

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace carrel::serving {

class Doorbell {
 public:
  virtual ~Doorbell() = default;
  // There is work. An error is for a log: nobody's work is lost by it.
  virtual absl::Status Ring() = 0;
  // Until it rings, or so long at most, or Wake.
  virtual void Wait(absl::Duration most) = 0;
  virtual void Wake() = 0;
  // Whether a ring of another process is heard here now: then who waits may look more rarely.
  virtual bool Hears() const = 0;
};

// Of this process alone: somebody waits, and is woken.
class QuietDoorbell final : public Doorbell {
 public:
  absl::Status Ring() override {
    Wake();
    return absl::OkStatus();
  }
  void Wait(absl::Duration most) override {
    absl::MutexLock lock(&mu_);
    mu_.AwaitWithTimeout(absl::Condition(&rung_), most);
    rung_ = false;
  }
  void Wake() override {
    absl::MutexLock lock(&mu_);
    rung_ = true;
  }
  bool Hears() const override { return false; }

 private:
  absl::Mutex mu_;
  bool rung_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace carrel::serving
