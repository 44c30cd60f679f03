// What: the flags that say in which bucket jobs are, and how workers there are woken.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "serving/jobs/doorbell.h"
#include "tools/carrel/bucket_flags.h"

namespace CLI {
class App;
}

namespace carrel::tools {

struct JobFlags {
  std::string remote;  // s3://BUCKET/PREFIX
  std::string nats, nats_credentials;
  BucketFlags bucket;

  void Declare(CLI::App& command);
  // --nats and --nats-credentials alone.
  void DeclareDoorbell(CLI::App& command);
  absl::Status Validate() const;  // InvalidArgument names the flag
  absl::StatusOr<std::unique_ptr<kvstore::Bucket>> Open(
      const kvstore::RetryPolicy& retry = {}, const std::atomic<bool>* stop = nullptr) const;
  // Without --nats one of this process.
  absl::StatusOr<std::unique_ptr<serving::Doorbell>> Doorbell(bool listen) const;
};

}  // namespace carrel::tools
