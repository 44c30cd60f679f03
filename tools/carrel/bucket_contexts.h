// What: ls, rm and verify where the store is a bucket.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "tools/carrel/bucket_flags.h"

namespace carrel::tools {

// uri: s3://BUCKET/PREFIX.
absl::Status ListInBucket(const BucketFlags& flags, const std::string& uri, bool json);
absl::Status RemoveInBucket(const BucketFlags& flags, const std::string& uri,
                            const std::string& name, bool json);
// name: empty: all.
absl::Status VerifyInBucket(const BucketFlags& flags, const std::string& uri,
                            const std::string& name, bool deep, bool json);

}  // namespace carrel::tools
