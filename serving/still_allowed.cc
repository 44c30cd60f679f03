#include "serving/still_allowed.h"

#include <utility>

#include "absl/status/status.h"
#include "common/thrown.h"

namespace carrel::serving {

StillAllowed::StillAllowed(absl::Duration every) : every_(every), thread_([this] { Work(); }) {}

StillAllowed::~StillAllowed() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  thread_.join();
}

void StillAllowed::Watch(std::function<bool()> look) {
  absl::MutexLock lock(&mu_);
  looks_.push_back(std::move(look));
}

void StillAllowed::Work() {
  mu_.Lock();
  while (!mu_.AwaitWithTimeout(absl::Condition(&stopping_), every_)) {
    std::list<std::function<bool()>> looks = std::exchange(looks_, {});
    mu_.Unlock();
    for (auto look = looks.begin(); look != looks.end();) {
      bool goes_on = false;
      CatchThrown("a look at what is still allowed", [&] {
        goes_on = (*look)();
        return absl::OkStatus();
      }).IgnoreError();
      look = goes_on ? std::next(look) : looks.erase(look);
    }
    mu_.Lock();
    looks_.splice(looks_.begin(), looks);
  }
  mu_.Unlock();
}

}  // namespace carrel::serving
