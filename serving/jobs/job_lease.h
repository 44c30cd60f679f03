// What:   the right of one worker to work on a job, for a while, renewed as long as it is held.
// How:    an object, put with If-None-Match where there is none, and with If-Match where there is one that is over:
//         of many who try, one has it. A renewal that finds another's lease, or none, has lost it: whoever holds it
//         then asks Held before he does what others see. Nothing else keeps two from working on one job; that two
//         results are not taken is JobBoard::End's.
// Errors: of Held and Renew: Aborted the lease is another's, or its time is over (names the job); as s3_client.h.
// Ownership: the board outlives it.
// Threads: any; one of its own renews.
#pragma once

#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "serving/jobs/job.h"
#include "serving/jobs/job_board.h"

namespace carrel::serving {

struct LeaseConfig {
  std::string worker;                             // no other process's
  absl::Duration time = absl::Seconds(30);        // from each renewal on
  absl::Duration renew_every = absl::Seconds(5);  // progress is told as often

  absl::Status Validate() const;  // InvalidArgument names the field, its value and bound
};

class HeldLease {
 public:
  // Null: somebody else has it. A lease that is over is taken over.
  static absl::StatusOr<std::unique_ptr<HeldLease>> Take(JobBoard& board, const OpenJob& job,
                                                         const LeaseConfig& config);
  ~HeldLease();  // it is over by itself, unless it was given back

  absl::Status Held() const;
  absl::Status Renew();
  // What the next renewal tells.
  void Tell(double progress, const std::string& where);
  const JobLease& taken() const { return taken_; }  // as it was taken

  // Both end it. The job may be taken at once, and this try does not count.
  absl::Status GiveBack();
  // It may be taken again after a while.
  absl::Status Fail(const std::string& reason, absl::Duration again_after);

 private:
  HeldLease(JobBoard& board, std::string id, const LeaseConfig& config, JobLease taken,
            std::string etag);
  void Run();
  void StopRenewing();
  // What others take it with.
  absl::Status LeaveTo(JobLease lease, absl::Duration again_after);
  absl::Status Write(const JobLease& lease) ABSL_EXCLUSIVE_LOCKS_REQUIRED(writing_);
  absl::Status Lost(absl::string_view why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(writing_);

  JobBoard& board_;
  const std::string id_;
  const LeaseConfig config_;
  const JobLease taken_;
  absl::Mutex writing_;  // one write at a time
  std::string etag_ ABSL_GUARDED_BY(writing_);
  mutable absl::Mutex mu_ ABSL_ACQUIRED_AFTER(writing_);
  bool ended_ ABSL_GUARDED_BY(mu_) = false, lost_ ABSL_GUARDED_BY(mu_) = false;
  JobLease now_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

}  // namespace carrel::serving
