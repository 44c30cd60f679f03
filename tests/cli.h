// What:    the program as its users start it: a child process with arguments, standard input,
//          environment and limits, and how it ended and what it printed.
// Edge:    a child that outlives its time limit is killed and counts as timed out; the child dies
//          with the test. Under sanitizers every time limit is several times as long.
// Threads: start children from the test's own thread only.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "gmock/gmock.h"

namespace carrel::cli {

using Args = std::vector<std::string>;
using Texts = std::vector<std::string>;

struct Command {
  Args args;                                                     // what follows the program's name
  std::string input;                                             // standard input
  std::vector<std::pair<std::string, std::string>> environment;  // added to the test's own
  int64_t max_file_bytes = -1;    // no file may grow beyond; -1: no limit
  int64_t max_memory_bytes = -1;  // of address space; -1: no limit
  int64_t max_descriptors = -1;   // hard limit; -1: the test's own
  std::string standard_output;    // a file to write to, say /dev/full; empty: captured
  absl::Duration time_limit = absl::Minutes(3);
};

struct Outcome {
  int exit_code = -1;  // -1: ended by a signal
  int signal = 0;
  bool timed_out = false;
  std::string out, err;
};
std::ostream& operator<<(std::ostream& stream, const Outcome& outcome);

class Process {
 public:
  static std::unique_ptr<Process> Start(const Command& command);
  ~Process();  // kills it if it still runs

  pid_t pid() const { return pid_; }
  bool Running();  // reaps it if it ended
  void Signal(int signal);
  std::string out() const;  // printed so far
  std::string err() const;
  // Waits for the end, at most for the rest of the time limit.
  Outcome Wait();

 private:
  Process() = default;
  Command command_;
  absl::Time start_;
  pid_t pid_ = -1;
  int out_fd_ = -1, err_fd_ = -1;
  bool reaped_ = false;
  int wait_status_ = 0;
};

Outcome Carrel(const Command& command);
Outcome Carrel(const Args& args);

// Waits until the condition holds; false if it does not within the limit.
bool WaitUntil(const std::function<bool()>& condition, absl::Duration limit = absl::Minutes(1));

// Ended with exit code 0.
MATCHER(Succeeds, "exits with 0") { return arg.exit_code == 0 && !arg.timed_out; }

// Ended with this exit code and a message on standard error that holds every one of the texts.
MATCHER_P2(FailsWith, exit_code, texts, "") {
  *result_listener << "expected exit code " << exit_code << " and a message with ";
  for (const std::string& text : texts) *result_listener << "\"" << text << "\" ";
  if (arg.exit_code != exit_code || arg.timed_out) return false;
  for (const std::string& text : texts) {
    if (arg.err.find(text) == std::string::npos) return false;
  }
  return true;
}

}  // namespace carrel::cli
