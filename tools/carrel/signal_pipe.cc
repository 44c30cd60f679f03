#include "tools/carrel/signal_pipe.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

#include "common/status.h"

namespace carrel::tools {
namespace {

std::atomic<int> write_fd{-1};

void Put(uint8_t byte) {
  const int before = errno;
  // A full pipe holds signals enough.
  if (write(write_fd.load(), &byte, 1) < 0) errno = before;
  errno = before;
}

void Handle(int signal) { Put(static_cast<uint8_t>(signal)); }

}  // namespace

absl::StatusOr<SignalPipe> SignalPipe::Catch(std::initializer_list<int> signals) {
  int fds[2];
  if (pipe2(fds, O_CLOEXEC) != 0) return ErrnoStatus(errno, "pipe");
  fcntl(fds[1], F_SETFL, O_NONBLOCK);
  write_fd = fds[1];
  for (const int signal : signals) {
    struct sigaction action {};
    action.sa_handler = &Handle;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    if (sigaction(signal, &action, nullptr) != 0) return ErrnoStatus(errno, "sigaction");
  }
  return SignalPipe(fds[0]);
}

int SignalPipe::Wait() const {
  // Unlike read, poll returns after any signal: ThreadSanitizer runs the handler only then.
  uint8_t byte = 0;
  pollfd wanted{.fd = read_fd_, .events = POLLIN, .revents = 0};
  while (poll(&wanted, 1, -1) != 1 || read(read_fd_, &byte, 1) != 1) {
  }
  return byte;
}

void SignalPipe::Wake() const { Put(0); }

}  // namespace carrel::tools
