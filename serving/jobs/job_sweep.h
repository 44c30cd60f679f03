// What:   what leaves a bucket of its jobs: those that ended, and what a submission or a worker that was killed left
//         behind. For carrel gc.
// Edge:   what is younger than the grace, by the server's clock, stays, and so does every job that waits. Whoever asks
//         for a swept job's document again asks for its first attempt.
// Errors: as s3_client.h.
// Threads: any.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "serving/jobs/job_board.h"

namespace carrel::serving {

struct SweptJobs {
  int64_t ended = 0;      // jobs
  int64_t leftovers = 0;  // objects of no job
};
// dry_run: tells, and removes nothing.
absl::StatusOr<SweptJobs> SweepJobs(const JobBoard& board, absl::Duration grace, bool dry_run);

}  // namespace carrel::serving
