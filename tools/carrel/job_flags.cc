#include "tools/carrel/job_flags.h"

#include <CLI/CLI.hpp>

#include "common/status.h"
#include "serving/jobs/nats_doorbell.h"

namespace carrel::tools {

void JobFlags::Declare(CLI::App& command) {
  command.add_option("--remote", remote, "s3://BUCKET/PREFIX: where jobs and contexts are");
  DeclareDoorbell(command);
  bucket.Declare(command);
}

void JobFlags::DeclareDoorbell(CLI::App& command) {
  command.add_option("--nats", nats,
                     "nats://HOST:PORT or tls://HOST:PORT: workers are woken through it, instead "
                     "of finding work when they look next");
  command.add_option("--nats-credentials", nats_credentials, "--nats: a NATS credentials file");
}

absl::Status JobFlags::Validate() const {
  if (remote.empty()) return absl::InvalidArgumentError("--remote s3://BUCKET/PREFIX is required");
  RETURN_IF_ERROR(kvstore::BucketAddress::Parse(remote).status());
  if (nats.empty() && !nats_credentials.empty()) {
    return absl::InvalidArgumentError("--nats-credentials is of --nats nats://HOST:PORT");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<kvstore::Bucket>> JobFlags::Open(
    const kvstore::RetryPolicy& retry, const std::atomic<bool>* stop) const {
  return bucket.Open(remote, retry, stop);
}

absl::StatusOr<std::unique_ptr<serving::Doorbell>> JobFlags::Doorbell(bool listen) const {
  if (nats.empty()) return std::make_unique<serving::QuietDoorbell>();
  return serving::ConnectNats(nats, nats_credentials, serving::SubjectOf(remote), listen);
}

}  // namespace carrel::tools
