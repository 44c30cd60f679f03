// What:   what guards a server's addresses: TLS, with certificates that are read again when their
//         files change, and the rule about addresses that strangers reach.
// Errors: InvalidArgument the files (see ReadTlsFiles); FailedPrecondition an address without guards.
// Threads: any.
#pragma once

#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/certificate.h"
#include "common/file_watch.h"
#include "kvstore/service/listen_address.h"

namespace grpc {
class ServerCredentials;
namespace experimental {
class FileWatcherCertificateProvider;
}
}  // namespace grpc

namespace carrel::kvstore {

// Every address that the host's name has is this machine's own.
bool IsLoopback(const ListenAddress& address);

struct Guards {
  bool tls = false;
  bool callers_known = false;  // by keys or client certificates
  bool insecure = false;       // wanted so: a warning, not an error
};
absl::Status CheckExposure(const ListenAddress& address, const Guards& guards);

// The certificates of a server as they are now. Files that do not fit together (a certificate that
// was replaced before its key) or cannot be used are logged and counted, and what was there before
// stays in use. Connections that are open keep what they began with.
// Why not gRPC's watcher on the files themselves: it would take whatever lies there. It watches
// descriptors of this process instead, which hold what was checked.
class ServerTls {
 public:
  // files.ca: clients must have a certificate of it; empty: none is asked for.
  static absl::StatusOr<std::unique_ptr<ServerTls>> Create(
      const TlsFiles& files, absl::Duration interval = absl::Seconds(1));
  ~ServerTls();

  std::shared_ptr<grpc::ServerCredentials> credentials() const { return credentials_; }
  absl::Status Reload();

  struct Counters {
    int64_t reloads = 0, failed_reloads = 0;
    absl::Time expires;  // of the certificate in use
  };
  Counters counters() const;

 private:
  explicit ServerTls(TlsFiles files) : files_(std::move(files)) {}
  absl::Status Put(const TlsPem& pem) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const TlsFiles files_;
  std::shared_ptr<grpc::ServerCredentials> credentials_;
  std::shared_ptr<grpc::experimental::FileWatcherCertificateProvider> provider_;
  mutable absl::Mutex mu_;
  int certificate_fd_ ABSL_GUARDED_BY(mu_) = -1, key_fd_ ABSL_GUARDED_BY(mu_) = -1;
  int ca_fd_ ABSL_GUARDED_BY(mu_) = -1;
  Counters counters_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<FileWatch> watch_;  // last: its thread uses all of the above
};

}  // namespace carrel::kvstore
