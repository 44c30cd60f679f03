// What:   what a supervisor (systemd) is told of this process, and a watchdog that ends it when it
//         answers no more, so that it is started again.
// Source: sd_notify(3): a datagram to the socket that $NOTIFY_SOCKET names.
// Threads: any.
#pragma once

#include <functional>
#include <thread>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

namespace carrel::kvstore {

// "READY=1", "STOPPING=1", "WATCHDOG=1". Without a supervisor: nothing. A failure is nobody's to
// mend.
void NotifySupervisor(absl::string_view state);

// Half of what the supervisor asks for ($WATCHDOG_USEC), at most `usual`.
absl::Duration WatchdogPeriod(absl::Duration usual);

class Watchdog {
 public:
  static constexpr int kFailures = 3;

  // Runs `probe` every `period` on a thread of its own. After each that succeeds the supervisor is
  // told; after kFailures in a row `give_up` gets the last one's status, once, and it ends.
  Watchdog(absl::Duration period, std::function<absl::Status()> probe,
           std::function<void(const absl::Status&)> give_up);
  ~Watchdog();  // waits for a probe that runs

 private:
  void Run();

  const absl::Duration period_;
  const std::function<absl::Status()> probe_;
  const std::function<void(const absl::Status&)> give_up_;
  absl::Notification stopped_;
  std::thread thread_;
};

}  // namespace carrel::kvstore
