#include "kvstore/service/listen_address.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"
#include "common/status.h"

namespace carrel::kvstore {
namespace {

absl::Status PrepareUnix(const std::string& path) {
  struct stat info;
  if (lstat(path.c_str(), &info) != 0) {
    if (errno == ENOENT) return absl::OkStatus();
    return ErrnoStatus(errno, absl::StrCat("listen unix:", path));
  }
  if (!S_ISSOCK(info.st_mode)) {
    return absl::FailedPreconditionError(
        absl::StrCat("listen unix:", path, ": the path exists and is no socket"));
  }
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return ErrnoStatus(errno, "socket");
  absl::Cleanup close_fd = [fd] { close(fd); };
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 ||
      errno == EAGAIN) {
    return absl::FailedPreconditionError(
        absl::StrCat("listen unix:", path, ": address in use, another process listens there"));
  }
  if (errno != ECONNREFUSED) return ErrnoStatus(errno, absl::StrCat("listen unix:", path));
  if (unlink(path.c_str()) != 0 && errno != ENOENT) {
    return ErrnoStatus(errno, absl::StrCat("removing the stale socket ", path));
  }
  return absl::OkStatus();
}

}  // namespace

std::string ListenAddress::ToString() const {
  if (!unix_path.empty()) return absl::StrCat("unix:", unix_path);
  if (absl::StrContains(host, ':')) return absl::StrCat("[", host, "]:", port);
  return absl::StrCat(host, ":", port);
}

absl::StatusOr<ListenAddress> ParseListenAddress(absl::string_view text) {
  const auto refuse = [&](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("listen address \"", text, "\": ", why));
  };
  if (text.find('\0') != absl::string_view::npos) return refuse("contains a zero byte");
  ListenAddress address;
  absl::string_view rest = text;
  if (absl::ConsumePrefix(&rest, "unix:")) {
    if (rest.empty()) return refuse("the path is empty");
    constexpr size_t kLongest = sizeof(sockaddr_un::sun_path) - 1;
    if (rest.size() > kLongest) {
      return refuse(absl::StrCat("the path has ", rest.size(), " bytes, at most ", kLongest,
                                 " are possible"));
    }
    address.unix_path = std::string(rest);
    return address;
  }
  const size_t colon = rest.rfind(':');
  if (colon == absl::string_view::npos) return refuse("expected unix:PATH or HOST:PORT");
  absl::string_view host = rest.substr(0, colon);
  if (absl::ConsumePrefix(&host, "[")) {
    if (!absl::ConsumeSuffix(&host, "]")) return refuse("\"[\" without \"]\"");
  } else if (absl::StrContains(host, ':')) {
    return refuse("write an IPv6 address in brackets");
  }
  if (host.empty()) return refuse("the host is empty");
  if (!absl::SimpleAtoi(rest.substr(colon + 1), &address.port) || address.port < 0 ||
      address.port > 65535) {
    return refuse("the port is not a number in 0 .. 65535");
  }
  address.host = std::string(host);
  return address;
}

absl::Status ValidateAdvertised(const std::string& address) {
  if (address.empty()) return absl::OkStatus();
  const absl::StatusOr<ListenAddress> parsed = ParseListenAddress(address);
  if (!parsed.ok()) return Annotate(parsed.status(), "advertise");
  if (!parsed->unix_path.empty() || parsed->port > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "advertise=", address, ": others cannot reach port 0: name the port that is listened on"));
}

absl::Status PrepareToListen(const ListenAddress& address) {
  return address.unix_path.empty() ? absl::OkStatus() : PrepareUnix(address.unix_path);
}

}  // namespace carrel::kvstore
