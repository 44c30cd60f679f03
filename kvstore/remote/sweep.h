// What:   what leaves a bucket: a context by its name, and what nobody needs: files of pushes that ended
//         nowhere, manifests without a name, uploads that were never completed, records of the dead.
// Edge:   a context goes in the order name, manifest, files: at every point it is visible wholly or not at
//         all, and what an interruption leaves, the next sweep takes. What somebody pushes is spared, however
//         old it is, as long as he renews his record (push_record.h).
// Errors: as s3_client.h; NotFound no such name. A sweep goes on behind what it cannot read, and says so.
// Ownership: the bucket outlives what refers to it.
// Threads: any.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kvstore/remote/bucket.h"

namespace carrel::kvstore {

struct Removed {
  std::string content_id;
  int64_t bytes = 0;
  // Somebody pushes the context at this moment: its files stay, for him or for a sweep.
  bool files_stay = false;
};
absl::StatusOr<Removed> RemoveContext(const Bucket& bucket, const std::string& name);

struct SweepOptions {
  // What is younger, by the server's clock, stays.
  absl::Duration grace = absl::Hours(24);
  bool dry_run = false;  // tells, and removes nothing
};

struct Swept {
  int64_t contexts = 0;  // without a name, or without a manifest
  int64_t files = 0, bytes = 0;
  int64_t uploads = 0, names = 0, records = 0;
  int64_t young = 0, pushed = 0;  // contexts that were spared: within the grace; being pushed
  std::vector<absl::Status> unreadable;  // what was left alone therefore
};
absl::StatusOr<Swept> CollectGarbage(const Bucket& bucket, const SweepOptions& options);

}  // namespace carrel::kvstore
