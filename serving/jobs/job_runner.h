// What:   who makes contexts of documents for a worker (worker.h): behind an interface, so that the worker knows of
//         jobs alone, and whoever computes of models alone.
// Errors: of Prepare and Run: InvalidArgument, Unimplemented, OutOfRange, AlreadyExists, NotFound end the job for good,
//         others end a try. What `still` gives is handed through.
// Threads: one job at a time; `still` and `tell` from any.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "serving/jobs/job.h"

namespace carrel::serving {

// What the worker says while a job runs.
struct JobControl {
  // Asked often, and once more before anything becomes visible: an error: the job is to end, and nothing of it may
  // be published.
  std::function<absl::Status()> still;
  std::function<void(double share, const std::string& where)> tell;
};

// A context that is in the bucket under the job's name.
struct JobResult {
  std::string content_id, context_id;
  int64_t bytes = 0, tokens = 0;
  bool was_there = false;  // somebody had published it before
};

// A document that its model has read as tokens.
class PreparedJob {
 public:
  virtual ~PreparedJob() = default;
  virtual std::string token_ids_sha256() const = 0;
  virtual std::vector<std::pair<std::string, std::string>> fingerprint() const = 0;
  // Computes the context, and publishes it in the bucket.
  virtual absl::StatusOr<JobResult> Run(const JobControl& control) = 0;
};

class JobRunner {
 public:
  virtual ~JobRunner() = default;
  virtual bool Fits(const JobRecord& record) const = 0;
  // The runner outlives what it returns.
  virtual absl::StatusOr<std::unique_ptr<PreparedJob>> Prepare(const JobRecord& record,
                                                               std::string document) = 0;
  // What it keeps of a job to go on with goes.
  virtual void Forget(const JobRecord& record) = 0;
};

}  // namespace carrel::serving
