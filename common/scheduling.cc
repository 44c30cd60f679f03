#include "common/scheduling.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace carrel {
namespace {

// As the kernel has it: <linux/sched/types.h> clashes with <sched.h>.
struct SchedulingAttributes {
  uint32_t size = sizeof(SchedulingAttributes);
  uint32_t policy = 0;  // SCHED_OTHER
  uint64_t flags = 0;
  int32_t nice = 0;
  uint32_t priority = 0;
  uint64_t runtime_ns = 0;  // of SCHED_OTHER: the slice; 0: the usual one
  uint64_t deadline_ns = 0, period_ns = 0;
};
static_assert(sizeof(SchedulingAttributes) == 48);

constexpr uint64_t kShortNs = 100'000;  // the least that there is
constexpr int kNiceness = 10;

void SetSlice(uint64_t slice_ns) {
  if (sched_getscheduler(0) != SCHED_OTHER) return;  // somebody knows better
  SchedulingAttributes attributes;
  attributes.nice = getpriority(PRIO_PROCESS, static_cast<id_t>(gettid()));
  attributes.runtime_ns = slice_ns;
  (void)syscall(SYS_sched_setattr, 0, &attributes, 0);
}

}  // namespace

void WakeSoon() { SetSlice(kShortNs); }

void WorkBehind() {
  thread_local bool done = false;
  if (done) return;
  done = true;
  SetSlice(0);
  // Of this thread alone, as Linux has it.
  (void)setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), kNiceness);
}

}  // namespace carrel
