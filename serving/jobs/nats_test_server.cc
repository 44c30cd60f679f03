#include "serving/jobs/nats_test_server.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "common/status.h"

namespace carrel::serving {
namespace {

std::string FindProgram() {
  const char* const named = std::getenv("CARREL_NATS");
  if (named != nullptr && *named != '\0') return named;
  const char* const path = std::getenv("PATH");
  const std::string folders = absl::StrCat(path == nullptr ? "" : path, ":/usr/sbin");
  for (absl::string_view folder : absl::StrSplit(folders, ':')) {
    std::string program = absl::StrCat(folder, "/nats-server");
    if (access(program.c_str(), X_OK) == 0) return program;
  }
  return "";
}

sockaddr_in Loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

int FreePort() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = Loopback(0);
  socklen_t size = sizeof address;
  CARREL_CHECK(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0);
  CARREL_CHECK(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0);
  close(fd);
  return ntohs(address.sin_port);
}

bool Answers(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in address = Loopback(port);
  const bool answers =
      connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
  close(fd);
  return answers;
}

}  // namespace

std::unique_ptr<NatsServer> NatsServer::Start() {
  const std::string program = FindProgram();
  if (program.empty()) return nullptr;
  std::unique_ptr<NatsServer> server(new NatsServer(program, FreePort()));
  server->Restart();
  return server;
}

NatsServer::~NatsServer() { Kill(); }

std::string NatsServer::url() const { return absl::StrCat("nats://127.0.0.1:", port_); }

void NatsServer::Kill() {
  if (pid_ < 0) return;
  kill(pid_, SIGKILL);
  int status = 0;
  waitpid(pid_, &status, 0);
  pid_ = -1;
}

void NatsServer::Restart() {
  Kill();
  const std::string port = absl::StrCat(port_);
  pid_ = fork();
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int null = open("/dev/null", O_RDWR);
    for (const int fd : {0, 1, 2}) dup2(null, fd);
    execl(program_.c_str(), "nats-server", "-a", "127.0.0.1", "-p", port.c_str(), nullptr);
    _exit(127);
  }
  for (int i = 0; i < 3000 && !Answers(port_); ++i) absl::SleepFor(absl::Milliseconds(10));
}

}  // namespace carrel::serving
