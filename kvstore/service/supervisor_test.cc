#include "kvstore/service/supervisor.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "absl/time/clock.h"
#include "common/test_util.h"

namespace carrel::kvstore {
namespace {

class SupervisorTest : public testing::Test {
 protected:
  void SetUp() override {
    path_ = SocketPath("notify");
    fd_ = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path_.c_str(), sizeof(address.sun_path) - 1);
    ASSERT_EQ(bind(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    setenv("NOTIFY_SOCKET", path_.c_str(), 1);
  }
  void TearDown() override {
    unsetenv("NOTIFY_SOCKET");
    unsetenv("WATCHDOG_USEC");
    close(fd_);
  }
  std::string Heard() const {
    char text[100];
    const ssize_t bytes = recv(fd_, text, sizeof(text), 0);
    return std::string(text, static_cast<size_t>(std::max<ssize_t>(0, bytes)));
  }
  std::string path_;
  int fd_ = -1;
};

TEST_F(SupervisorTest, Notify_SendsADatagram) {
  NotifySupervisor("READY=1");
  EXPECT_EQ(Heard(), "READY=1");
  setenv("NOTIFY_SOCKET", (path_ + ".gone").c_str(), 1);
  NotifySupervisor("READY=1");  // nobody is there
  unsetenv("NOTIFY_SOCKET");
  NotifySupervisor("READY=1");
}

TEST_F(SupervisorTest, Period_IsHalfOfWhatTheSupervisorWaits) {
  EXPECT_EQ(WatchdogPeriod(absl::Seconds(10)), absl::Seconds(10));
  setenv("WATCHDOG_USEC", "4000000", 1);
  EXPECT_EQ(WatchdogPeriod(absl::Seconds(10)), absl::Seconds(2));
  setenv("WATCHDOG_USEC", "60000000", 1);
  EXPECT_EQ(WatchdogPeriod(absl::Seconds(10)), absl::Seconds(10));
  setenv("WATCHDOG_USEC", "nonsense", 1);
  EXPECT_EQ(WatchdogPeriod(absl::Seconds(10)), absl::Seconds(10));
}

TEST_F(SupervisorTest, Watchdog_TellsOfEachProbeThatSucceeds) {
  Watchdog watchdog(
      absl::Milliseconds(1), [] { return absl::OkStatus(); },
      [](const absl::Status&) { ADD_FAILURE(); });
  EXPECT_EQ(Heard(), "WATCHDOG=1");
  EXPECT_EQ(Heard(), "WATCHDOG=1");
}

TEST_F(SupervisorTest, Watchdog_GivesUpAfterThreeFailuresInARow) {
  std::atomic<int> probes{0}, given_up{0};
  Watchdog watchdog(
      absl::Milliseconds(1),
      [&] {
        // Two failures, one success, then failures only.
        return ++probes == 3 ? absl::OkStatus() : absl::UnavailableError("nobody answers");
      },
      [&](const absl::Status& status) {
        EXPECT_EQ(status.message(), "nobody answers");
        ++given_up;
      });
  while (given_up == 0) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(probes, 6);
}

}  // namespace
}  // namespace carrel::kvstore
