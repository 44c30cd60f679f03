// What: the flags that say how a bucket (s3://BUCKET/PREFIX) is reached.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kvstore/remote/bucket.h"

namespace CLI {
class App;
}

namespace carrel::tools {

struct BucketFlags {
  std::string endpoint, region, profile, ca, style, encrypt;

  void Declare(CLI::App& command);
  // Of a command whose --store may be a bucket.
  void DeclareForStore(CLI::App& command);
  // uri: s3://BUCKET/PREFIX. What no flag says, AWS's variables do.
  // stop: ends what its client does and waits for; outlives the bucket, or null.
  absl::StatusOr<std::unique_ptr<kvstore::Bucket>> Open(
      const std::string& uri, const kvstore::RetryPolicy& retry = {},
      const std::atomic<bool>* stop = nullptr) const;
  // InvalidArgument (names one): flags that say something of a bucket, where there is none.
  absl::Status RefuseWithoutBucket() const;
};

}  // namespace carrel::tools
