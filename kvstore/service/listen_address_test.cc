#include "kvstore/service/listen_address.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>

#include "common/file.h"
#include "common/test_util.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;

TEST(ListenAddress, GoodOnes_ParseAndPrintBack) {
  for (const char* text : {"unix:/run/carrel.sock", "unix:relative.sock", "127.0.0.1:50051",
                           "localhost:0", "[::1]:8080"}) {
    const auto address = ParseListenAddress(text);
    CARREL_ASSERT_OK(address);
    EXPECT_EQ(address->ToString(), text);
  }
}

TEST(ListenAddress, BadOnes_AreRefusedByName) {
  const std::pair<std::string, const char*> cases[] = {
      {"", "expected unix:PATH or HOST:PORT"},
      {"unix:", "the path is empty"},
      {"unix:" + std::string(200, 'a'), "the path has 200 bytes, at most 107"},
      {std::string("unix:a\0b", 8), "zero byte"},
      {"localhost", "expected unix:PATH or HOST:PORT"},
      {":80", "the host is empty"},
      {"localhost:", "the port is not a number in 0 .. 65535"},
      {"localhost:65536", "the port is not a number in 0 .. 65535"},
      {"localhost:-1", "the port is not a number in 0 .. 65535"},
      {"localhost:8x", "the port is not a number in 0 .. 65535"},
      {"::1:80", "write an IPv6 address in brackets"},
      {"[::1:80", "\"[\" without \"]\""},
  };
  for (const auto& [text, why] : cases) {
    EXPECT_THAT(ParseListenAddress(text), StatusIs(StatusCode::kInvalidArgument, why)) << text;
  }
}

class UnixSocket {
 public:
  explicit UnixSocket(const std::string& path) : fd_(socket(AF_UNIX, SOCK_STREAM, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
    bind(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address));
    listen(fd_, 1);
  }
  ~UnixSocket() { close(fd_); }  // leaves the file, as a killed process does

 private:
  const int fd_;
};

TEST(PrepareToListen, StaleSocket_IsRemovedAndALiveOneIsNot) {
  const std::string path = SocketPath("stale");
  const auto address = ParseListenAddress("unix:" + path);
  CARREL_ASSERT_OK(address);
  CARREL_EXPECT_OK(PrepareToListen(*address));  // nothing is there
  {
    UnixSocket live(path);
    EXPECT_THAT(PrepareToListen(*address),
                StatusIs(StatusCode::kFailedPrecondition, path + ": address in use"));
    EXPECT_TRUE(std::filesystem::exists(path));
  }
  EXPECT_TRUE(std::filesystem::exists(path));
  CARREL_EXPECT_OK(PrepareToListen(*address));
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(PrepareToListen, PathThatIsNoSocket_IsKept) {
  const std::string path = SocketPath("file");
  CARREL_ASSERT_OK(WriteFileAtomically(path, "precious"));
  EXPECT_THAT(PrepareToListen(*ParseListenAddress("unix:" + path)),
              StatusIs(StatusCode::kFailedPrecondition, "is no socket"));
  EXPECT_EQ(*ReadFile(path), "precious");
}

}  // namespace
}  // namespace carrel::kvstore
