#include "kvstore/remote/object_server.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "common/file.h"
#include "common/status.h"
#include "common/steady_time.h"
#include "kvstore/remote/http_client.h"

namespace carrel::kvstore {
namespace {

std::string FindProgram(const char* variable, const std::string& name) {
  const char* const named = std::getenv(variable);
  if (named != nullptr && *named != '\0') return named;
  const char* const path = std::getenv("PATH");
  for (absl::string_view folder : absl::StrSplit(path == nullptr ? "" : path, ':')) {
    const std::string program = absl::StrCat(folder, "/", name);
    if (access(program.c_str(), X_OK) == 0) return program;
  }
  return "";
}

bool PortIsFree(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const bool free = bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  close(fd);
  return free;
}

// The first of `count` ports that nobody has, and neither those 10,000 above, which SeaweedFS takes too.
int FreePorts(int count) {
  for (int first = 19100 + static_cast<int>(getpid()) % 400 * 8;; first += 8) {
    CARREL_CHECK(first < 30000);
    bool free = true;
    for (int i = 0; i < count; ++i) {
      free = free && PortIsFree(first + i) && PortIsFree(first + i + 10000);
    }
    if (free) return first;
  }
}

pid_t Spawn(const std::vector<std::string>& args, const std::string& folder) {
  std::vector<char*> raw;
  for (const std::string& arg : args) raw.push_back(const_cast<char*>(arg.c_str()));
  raw.push_back(nullptr);
  const std::string log = folder + "/log";
  const pid_t pid = fork();
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int out = open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    const int in = open("/dev/null", O_RDONLY);
    dup2(in, 0);
    dup2(out, 1);
    dup2(out, 2);
    if (chdir(folder.c_str()) == 0) execv(raw[0], raw.data());
    _exit(127);
  }
  return pid;
}

constexpr char kIdentities[] =
    R"({"identities":[{"name":"admin","credentials":[{"accessKey":"test-access",)"
    R"("secretKey":"test-secret-0123456789"}],"actions":["Admin","Read","List","Write"]},)"
    R"({"name":"reader","credentials":[{"accessKey":"reader-access",)"
    R"("secretKey":"reader-secret-0123456789"}],"actions":["Read","List"]}]})";

std::vector<std::string> SeaweedArgs(const std::string& program, const std::string& folder,
                                     int port, const TlsFiles* tls) {
  CARREL_CHECK(WriteFileAtomically(folder + "/s3.json", kIdentities).ok());
  std::filesystem::create_directories(folder + "/data");
  std::vector<std::string> args = {program,
                                   "server",
                                   "-dir=" + folder + "/data",
                                   "-ip=127.0.0.1",
                                   "-ip.bind=127.0.0.1",
                                   absl::StrCat("-master.port=", port),
                                   absl::StrCat("-volume.port=", port + 1),
                                   absl::StrCat("-filer.port=", port + 2),
                                   absl::StrCat("-s3.port=", port + 3),
                                   "-filer",
                                   "-s3",
                                   "-s3.config=" + folder + "/s3.json",
                                   "-s3.port.iceberg=0",
                                   "-s3.port.lance=0",
                                   "-master.telemetry=false",
                                   "-master.volumeSizeLimitMB=256",
                                   "-volume.max=30",
                                   "-filer.localSocket=" + folder + "/f.sock",
                                   "-s3.localSocket=" + folder + "/s.sock"};
  if (tls != nullptr) {
    args.push_back(absl::StrCat("-s3.port.https=", port + 4));
    args.push_back("-s3.cert.file=" + tls->certificate);
    args.push_back("-s3.key.file=" + tls->key);
  }
  return args;
}

}  // namespace

std::unique_ptr<ObjectServer> ObjectServer::Start(Kind kind, const std::string& folder,
                                                  const TlsFiles* tls) {
  const bool seaweed = kind == Kind::kSeaweed;
  const std::string program =
      seaweed ? FindProgram("CARREL_WEED", "weed") : FindProgram("CARREL_MOTO", "moto_server");
  if (program.empty()) return nullptr;
  std::filesystem::create_directories(folder);
  const int port = FreePorts(5);
  std::vector<std::string> args = {program, "-H", "127.0.0.1", "-p", absl::StrCat(port)};
  int s3_port = port;
  if (seaweed) {
    args = SeaweedArgs(program, folder, port, tls);
    s3_port = tls == nullptr ? port + 3 : port + 4;
  } else if (tls != nullptr) {
    args.insert(args.end(), {"-s", "-c", tls->certificate, "-k", tls->key});
  }
  const std::string endpoint =
      absl::StrCat(tls == nullptr ? "http" : "https", "://127.0.0.1:", s3_port);
  std::unique_ptr<ObjectServer> server(new ObjectServer(Spawn(args, folder), endpoint));
  HttpClient http(tls == nullptr ? "" : tls->ca);
  const absl::Time until = SteadyNow() + absl::Seconds(60);
  while (SteadyNow() < until) {
    const auto reply =
        http.Send({.method = "GET", .url = endpoint + "/", .deadline = absl::Seconds(5)});
    if (reply.ok() && reply->status < 500) return server;
    absl::SleepFor(absl::Milliseconds(100));
  }
  return nullptr;
}

ObjectServer::~ObjectServer() {
  kill(pid_, SIGKILL);
  int status = 0;
  waitpid(pid_, &status, 0);
}

}  // namespace carrel::kvstore
