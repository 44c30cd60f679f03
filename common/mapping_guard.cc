#include "common/mapping_guard.h"

#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <mutex>

namespace carrel {

// Free while begin is 0. Places are linked once and stay: the handler may walk them at any time.
struct MappingGuard::Place {
  std::atomic<uintptr_t> begin{0};
  std::atomic<uintptr_t> end{0};
  std::atomic<bool> damaged{false};
  std::atomic<bool> taken{false};
  Place* next = nullptr;  // constant once linked
};

namespace {

std::atomic<MappingGuard::Place*> places{nullptr};
struct sigaction handler_before;  // constant once ours is installed

MappingGuard::Place* Find(uintptr_t address) {
  for (MappingGuard::Place* place = places.load(); place != nullptr; place = place->next) {
    const uintptr_t begin = place->begin.load();
    if (begin != 0 && address >= begin && address < place->end.load()) return place;
  }
  return nullptr;
}

void PassOn(int signal, siginfo_t* info, void* context) {
  static constexpr char kText[] =
      "carrel: SIGBUS: a read of memory that is no mapped file of ours (a failing page, or a "
      "truncated file that a library has mapped)\n";
  (void)!write(STDERR_FILENO, kText, sizeof(kText) - 1);
  if ((handler_before.sa_flags & SA_SIGINFO) != 0) {
    return handler_before.sa_sigaction(signal, info, context);
  }
  if (handler_before.sa_handler != SIG_DFL && handler_before.sa_handler != SIG_IGN) {
    return handler_before.sa_handler(signal);
  }
  struct sigaction action;
  memset(&action, 0, sizeof(action));
  action.sa_handler = SIG_DFL;
  sigaction(signal, &action, nullptr);
  raise(signal);  // delivered when this handler returns
}

void OnSigbus(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  // Codes above 0 come from the kernel and have an address.
  MappingGuard::Place* place =
      info->si_code > 0 ? Find(reinterpret_cast<uintptr_t>(info->si_addr)) : nullptr;
  if (place == nullptr) return PassOn(signal, info, context);
  place->damaged.store(true);  // before there are zeros to read
  const uintptr_t begin = place->begin.load();
  // Not by mmap(): ThreadSanitizer's own takes its locks, in a signal handler, and calls the zeros a
  // write that races with other readers of the mapping. The kernel gives those either a SIGBUS or zeros.
  const auto zeros = syscall(SYS_mmap, begin, place->end.load() - begin, PROT_READ,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, off_t{0});
  if (zeros == -1) return PassOn(signal, info, context);
  errno = error;
}

void Install() {
  struct sigaction action;
  memset(&action, 0, sizeof(action));
  action.sa_sigaction = OnSigbus;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  sigemptyset(&action.sa_mask);
  sigaction(SIGBUS, nullptr, &handler_before);
  sigaction(SIGBUS, &action, nullptr);
}

MappingGuard::Place* TakePlace() {
  for (MappingGuard::Place* place = places.load(); place != nullptr; place = place->next) {
    if (!place->taken.exchange(true)) return place;
  }
  auto* place = new MappingGuard::Place();
  place->taken.store(true);
  place->next = places.load();
  while (!places.compare_exchange_weak(place->next, place)) {
  }
  return place;
}

}  // namespace

MappingGuard::MappingGuard(const void* begin, size_t bytes) : place_(TakePlace()) {
  static std::once_flag once;
  std::call_once(once, Install);
  static const size_t page_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t pages = (bytes + page_bytes - 1) / page_bytes;
  place_->damaged.store(false);
  place_->end.store(reinterpret_cast<uintptr_t>(begin) + pages * page_bytes);
  place_->begin.store(reinterpret_cast<uintptr_t>(begin));
}

MappingGuard::~MappingGuard() {
  place_->begin.store(0);
  place_->taken.store(false);
}

bool MappingGuard::damaged() const { return place_->damaged.load(); }

}  // namespace carrel
