#include "kvstore/service/listener.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <spdlog/spdlog.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/time/clock.h"
#include "common/status.h"
#include "common/thrown.h"

namespace carrel::kvstore {
namespace {

constexpr int kBacklog = 1024;
// How long a client that reads nothing may leave what was sent unacknowledged.
constexpr unsigned kUnacknowledgedMs = 20'000;
// What the loop waits when the system has no descriptor or memory for a connection.
constexpr int kBackOffMs = 20;
// The numbers of Unix sockets' connections go round between these.
constexpr int kFirstNumber = 256, kLastNumber = 1 << 16;
constexpr int64_t kTellEveryMs = 10'000;
constexpr int64_t kSweepEveryMs = 20;

int OpenReserve() { return open("/dev/null", O_RDONLY | O_CLOEXEC); }

int64_t NowMs() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// 0: no socket.
uint64_t InodeOf(int fd) {
  struct stat info;
  return fstat(fd, &info) == 0 && S_ISSOCK(info.st_mode) ? info.st_ino : 0;
}

void Set(int fd, int level, int name, int value) {
  setsockopt(fd, level, name, &value, sizeof(value));
}

}  // namespace

Listener::Listener(std::vector<ListenAddress> addresses, int64_t max_connections,
                   absl::Duration silence)
    : addresses_(std::move(addresses)),
      max_connections_(max_connections),
      silence_ms_(absl::ToInt64Milliseconds(silence)) {}

Listener::~Listener() { Stop(); }

absl::StatusOr<std::unique_ptr<Listener>> Listener::Bind(
    const std::vector<ListenAddress>& addresses, int64_t max_connections, uint32_t socket_mode,
    absl::Duration silence) {
  CARREL_CHECK(max_connections >= 1);
  std::unique_ptr<Listener> listener(new Listener(addresses, max_connections, silence));
  for (size_t i = 0; i < addresses.size(); ++i) {
    RETURN_IF_ERROR(addresses[i].unix_path.empty() ? listener->BindTcp(i)
                                                   : listener->BindUnix(i, socket_mode));
  }
  listener->stop_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  listener->reserve_fd_ = OpenReserve();
  listener->unspoken_fd_ = epoll_create1(EPOLL_CLOEXEC);
  if (listener->stop_fd_ < 0 || listener->reserve_fd_ < 0 || listener->unspoken_fd_ < 0) {
    return ErrnoStatus(errno, "listen");
  }
  return listener;
}

absl::Status Listener::BindUnix(size_t address, uint32_t socket_mode) {
  const std::string& path = addresses_[address].unix_path;
  const std::string what = absl::StrCat("listen unix:", path);
  RETURN_IF_ERROR(PrepareToListen(addresses_[address]));
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return ErrnoStatus(errno, what);
  absl::Cleanup close_fd = [fd] { close(fd); };
  // Before bind, so that the file never has more rights than these.
  if (fchmod(fd, socket_mode) != 0) return ErrnoStatus(errno, what);
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  std::memcpy(name.sun_path, path.data(), path.size());
  if (bind(fd, reinterpret_cast<const sockaddr*>(&name), sizeof(name)) != 0) {
    return ErrnoStatus(errno, what);
  }
  if (listen(fd, kBacklog) != 0) return ErrnoStatus(errno, what);
  std::move(close_fd).Cancel();
  sockets_.push_back({address, fd});
  return absl::OkStatus();
}

absl::Status Listener::BindTcp(size_t address) {
  ListenAddress& wanted = addresses_[address];
  const std::string what = absl::StrCat("listen ", wanted.ToString());
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const int error =
      getaddrinfo(wanted.host.c_str(), std::to_string(wanted.port).c_str(), &hints, &found);
  if (error != 0) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": ", gai_strerror(error)));
  }
  absl::Cleanup free_found = [found] { freeaddrinfo(found); };
  bool bound = false;
  absl::Status failed;
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    const int fd = socket(one->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
      failed = ErrnoStatus(errno, what);
      continue;
    }
    Set(fd, SOL_SOCKET, SO_REUSEADDR, 1);
    // One socket for both families only where all addresses are meant.
    if (one->ai_family == AF_INET6) Set(fd, IPPROTO_IPV6, IPV6_V6ONLY, wanted.host != "::");
    sockaddr_storage name{};
    std::memcpy(&name, one->ai_addr, one->ai_addrlen);
    in_port_t& port = one->ai_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&name)->sin6_port
                                                 : reinterpret_cast<sockaddr_in*>(&name)->sin_port;
    port = htons(static_cast<uint16_t>(wanted.port));  // a free one that was found already
    if (bind(fd, reinterpret_cast<const sockaddr*>(&name), one->ai_addrlen) != 0 ||
        listen(fd, kBacklog) != 0) {
      failed = errno == EADDRINUSE ? absl::FailedPreconditionError(absl::StrCat(
                                         what, ": address in use, another process listens there"))
                                   : ErrnoStatus(errno, what);
      close(fd);
      if (absl::IsFailedPrecondition(failed)) return failed;
      continue;
    }
    socklen_t bytes = sizeof(name);
    getsockname(fd, reinterpret_cast<sockaddr*>(&name), &bytes);
    wanted.port = ntohs(port);
    sockets_.push_back({address, fd});
    bound = true;
  }
  return bound ? absl::OkStatus() : failed;
}

