#include "kvstore/service/supervisor.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/time/clock.h"

namespace carrel::kvstore {

void NotifySupervisor(absl::string_view state) {
  const char* const path = std::getenv("NOTIFY_SOCKET");
  sockaddr_un address{};
  if (path == nullptr || path[0] == '\0' || std::strlen(path) >= sizeof(address.sun_path)) return;
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path, std::strlen(path));
  if (path[0] == '@') address.sun_path[0] = '\0';  // an abstract name
  const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return;
  const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + std::strlen(path));
  sendto(fd, state.data(), state.size(), MSG_NOSIGNAL, reinterpret_cast<const sockaddr*>(&address),
         bytes);
  close(fd);
}

absl::Duration WatchdogPeriod(absl::Duration usual) {
  const char* const text = std::getenv("WATCHDOG_USEC");
  int64_t us = 0;
  if (text == nullptr || !absl::SimpleAtoi(text, &us) || us <= 0) return usual;
  return std::min(usual, absl::Microseconds(us) / 2);
}

Watchdog::Watchdog(absl::Duration period, std::function<absl::Status()> probe,
                   std::function<void(const absl::Status&)> give_up)
    : period_(period),
      probe_(std::move(probe)),
      give_up_(std::move(give_up)),
      thread_([this] { Run(); }) {}

Watchdog::~Watchdog() {
  stopped_.Notify();
  thread_.join();
}

void Watchdog::Run() {
  constexpr absl::Duration kStep = absl::Milliseconds(50);  // how long the destructor may wait
  for (int failures = 0;;) {
    for (absl::Duration slept; slept < period_; slept += kStep) {
      if (stopped_.HasBeenNotified()) return;
      absl::SleepFor(std::min(kStep, period_));
    }
    const absl::Status status = probe_();
    if (status.ok()) {
      failures = 0;
      NotifySupervisor("WATCHDOG=1");
    } else if (++failures == kFailures) {
      return give_up_(status);
    }
  }
}

}  // namespace carrel::kvstore
