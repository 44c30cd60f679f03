// What:   whether a context in a bucket is what its name and manifest say: every file there, of its size; deep:
//         of its SHA-256.
// Errors: as s3_client.h where nothing can be said; what is wrong with the context is told, not returned.
// Threads: any.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/remote/bucket.h"

namespace carrel::kvstore {

struct Verified {
  std::string content_id;
  int64_t files = 0;
  int64_t bytes_read = 0;
  std::vector<std::string> errors;  // each names an object
};

// progress: told the share that is done; may be null.
absl::StatusOr<Verified> VerifyInBucket(const Bucket& bucket, const std::string& name, bool deep,
                                        const std::function<void(double)>& progress = nullptr);

}  // namespace carrel::kvstore
