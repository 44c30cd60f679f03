#include "tests/cli.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <map>

#include "absl/time/clock.h"
#include "common/status.h"

namespace carrel::cli {
namespace {

#ifdef CARREL_SANITIZED
constexpr int kPatience = 10;
#else
constexpr int kPatience = 1;
#endif

constexpr char kProgram[] = CARREL_BINARY_DIR "/carrel";

// A file without a name: neither side can block on it, and it can be read while it grows.
int MemoryFile(const std::string& content) {
  const int fd = memfd_create("carrel-cli", MFD_CLOEXEC);
  CARREL_CHECK(fd >= 0);
  CARREL_CHECK(write(fd, content.data(), content.size()) == static_cast<ssize_t>(content.size()));
  CARREL_CHECK(lseek(fd, 0, SEEK_SET) == 0);
  return fd;
}

std::string ReadAll(int fd) {
  std::string bytes;
  char buffer[65536];
  ssize_t n = 0;
  while ((n = pread(fd, buffer, sizeof(buffer), static_cast<off_t>(bytes.size()))) > 0) {
    bytes.append(buffer, static_cast<size_t>(n));
  }
  return bytes;
}

std::vector<char*> Pointers(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

// Where the tests run side by side, one child must not take every core for BLAS.
std::vector<std::string> Environment(const Command& command) {
  // Nothing is left behind in the user's cache.
  std::map<std::string, std::string> set(command.environment.begin(), command.environment.end());
  set.insert(
      {{"OPENBLAS_NUM_THREADS", "1"}, {"CARREL_CACHE", ""}});  // unless the command says another
  std::vector<std::string> all;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    bool replaced = false;
    for (const auto& [name, value] : set) replaced |= text.rfind(name + "=", 0) == 0;
    if (!replaced) all.push_back(text);
  }
  for (const auto& [name, value] : set) all.push_back(absl::StrCat(name, "=", value));
  return all;
}

[[noreturn]] void Become(const Command& command, pid_t parent, int in, int out, int err,
                         char** argv, char** envp) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(126);
  if (command.max_file_bytes >= 0) {
    // The failed write, not the signal, is what is tested.
    signal(SIGXFSZ, SIG_IGN);
    const rlim_t bytes = static_cast<rlim_t>(command.max_file_bytes);
    const rlimit limit = {bytes, bytes};
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0) _exit(126);
  }
  const std::pair<int, int64_t> limits[] = {{RLIMIT_AS, command.max_memory_bytes},
                                            {RLIMIT_NOFILE, command.max_descriptors}};
  for (const auto& [resource, value] : limits) {
    if (value < 0) continue;
    const rlimit limit = {static_cast<rlim_t>(value), static_cast<rlim_t>(value)};
    if (setrlimit(static_cast<__rlimit_resource>(resource), &limit) != 0) _exit(126);
  }
  if (dup2(in, STDIN_FILENO) < 0 || dup2(out, STDOUT_FILENO) < 0 || dup2(err, STDERR_FILENO) < 0) {
    _exit(126);
  }
  execve(kProgram, argv, envp);
  const char message[] = "cannot execute " CARREL_BINARY_DIR "/carrel\n";
  if (write(STDERR_FILENO, message, sizeof(message) - 1) < 0) _exit(126);
  _exit(127);
}

}  // namespace

std::ostream& operator<<(std::ostream& stream, const Outcome& outcome) {
  stream << "{exit code " << outcome.exit_code;
  if (outcome.signal != 0) stream << ", signal " << outcome.signal;
  if (outcome.timed_out) stream << ", timed out";
  const auto cut = [](const std::string& text) {
    return text.size() <= 4000 ? text : text.substr(0, 4000) + " ...";
  };
  return stream << "\nout: " << cut(outcome.out) << "\nerr: " << cut(outcome.err) << "}";
}

std::unique_ptr<Process> Process::Start(const Command& command) {
  std::unique_ptr<Process> process(new Process());
  process->command_ = command;
  process->start_ = absl::Now();
  const int in = MemoryFile(command.input);
  process->out_fd_ = command.standard_output.empty()
                         ? MemoryFile("")
                         : open(command.standard_output.c_str(), O_WRONLY | O_CLOEXEC);
  CARREL_CHECK(process->out_fd_ >= 0);
  process->err_fd_ = MemoryFile("");

  Args args = {"carrel"};
  args.insert(args.end(), command.args.begin(), command.args.end());
  std::vector<std::string> environment = Environment(command);
  std::vector<char*> argv = Pointers(args);
  std::vector<char*> envp = Pointers(environment);
  const pid_t parent = getpid();
  process->pid_ = fork();
  CARREL_CHECK(process->pid_ >= 0);
  if (process->pid_ == 0) {
    Become(command, parent, in, process->out_fd_, process->err_fd_, argv.data(), envp.data());
  }
  close(in);
  return process;
}

Process::~Process() {
  if (!reaped_) {
    kill(pid_, SIGKILL);
    waitpid(pid_, &wait_status_, 0);
  }
  close(out_fd_);
  close(err_fd_);
}

bool Process::Running() {
  if (!reaped_) {
    const pid_t ended = waitpid(pid_, &wait_status_, WNOHANG);
    CARREL_CHECK(ended >= 0 || errno == EINTR);
    reaped_ = ended == pid_;
  }
  return !reaped_;
}

void Process::Signal(int signal) {
  if (!reaped_) CARREL_CHECK(kill(pid_, signal) == 0);
}

std::string Process::out() const {
  return command_.standard_output.empty() ? ReadAll(out_fd_) : "";
}
std::string Process::err() const { return ReadAll(err_fd_); }

Outcome Process::Wait() {
  Outcome outcome;
  const absl::Time end = start_ + command_.time_limit * kPatience;
  while (Running()) {
    if (absl::Now() > end) {
      outcome.timed_out = true;
      kill(pid_, SIGKILL);
      waitpid(pid_, &wait_status_, 0);
      reaped_ = true;
      break;
    }
    absl::SleepFor(absl::Milliseconds(2));
  }
  if (WIFEXITED(wait_status_)) outcome.exit_code = WEXITSTATUS(wait_status_);
  if (WIFSIGNALED(wait_status_)) outcome.signal = WTERMSIG(wait_status_);
  outcome.out = out();
  outcome.err = err();
  return outcome;
}

Outcome Carrel(const Command& command) { return Process::Start(command)->Wait(); }

Outcome Carrel(const Args& args) {
  Command command;
  command.args = args;
  return Carrel(command);
}

bool WaitUntil(const std::function<bool()>& condition, absl::Duration limit) {
  const absl::Time end = absl::Now() + limit * kPatience;
  while (!condition()) {
    if (absl::Now() > end) return false;
    absl::SleepFor(absl::Milliseconds(5));
  }
  return true;
}

}  // namespace carrel::cli
