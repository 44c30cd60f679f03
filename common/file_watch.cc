#include "common/file_watch.h"

#include <sys/stat.h>

#include <utility>

#include "common/thrown.h"

namespace carrel {

std::vector<FileWatch::State> FileWatch::StatesOf(const std::vector<std::string>& paths) {
  const auto ns = [](const timespec& time) {
    return int64_t{time.tv_sec} * 1000000000 + time.tv_nsec;
  };
  std::vector<State> states;
  for (const std::string& path : paths) {
    struct stat info;
    State& state = states.emplace_back();
    if (stat(path.c_str(), &info) != 0) continue;
    state = {true, info.st_dev, info.st_ino, info.st_size, ns(info.st_mtim), ns(info.st_ctim)};
  }
  return states;
}

FileWatch::FileWatch(std::vector<std::string> paths, absl::Duration interval,
                     std::function<void()> changed)
    : paths_(std::move(paths)),
      interval_(interval),
      changed_(std::move(changed)),
      seen_(StatesOf(paths_)),
      thread_([this] { Run(); }) {}

FileWatch::~FileWatch() {
  {
    absl::MutexLock lock(&mu_);
    stop_ = true;
  }
  thread_.join();
}

void FileWatch::Run() {
  for (;;) {
    {
      absl::MutexLock lock(&mu_);
      if (mu_.AwaitWithTimeout(absl::Condition(&stop_), interval_)) return;
    }
    CatchThrown("a watch of files", [this] {
      std::vector<State> states = StatesOf(paths_);
      if (states == seen_) return absl::OkStatus();
      seen_ = std::move(states);
      changed_();
      return absl::OkStatus();
    }).IgnoreError();
  }
}

}  // namespace carrel