void Listener::Start(std::function<void(const Connection&)> take) {
  take_ = std::move(take);
  if (!sockets_.empty()) loop_ = std::thread([this] { Run(); });
}

void Listener::Stop() {
  if (stop_fd_ >= 0) eventfd_write(stop_fd_, 1);
  if (loop_.joinable()) loop_.join();
  for (const Socket& socket : sockets_) {
    const std::string& path = addresses_[socket.address].unix_path;
    if (!path.empty()) unlink(path.c_str());
    close(socket.fd);
  }
  sockets_.clear();
  for (const auto& [fd, unspoken] : unspoken_) close(fd);
  unspoken_.clear();
  for (int* fd : {&stop_fd_, &reserve_fd_, &unspoken_fd_}) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
  }
}

void Listener::Run() {
  std::vector<pollfd> wait;
  for (const Socket& socket : sockets_) wait.push_back({socket.fd, POLLIN, 0});
  wait.push_back({unspoken_fd_, POLLIN, 0});
  wait.push_back({stop_fd_, POLLIN, 0});
  for (bool goes_on = true; goes_on;) {
    CatchThrown("listen", [&] {
      goes_on = Look(wait);
      return absl::OkStatus();
    }).IgnoreError();
  }
}

bool Listener::Look(std::vector<pollfd>& wait) {
  const int ready = poll(wait.data(), wait.size(), CloseThoseThatAreSilent());
  if (ready <= 0) return true;  // a signal, or time to look
  if (wait.back().revents != 0) return false;
  if (wait[sockets_.size()].revents != 0) HandOverThoseThatSpoke();
  for (size_t i = 0; i < sockets_.size(); ++i) {
    if (wait[i].revents == 0) continue;
    // Not without end: the other sockets, and Stop, have their turn.
    for (int n = 0; n < kBacklog && AcceptOne(sockets_[i]); ++n) {
    }
  }
  return true;
}

bool Listener::AcceptOne(const Socket& socket) {
  int fd = accept4(socket.fd, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (fd < 0) {
    switch (errno) {
      case EMFILE:
      case ENFILE:
      case ENOBUFS:
      case ENOMEM:
        RefuseOneOnReserve(socket);
        return false;
      case EINTR:
      case ECONNABORTED:
        return true;
      default:  // nobody waits, or what came is broken: poll says whether there is more
        return false;
    }
  }
  if (!HasRoom()) {
    Refuse(fd, absl::StrCat("max_connections=", max_connections_));
    return true;
  }
  if (addresses_[socket.address].unix_path.empty()) {
    Set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
    Set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(kUnacknowledgedMs));
  } else {
    fd = Renumbered(fd);
  }
  {
    absl::MutexLock lock(&mu_);
    open_[fd] = InodeOf(fd);
  }
  accepted_.fetch_add(1, std::memory_order_relaxed);
  AwaitWord({socket.address, socket.fd, fd});
  return true;
}

void Listener::AwaitWord(const Connection& connection) {
  const int64_t now_ms = NowMs();
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP;
  event.data.fd = connection.fd;
  if (epoll_ctl(unspoken_fd_, EPOLL_CTL_ADD, connection.fd, &event) != 0) {
    return HandOver(connection);  // without waiting, then
  }
  unspoken_[connection.fd] = {connection, now_ms};
  unspoken_since_ms_.emplace_back(connection.fd, now_ms);
}

