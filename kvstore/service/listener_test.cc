#include "kvstore/service/listener.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <set>
#include <stdexcept>

#include "absl/time/clock.h"
#include "common/test_util.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;

std::string Path() { return SocketPath("listener"); }

// Connected and not silent, or -1.
int Connect(const ListenAddress& address, bool speak = true) {
  const bool is_unix = !address.unix_path.empty();
  const int fd = socket(is_unix ? AF_UNIX : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  sockaddr_un path{};
  path.sun_family = AF_UNIX;
  std::strncpy(path.sun_path, address.unix_path.c_str(), sizeof(path.sun_path) - 1);
  sockaddr_in loopback{};
  loopback.sin_family = AF_INET;
  loopback.sin_port = htons(static_cast<uint16_t>(address.port));
  loopback.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int failed =
      is_unix ? connect(fd, reinterpret_cast<const sockaddr*>(&path), sizeof(path))
              : connect(fd, reinterpret_cast<const sockaddr*>(&loopback), sizeof(loopback));
  if (failed == 0) {
    if (speak) send(fd, "P", 1, MSG_NOSIGNAL);
    return fd;
  }
  close(fd);
  return -1;
}

// That the server's side of it was closed.
bool IsClosed(int fd) {
  char byte;
  return recv(fd, &byte, 1, 0) <= 0;  // with what was sent unread: reset
}

class ListenerTest : public testing::Test {
 protected:
  void TearDown() override {
    for (const int fd : mine_) close(fd);
    listener_.reset();
    absl::MutexLock lock(&mu_);
    for (const int fd : taken_) close(fd);
  }

  void Listen(int64_t max_connections, absl::Duration silence = absl::Minutes(10)) {
    auto listener =
        Listener::Bind({*ParseListenAddress("unix:" + Path()), *ParseListenAddress("127.0.0.1:0")},
                       max_connections, 0640, silence);
    CARREL_ASSERT_OK(listener);
    listener_ = *std::move(listener);
    listener_->Start([this](const Connection& connection) {
      if (throws_ > 0 && throws_-- > 0) throw std::runtime_error("planted");
      absl::MutexLock lock(&mu_);
      taken_.push_back(connection.fd);
      addresses_.insert(connection.address);
    });
  }
  void AwaitTaken(size_t count) {
    for (;; absl::SleepFor(absl::Milliseconds(1))) {
      absl::MutexLock lock(&mu_);
      if (taken_.size() >= count) return;
    }
  }
  void CloseTaken() {
    absl::MutexLock lock(&mu_);
    for (const int fd : taken_) close(fd);
    taken_.clear();
  }

  std::atomic<int> throws_{0};  // so many connections are not taken
  std::unique_ptr<Listener> listener_;
  std::vector<int> mine_;
  absl::Mutex mu_;
  std::vector<int> taken_ ABSL_GUARDED_BY(mu_);
  std::set<size_t> addresses_ ABSL_GUARDED_BY(mu_);
};

TEST_F(ListenerTest, ConnectionsOfBothKinds_AreHandedOverWithTheirAddress) {
  Listen(100);
  EXPECT_GT(listener_->addresses()[1].port, 0);
  for (const ListenAddress& address : listener_->addresses()) mine_.push_back(Connect(address));
  AwaitTaken(2);
  {
    absl::MutexLock lock(&mu_);
    EXPECT_EQ(addresses_, (std::set<size_t>{0, 1}));
    for (const int fd : taken_) EXPECT_NE(fcntl(fd, F_GETFL) & O_NONBLOCK, 0);
  }
  EXPECT_EQ(listener_->counters().open, 2);
  EXPECT_EQ(listener_->counters().accepted, 2);
  CloseTaken();
  EXPECT_EQ(listener_->counters().open, 0);
  EXPECT_EQ(listener_->counters().refused, 0);
}

TEST_F(ListenerTest, WhoTakesThemThrows_ThatOneIsClosedAndLaterOnesAreServed) {
  throws_ = 2;
  Listen(100);
  for (int i = 0; i < 2; ++i) {
    mine_.push_back(Connect(listener_->addresses()[1]));
    EXPECT_TRUE(IsClosed(mine_.back()));
  }
  for (const ListenAddress& address : listener_->addresses()) mine_.push_back(Connect(address));
  AwaitTaken(2);
  EXPECT_EQ(listener_->counters().open, 2);
}

TEST_F(ListenerTest, BeyondTheLimit_IsClosedAtOnceUntilOneEnds) {
  Listen(3);
  for (int i = 0; i < 3; ++i) mine_.push_back(Connect(listener_->addresses()[0]));
  AwaitTaken(3);
  for (const ListenAddress& address : listener_->addresses()) {
    mine_.push_back(Connect(address));
    EXPECT_TRUE(IsClosed(mine_.back()));
  }
  EXPECT_EQ(listener_->counters().refused, 2);
  EXPECT_EQ(listener_->counters().open, 3);
  CloseTaken();
  // Those that ended are looked for from time to time.
  while (listener_->counters().accepted < 4) {
    mine_.push_back(Connect(listener_->addresses()[1]));
    absl::SleepFor(absl::Milliseconds(5));
  }
}

// What stops gRPC 1.51's own listener for good.
TEST_F(ListenerTest, NoDescriptorLeft_ClientsAreRefusedAndLaterOnesAreServed) {
#ifdef CARREL_SANITIZED
  GTEST_SKIP()
      << "UBSan looks at an object's memory through a pipe, for which no descriptor is left";
#endif
  Listen(1000);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  // Sockets of ours that are not connected yet, and room for two descriptors more.
  std::vector<int> unconnected;
  for (int i = 0; i < 8; ++i) {
    unconnected.push_back(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  }
  rlimit low = before;
  low.rlim_cur = static_cast<rlim_t>(unconnected.back()) + 3;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  sockaddr_un path{};
  path.sun_family = AF_UNIX;
  std::strncpy(path.sun_path, Path().c_str(), sizeof(path.sun_path) - 1);
  for (const int fd : unconnected) {
    EXPECT_EQ(connect(fd, reinterpret_cast<const sockaddr*>(&path), sizeof(path)), 0);
    send(fd, "P", 1, MSG_NOSIGNAL);
  }
  AwaitTaken(2);
  for (size_t i = 2; i < unconnected.size(); ++i) EXPECT_TRUE(IsClosed(unconnected[i]));
  EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(listener_->counters().refused, 6);
  for (const int fd : unconnected) close(fd);
  CloseTaken();
  for (const ListenAddress& address : listener_->addresses()) mine_.push_back(Connect(address));
  AwaitTaken(2);
}

TEST_F(ListenerTest, Probe_SeesWhetherTheLoopRuns) {
  Listen(10);
  CARREL_EXPECT_OK(listener_->Probe(absl::Minutes(1)));
  {
    absl::MutexLock stuck(&mu_);  // the loop waits for it at the next connection
    const int fd = Connect(listener_->addresses()[0]);
    EXPECT_FALSE(listener_->Probe(absl::Milliseconds(100)).ok());
    close(fd);
  }
  while (!listener_->Probe(absl::Minutes(1)).ok()) {
  }
}

TEST_F(ListenerTest, WhoSaysNothing_IsNotHandedOver) {
  Listen(100);
  for (const ListenAddress& address : listener_->addresses()) {
    mine_.push_back(Connect(address, /*speak=*/false));
  }
  while (listener_->counters().open < 2) absl::SleepFor(absl::Milliseconds(1));
  mine_.push_back(Connect(listener_->addresses()[0]));
  AwaitTaken(1);
  {
    absl::MutexLock lock(&mu_);
    EXPECT_EQ(taken_.size(), 1u);
  }
  for (const int fd : {mine_[0], mine_[1]}) send(fd, "P", 1, MSG_NOSIGNAL);
  AwaitTaken(3);
  // One that leaves without a word is forgotten.
  const int fd = Connect(listener_->addresses()[1], /*speak=*/false);
  while (listener_->counters().open < 4) absl::SleepFor(absl::Milliseconds(1));
  close(fd);
  while (listener_->counters().open > 3) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(listener_->counters().silent, 0);
}

TEST_F(ListenerTest, WhoSaysNothingForLong_IsClosed) {
  Listen(100, absl::Milliseconds(50));
  for (int i = 0; i < 3; ++i) {
    for (const ListenAddress& address : listener_->addresses()) {
      mine_.push_back(Connect(address, /*speak=*/false));
    }
  }
  for (const int fd : mine_) EXPECT_TRUE(IsClosed(fd));
  while (listener_->counters().silent < 6) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(listener_->counters().open, 0);
}

TEST_F(ListenerTest, Stop_RemovesTheSocketAndRefuses) {
  Listen(10);
  struct stat info;
  ASSERT_EQ(stat(Path().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0640u);
  const std::vector<ListenAddress> addresses = listener_->addresses();
  listener_->Stop();
  EXPECT_FALSE(std::filesystem::exists(Path()));
  for (const ListenAddress& address : addresses) EXPECT_EQ(Connect(address), -1);
}

TEST_F(ListenerTest, AddressInUse_IsSaid) {
  Listen(10);
  for (const ListenAddress& address : listener_->addresses()) {
    EXPECT_THAT(Listener::Bind({address}, 1, 0600).status(),
                StatusIs(StatusCode::kFailedPrecondition, "address in use"));
  }
  const auto nowhere = ParseListenAddress("no-such-host.invalid:80");
  EXPECT_THAT(Listener::Bind({*nowhere}, 1, 0600).status(),
              StatusIs(StatusCode::kInvalidArgument, "no-such-host.invalid:80"));
}

}  // namespace
}  // namespace carrel::kvstore
