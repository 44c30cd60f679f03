// What:   the jobs of a bucket as a server shows them to its clients: it submits for them, tells who watches how a job
//         goes on wherever it runs, and cancels.
// Sees:   every open job, whoever submitted it, and every dead letter; of those that were done here or elsewhere, while
//         this looks on, kKeepDone longer: until whoever lists contexts has them.
// Errors: of Submit and Cancel those of job_board.h. A bucket that does not answer leaves what was seen last, and
//         Look says why.
// Threads: any; one of its own looks. Watchers are called under a lock, on any thread: they must not come back here.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "serving/jobs/doorbell.h"
#include "serving/jobs/job_board.h"

namespace carrel::serving {

// False: has seen enough.
using JobWatcher = std::function<bool(const JobStatus&)>;

struct FollowerConfig {
  absl::Duration look_every = absl::Seconds(1);
  absl::Duration tell_every = absl::Milliseconds(500);  // watchers, also without a change
  Clock clock;                                          // null: the bucket's
};

// Of a job that was submitted here, while it is open.
struct Submitter {
  std::function<bool(const std::string& name)> sees;  // null: all
  std::shared_ptr<void> place;                        // in a quota: held until the job has ended
  // Asked at each look; an error cancels the job. Null: nobody asks.
  std::function<absl::Status()> still;
};

class JobFollower {
 public:
  static constexpr absl::Duration kKeepDone = absl::Seconds(20);

  JobFollower(std::unique_ptr<kvstore::Bucket> bucket, std::unique_ptr<Doorbell> doorbell,
              FollowerConfig config = {});
  ~JobFollower();
  void Stop();  // watchers are told nothing more, and go; jobs go on

  const kvstore::Bucket& bucket() const { return *bucket_; }

  absl::StatusOr<JobBoard::Submitted> Submit(JobRecord record, absl::string_view document,
                                             Submitter submitter);
  // By the context's name, as it was seen last; where nothing is known of it, the bucket is looked at.
  std::optional<JobStatus> Find(const std::string& name);
  // Open, dead, and done a moment ago; by name.
  std::vector<JobStatus> All() const;
  int64_t queued() const;
  // Open jobs for which this process holds no place.
  std::vector<JobRecord> WithoutPlace() const;

  // An open one ends; of a dead one its letter goes. What was done is forgotten here, and its context stays. Returns
  // how it ended, which may be otherwise than it was seen last. NotFound: there is none.
  absl::StatusOr<JobStatus> Remove(const std::string& name, const std::string& reason);
  // Tells how it is now, and then until it has ended. NotFound: there is none.
  absl::Status Watch(const std::string& name, JobWatcher watcher);

  // Now; for tests, and for what must not be old.
  absl::Status Look();

 private:
  struct Followed {
    JobStatus status;
    std::vector<JobWatcher> watchers;
    std::shared_ptr<void> place;
    std::function<absl::Status()> still;
    absl::Time until = absl::InfiniteFuture();  // of those that are done: by SteadyNow()
  };
  void Run();
  void Ask();
  void Update(const JobStatus& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  static void Tell(Followed& one);
  // Unless one has begun since.
  absl::Status LookSince(absl::Time since);
  absl::Status LookAtDead();

  const std::unique_ptr<kvstore::Bucket> bucket_;
  const std::unique_ptr<Doorbell> doorbell_;
  const FollowerConfig config_;
  JobBoard board_;
  absl::Mutex looking_;                                                 // one look at a time
  std::map<std::string, JobStatus> letters_ ABSL_GUARDED_BY(looking_);  // dead ones, by id
  mutable absl::Mutex mu_ ABSL_ACQUIRED_AFTER(looking_);
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  absl::Time looked_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  std::map<std::string, Followed> jobs_ ABSL_GUARDED_BY(mu_);  // by name
  // Ids that were removed since a look began: it may have seen them before.
  std::set<std::string> removed_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

}  // namespace carrel::serving
