// What: now, by a clock that nobody sets: for how long something takes, and how long it is waited for. A date that is
//       shown or stored is absl::Now(), which an administrator or NTP may set back by an hour.
// Edge: moments of this clock are compared with one another alone; they are no dates.
//
//   const absl::Time until = SteadyNow() + absl::Seconds(2);
#pragma once

#include <chrono>

#include "absl/time/time.h"

namespace carrel {

inline absl::Time SteadyNow() {
  return absl::UnixEpoch() + absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
}

}  // namespace carrel
