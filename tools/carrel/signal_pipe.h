// What:    signals as something to wait for. Handlers, not a mask: a library may have started threads
//          before main, and a signal that only they do not block would end the process.
// Threads: one waits; Wake from any. One at a time in a process.
#pragma once

#include <initializer_list>

#include "absl/status/statusor.h"

namespace carrel::tools {

class SignalPipe {
 public:
  static absl::StatusOr<SignalPipe> Catch(std::initializer_list<int> signals);

  int Wait() const;  // the next signal, or 0 for each Wake
  void Wake() const;

 private:
  explicit SignalPipe(int read_fd) : read_fd_(read_fd) {}
  int read_fd_;  // of the process, until its end
};

}  // namespace carrel::tools
