// What:   takes jobs of a bucket one after the other, the highest priority first, of those the oldest, and sees each
//         to its end: a context and a result, a dead letter, or another's.
// How:    a lease for each (job_lease.h). Before anything is computed the bucket is looked at: whether the job has
//         ended, or its context is there under its name, of a worker that was killed behind its last step. What is
//         computed is published only while the lease holds; the result is bound by one conditional PUT, and where
//         another was bound before, the context goes again.
//         A job whose lease was taken kMostTries times is given up with the reason of its last failure. One that
//         cannot succeed (job_runner.h) is given up at once.
// Errors: of Step: what the bucket says. What is wrong with a job is the job's: it is told of, and Step goes on.
// Ownership: board, runner and doorbell outlive it.
// Threads: one runs it; Stop, statistics from any.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/random/random.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "serving/jobs/doorbell.h"
#include "serving/jobs/job_board.h"
#include "serving/jobs/job_lease.h"
#include "serving/jobs/job_runner.h"

namespace carrel::serving {

struct WorkerConfig {
  LeaseConfig lease;
  // Looks at the bucket are so far apart, those of a worker that hears a doorbell ten times as far.
  absl::Duration poll = absl::Seconds(5);
  // Before a job is taken, up to so long at random: many see it at once.
  absl::Duration jitter = absl::Milliseconds(200);
  absl::Duration again_after = absl::Seconds(10);  // a try that failed, times its number
  // Lines for people, without a line break; null: nobody reads them.
  std::function<void(const std::string&)> say;

  absl::Status Validate() const;  // InvalidArgument names the field, its value and bound
};

struct WorkerStatistics {
  int64_t taken = 0, done = 0, failed = 0, dead = 0;  // failed: tries that ended with an error
  int64_t cancelled = 0, lost = 0, given_back = 0;    // while this worker had the lease
  int64_t found = 0;     // jobs whose context was there, or that had ended, when they were taken
  int64_t refused = 0;   // objects that are no job
  int64_t queue = 0;     // open jobs, at the last look
  int64_t fitting = 0;   // those of this worker's models
  double seconds = 0;    // of jobs, whatever became of them
  bool running = false;  // one, now
};

class Worker {
 public:
  Worker(JobBoard& board, JobRunner& runner, Doorbell& doorbell, WorkerConfig config);

  // One look at the bucket, and one job if there is one to take. True: there may be another.
  absl::StatusOr<bool> Step();
  // Until Stop. A bucket that does not answer is told of, and asked again.
  void Run();
  // The job that runs is given back, to be gone on with by whoever takes it.
  void Stop();

  WorkerStatistics statistics() const;

 private:
  bool MayTake(const OpenJob& job) const;
  absl::StatusOr<bool> Handle(const OpenJob& job);
  absl::Status Work(const JobRecord& record, HeldLease& lease);
  absl::StatusOr<JobResult> Compute(const JobRecord& record, HeldLease& lease);
  absl::StatusOr<std::unique_ptr<PreparedJob>> Prepare(const JobRecord& record);
  absl::StatusOr<std::optional<JobResult>> FindThere(const JobRecord& record,
                                                     const PreparedJob& prepared);
  absl::Status UsedUp(const JobRecord& record, const JobLease& last);
  absl::StatusOr<JobBoard::Bound> End(const JobRecord& record, JobEnd end);
  absl::Status Finish(const JobRecord& record, const JobResult& result, int64_t tries);
  absl::Status Failed(const JobRecord& record, HeldLease& lease, const absl::Status& error);
  absl::Status GiveUp(const JobRecord& record, int64_t tries, const std::string& reason);
  absl::Status Discard(const JobRecord& record, const JobResult& result);
  void Refuse(const std::vector<BadJob>& bad);
  void Say(const std::string& line) const;
  void Count(const std::function<void(WorkerStatistics&)>& add);

  JobBoard& board_;
  JobRunner& runner_;
  Doorbell& doorbell_;
  const WorkerConfig config_;
  std::atomic<bool> stopping_{false};
  std::set<std::string> refused_;  // keys that were told of
  absl::BitGen bits_;
  mutable absl::Mutex mu_;
  WorkerStatistics counted_ ABSL_GUARDED_BY(mu_);
};

}  // namespace carrel::serving