void Listener::HandOverThoseThatSpoke() {
  epoll_event events[64];
  const int count = epoll_wait(unspoken_fd_, events, std::size(events), 0);
  for (int i = 0; i < count; ++i) {
    const int fd = events[i].data.fd;
    const auto it = unspoken_.find(fd);
    if (it == unspoken_.end()) continue;
    char byte;
    const ssize_t spoke = recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    if (spoke < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    const Connection connection = it->second.connection;
    epoll_ctl(unspoken_fd_, EPOLL_CTL_DEL, fd, nullptr);
    unspoken_.erase(it);
    if (spoke > 0) {
      HandOver(connection);
    } else {
      Close(fd);  // it left
    }
  }
}

void Listener::HandOver(const Connection& connection) {
  const absl::Status taken = CatchThrown("a connection", [&] {
    take_(connection);
    return absl::OkStatus();
  });
  if (!taken.ok()) Close(connection.fd);  // nobody has it
}

int Listener::CloseThoseThatAreSilent() {
  const int64_t now_ms = NowMs();
  for (; !unspoken_since_ms_.empty(); unspoken_since_ms_.pop_front()) {
    const auto [fd, since_ms] = unspoken_since_ms_.front();
    const auto it = unspoken_.find(fd);
    if (it == unspoken_.end() || it->second.since_ms != since_ms) continue;  // it spoke
    if (now_ms - since_ms < silence_ms_) return static_cast<int>(since_ms + silence_ms_ - now_ms);
    unspoken_.erase(it);
    Close(fd);
    silent_.fetch_add(1, std::memory_order_relaxed);
  }
  return -1;
}

void Listener::Close(int fd) {
  absl::MutexLock lock(&mu_);
  open_.erase(fd);
  close(fd);
}

// The system gives out the lowest free number, which is the one that was freed last.
int Listener::Renumbered(int fd) {
  int renumbered = fcntl(fd, F_DUPFD_CLOEXEC, std::max(next_number_, kFirstNumber));
  if (renumbered < 0)
    renumbered = fcntl(fd, F_DUPFD_CLOEXEC, kFirstNumber);  // from the start again
  if (renumbered < 0) return fd;                            // none that high
  close(fd);
  next_number_ = renumbered + 1 < kLastNumber ? renumbered + 1 : kFirstNumber;
  return renumbered;
}

void Listener::RefuseOneOnReserve(const Socket& socket) {
  const int error = errno;
  if (reserve_fd_ >= 0) close(reserve_fd_);
  const int fd = accept4(socket.fd, nullptr, nullptr, SOCK_CLOEXEC);
  if (fd >= 0) Refuse(fd, std::strerror(error));
  reserve_fd_ = OpenReserve();
  pollfd stop = {stop_fd_, POLLIN, 0};
  poll(&stop, 1, kBackOffMs);
}

void Listener::Refuse(int fd, absl::string_view why) {
  refused_.fetch_add(1, std::memory_order_relaxed);
  close(fd);
  const int64_t now_ms = NowMs();
  if (refused_told_ms_ != 0 && now_ms - refused_told_ms_ < kTellEveryMs) return;
  refused_told_ms_ = now_ms;
  spdlog::warn("listen: connection refused: {} (refused so far: {})", std::string(why),
               refused_.load(std::memory_order_relaxed));
}

bool Listener::HasRoom() {
  absl::MutexLock lock(&mu_);
  if (static_cast<int64_t>(open_.size()) < max_connections_) return true;
  // It looks at every connection: not again for each of those that a flood brings.
  const int64_t now_ms = NowMs();
  if (now_ms - swept_ms_ < kSweepEveryMs) return false;
  swept_ms_ = now_ms;
  Sweep();
  return static_cast<int64_t>(open_.size()) < max_connections_;
}

absl::Status Listener::Probe(absl::Duration limit) const {
  const int64_t until_ms = NowMs() + absl::ToInt64Milliseconds(limit);
  for (const Socket& socket : sockets_) {
    const std::string what = absl::StrCat("probe ", addresses_[socket.address].ToString());
    sockaddr_storage name{};
    socklen_t bytes = sizeof(name);
    if (getsockname(socket.fd, reinterpret_cast<sockaddr*>(&name), &bytes) != 0) {
      return ErrnoStatus(errno, what);
    }
    const int fd = ::socket(name.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    // No descriptor left is not the loop's fault, and it will go on.
    if (fd < 0) continue;
    absl::Cleanup close_fd = [fd] { close(fd); };
    const int64_t before = seen();
    if (connect(fd, reinterpret_cast<const sockaddr*>(&name), bytes) != 0 && errno != EINPROGRESS) {
      return ErrnoStatus(errno, what);
    }
    while (seen() == before) {
      if (NowMs() >= until_ms) {
        return absl::DeadlineExceededError(absl::StrCat(what, ": nobody accepts connections"));
      }
      absl::SleepFor(absl::Milliseconds(2));
    }
  }
  return absl::OkStatus();
}

void Listener::Sweep() const {
  absl::erase_if(open_, [](const auto& one) { return InodeOf(one.first) != one.second; });
}

Listener::Counters Listener::counters() const {
  Counters counters;
  counters.accepted = accepted_.load(std::memory_order_relaxed);
  counters.refused = refused_.load(std::memory_order_relaxed);
  counters.silent = silent_.load(std::memory_order_relaxed);
  absl::MutexLock lock(&mu_);
  Sweep();
  counters.open = static_cast<int64_t>(open_.size());
  return counters;
}

}  // namespace carrel::kvstore
