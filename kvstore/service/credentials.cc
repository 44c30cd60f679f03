#include "kvstore/service/credentials.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <netdb.h>
#include <spdlog/spdlog.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/status.h"

namespace carrel::kvstore {
namespace {

constexpr unsigned kRefreshSeconds = 1;

bool IsLoopback(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(address);
    return (ntohl(v4->sin_addr.s_addr) >> 24) == 127;
  }
  if (address->sa_family == AF_INET6) {
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(address);
    return IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr) ||
           (IN6_IS_ADDR_V4MAPPED(&v6->sin6_addr) && v6->sin6_addr.s6_addr[12] == 127);
  }
  return false;
}

// Bytes that /proc/self/fd/FD gives, in memory alone. fd: of the number that it has, if it is one.
absl::StatusOr<int> PutInMemory(const std::string& bytes, int fd) {
  const int made = memfd_create("carrel-tls", MFD_CLOEXEC);
  if (made < 0) return ErrnoStatus(errno, "memfd_create");
  absl::Cleanup close_made = [made] { close(made); };
  if (write(made, bytes.data(), bytes.size()) != static_cast<ssize_t>(bytes.size())) {
    return ErrnoStatus(errno, "write certificates to memory");
  }
  if (fd < 0) {
    std::move(close_made).Cancel();
    return made;
  }
  // At once: who opens the number sees the old bytes or the new.
  if (dup3(made, fd, O_CLOEXEC) < 0) return ErrnoStatus(errno, "dup3");
  return fd;
}

std::string PathOf(int fd) { return absl::StrCat("/proc/self/fd/", fd); }

}  // namespace

bool IsLoopback(const ListenAddress& address) {
  if (!address.unix_path.empty()) return false;
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(address.host.c_str(), nullptr, &hints, &found) != 0) return false;
  absl::Cleanup free_found = [found] { freeaddrinfo(found); };
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    if (!IsLoopback(one->ai_addr)) return false;
  }
  return true;
}

absl::Status CheckExposure(const ListenAddress& address, const Guards& guards) {
  if (!address.unix_path.empty() || IsLoopback(address)) return absl::OkStatus();
  if (guards.tls && guards.callers_known) return absl::OkStatus();
  const char* const missing = guards.tls             ? "credentials (--keys or --tls-client-ca)"
                              : guards.callers_known ? "TLS (--tls-cert and --tls-key)"
                                                     : "TLS (--tls-cert and --tls-key) and "
                                                       "credentials (--keys or --tls-client-ca)";
  if (guards.insecure) {
    spdlog::warn(
        "listen {}: INSECURE, without {}: whoever reaches this address {}", address.ToString(),
        missing,
        guards.callers_known ? "reads and changes what passes, keys too" : "reads every context");
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "listen ", address.ToString(), ": others than this machine reach it, which needs ", missing,
      ", or --insecure"));
}

absl::StatusOr<std::unique_ptr<ServerTls>> ServerTls::Create(const TlsFiles& files,
                                                             absl::Duration interval) {
  if (files.certificate.empty()) {
    return absl::InvalidArgumentError("TLS needs a certificate and its key");
  }
  std::unique_ptr<ServerTls> tls(new ServerTls(files));
  std::vector<std::string> watched = {files.certificate, files.key};
  if (!files.ca.empty()) watched.push_back(files.ca);
  // First the watch, so that no change is missed.
  tls->watch_ = std::make_unique<FileWatch>(watched, interval,
                                            [self = tls.get()] { self->Reload().IgnoreError(); });
  RETURN_IF_ERROR(tls->Reload());
  absl::MutexLock lock(&tls->mu_);
  tls->provider_ = std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
      PathOf(tls->key_fd_), PathOf(tls->certificate_fd_),
      files.ca.empty() ? "" : PathOf(tls->ca_fd_), kRefreshSeconds);
  grpc::experimental::TlsServerCredentialsOptions options(tls->provider_);
  options.watch_identity_key_cert_pairs();
  if (!files.ca.empty()) options.watch_root_certs();
  options.set_cert_request_type(files.ca.empty()
                                    ? GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE
                                    : GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  tls->credentials_ = grpc::experimental::TlsServerCredentials(options);
  return tls;
}

ServerTls::~ServerTls() {
  watch_ = nullptr;
  credentials_ = nullptr;
  provider_ = nullptr;
  absl::MutexLock lock(&mu_);
  for (const int fd : {certificate_fd_, key_fd_, ca_fd_}) {
    if (fd >= 0) close(fd);
  }
}

absl::Status ServerTls::Reload() {
  const absl::StatusOr<TlsPem> pem = ReadTlsFiles(files_, absl::Now());
  absl::MutexLock lock(&mu_);
  const absl::Status status = pem.ok() ? Put(*pem) : pem.status();
  if (!status.ok()) {
    ++counters_.failed_reloads;
    spdlog::error("tls: not used, what was read before stays: {}", std::string(status.message()));
    return status;
  }
  ++counters_.reloads;
  counters_.expires = pem->expires;
  spdlog::info("tls: read certificate={} valid_until={}", files_.certificate,
               absl::FormatTime(absl::RFC3339_sec, pem->expires, absl::UTCTimeZone()));
  return absl::OkStatus();
}

absl::Status ServerTls::Put(const TlsPem& pem) {
  ASSIGN_OR_RETURN(key_fd_, PutInMemory(pem.key, key_fd_));
  ASSIGN_OR_RETURN(certificate_fd_, PutInMemory(pem.certificate, certificate_fd_));
  if (!pem.ca.empty()) {
    ASSIGN_OR_RETURN(ca_fd_, PutInMemory(pem.ca, ca_fd_));
  }
  return absl::OkStatus();
}

ServerTls::Counters ServerTls::counters() const {
  absl::MutexLock lock(&mu_);
  return counters_;
}

}  // namespace carrel::kvstore
