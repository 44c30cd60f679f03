#include "kvstore/engine/background_checks.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "common/scheduling.h"
#include "common/thrown.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {
namespace {

constexpr absl::Duration kPauseStep = absl::Milliseconds(5);

}  // namespace

BackgroundChecks::BackgroundChecks(Source source, int64_t bytes_per_s)
    : source_(std::move(source)), bytes_per_s_(bytes_per_s), thread_([this] { Run(); }) {}

BackgroundChecks::~BackgroundChecks() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  thread_.join();
}

BackgroundChecks::Counters BackgroundChecks::counters() const {
  return {scrubbed_bytes_.load(), passes_.load(), failures_.load()};
}

bool BackgroundChecks::SleepUntil(absl::Time time) {
  absl::MutexLock lock(&mu_);
  mu_.AwaitWithDeadline(absl::Condition(&stopping_), time);
  return !stopping_;
}

void BackgroundChecks::LookIfDue() {
  if (absl::Now() < next_look_) return;
  next_look_ = absl::Now() + kLookEvery;
  source_.look();
}

bool BackgroundChecks::GoOn(int64_t bytes) {
  scrubbed_bytes_ += bytes;
  LookIfDue();
  const absl::Time now = absl::Now();
  // What was not used of the rate is not made up for.
  next_step_ = std::max(next_step_, now) +
               absl::Seconds(static_cast<double>(bytes) / static_cast<double>(bytes_per_s_));
  if (!SleepUntil(next_step_)) return false;
  for (const absl::Time until = absl::Now() + kLongestPause;
       source_.busy() && absl::Now() < until;) {
    if (!SleepUntil(absl::Now() + kPauseStep)) return false;
  }
  return true;
}

void BackgroundChecks::RunPass() {
  const absl::StatusOr<std::vector<std::string>> names = source_.names();
  if (!names.ok()) {
    spdlog::error("scrub: {}", names.status().ToString());
    return;
  }
  bool went_on = true;
  for (const std::string& name : *names) {
    const auto stored = source_.find(name);
    if (absl::IsNotFound(stored.status())) continue;  // deleted meanwhile
    std::vector<absl::Status> damaged;
    if (stored.ok()) {
      (*stored)->Scrub([&](int64_t bytes) { return went_on = GoOn(bytes); }, damaged);
    } else {
      damaged.push_back(stored.status());
    }
    failures_ += static_cast<int64_t>(damaged.size());
    for (const absl::Status& status : damaged) spdlog::error("scrub: {}", status.ToString());
    if (!went_on) return;
  }
  ++passes_;
}

void BackgroundChecks::Run() {
  WorkBehind();
  absl::Time next_pass = absl::InfinitePast();
  do {
    CatchThrown("background checks", [&] {
      LookIfDue();
      if (bytes_per_s_ == 0) {
        next_pass = absl::InfiniteFuture();
      } else if (absl::Now() >= next_pass) {
        next_pass = absl::Now() + kPassEvery;
        RunPass();
      }
      return absl::OkStatus();
    }).IgnoreError();
  } while (SleepUntil(std::min(next_look_, next_pass)));
}

}  // namespace carrel::kvstore
