// What:   the jobs of a bucket: who submits, looks, cancels and ends them.
// Bytes:  below the bucket's prefix (docs/formats.md):
//           jobs/records/ID              JobRecord, put once
//           jobs/documents/ID            its text, or token ids; goes when the job is done or cancelled
//           jobs/queue/ORDER-TIME-ID     empty: the job is open. Names in order are the order in which jobs are
//                                        taken: ORDER is 9 - priority, TIME 13 digits of milliseconds
//           jobs/leases/ID               JobLease: replaced by If-Match alone
//           jobs/results/ID              JobEnd, put once: done, cancelled and dead shut one another out
//           jobs/dead/ID                 record and end of a job that was given up, for people
//         All by plain PUTs. An interruption between two of them leaves a job that the same call, or the next
//         worker, brings to where it was to be.
// Errors: as s3_client.h and job.h; each names the object.
// Ownership: the bucket outlives it.
// Threads: any.
// Cost:   Open: a list of the queue and one of the leases, and a GET for each record that is new to this object and
//         each lease that has changed.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kvstore/remote/bucket.h"
#include "serving/jobs/job.h"

namespace carrel::v1 {
class Manifest;
}

namespace carrel::serving {

using Clock = std::function<absl::Time()>;

// An open job as the bucket showed it.
struct OpenJob {
  JobStatus status;
  std::string queue_key;
  std::string lease_etag;  // empty: there is no lease
};

// What lies in the queue and is no job.
struct BadJob {
  std::string queue_key;
  std::string id;  // empty: the key has none
  absl::Status error;
};

class JobBoard {
 public:
  // clock: null: the bucket's own, as its last reply told it.
  explicit JobBoard(const kvstore::Bucket& bucket, Clock clock = nullptr);

  absl::Time Now() const { return clock_(); }
  const kvstore::Bucket& bucket() const { return bucket_; }

  struct Submitted {
    JobStatus status;
    bool existed = false;  // the same job was open, or is done and its context is there
  };
  // record: all but id, attempt and what is known of the document. sees: whether the submitter may be told of a
  // name; null: of all. AlreadyExists: the name is taken, or the same document is another name's.
  absl::StatusOr<Submitted> Submit(JobRecord record, absl::string_view document,
                                   const std::function<bool(const std::string&)>& sees = nullptr);

  // NotFound: there is no such job.
  absl::StatusOr<JobStatus> Get(const std::string& id);
  // In the order in which they are taken.
  absl::StatusOr<std::vector<OpenJob>> Open(std::vector<BadJob>* bad);
  // Those that ended, in the order of their ids. What cannot be read is appended.
  absl::StatusOr<std::vector<JobStatus>> Ended(std::vector<absl::Status>* unreadable);
  // The job of an id, of an id's beginning (8 digits or more), or the last one of a context's name.
  absl::StatusOr<JobStatus> Find(const std::string& what);

  // What ended it, which may be another end than this one. `ours`: this call bound it.
  struct Bound {
    JobEnd end;
    bool ours = false;
  };
  absl::StatusOr<Bound> End(const JobRecord& record, const JobEnd& end);
  // Of a job that ended: what is left of it while it was open goes. Whoever works on it loses its lease.
  absl::Status CleanUp(const JobRecord& record, const JobEnd& end);
  // End and CleanUp. What ended it before is returned as it was.
  absl::StatusOr<JobStatus> Cancel(const std::string& id, const std::string& reason);
  // The end that is bound; none: the job is open.
  absl::StatusOr<std::optional<JobEnd>> FindEnd(const std::string& id);
  // Of a job that was given up: its letter and its document go; that it ended stays known.
  absl::Status RemoveLetter(const std::string& id);
  // A job whose record cannot be read is given up; one whose record is gone leaves the queue.
  absl::Status PutAway(const BadJob& bad);

  // DataLoss: it is not the document that was submitted.
  absl::StatusOr<std::string> ReadDocument(const JobRecord& record);

  std::string LeaseKey(absl::string_view id) const { return Key("leases", id); }
  std::string Key(absl::string_view folder, absl::string_view id) const;
  std::string QueueKey(const JobRecord& record) const;

 private:
  struct KnownLease {
    std::string listed_etag, etag;
    JobLease lease;
  };
  absl::StatusOr<JobRecord> ReadRecord(const std::string& id);
  absl::StatusOr<KnownLease> ReadLease(const std::string& id);
  absl::StatusOr<OpenJob> ReadOpen(const std::string& id, const std::string& listed_etag);
  absl::Status Enqueue(const JobRecord& record, absl::string_view document);
  absl::Status CheckName(const JobRecord& record);
  // The same document's job of this attempt: nothing: it may be made.
  absl::StatusOr<std::optional<JobStatus>> SameJob(
      const JobRecord& record, const std::function<bool(const std::string&)>& sees,
      bool* next_attempt);

  const kvstore::Bucket& bucket_;
  const Clock clock_;
  absl::Mutex mu_;
  std::map<std::string, JobRecord> records_ ABSL_GUARDED_BY(mu_);  // of open jobs, by id
  std::map<std::string, KnownLease> leases_ ABSL_GUARDED_BY(mu_);
};

// Of a model, as jobs name it: SHA-256 over its fingerprint's names and values.
std::string FingerprintDigest(const std::vector<std::pair<std::string, std::string>>& fingerprint);

// Whether a context is of these tokens, by a model with such a fingerprint.
bool IsOf(const v1::Manifest& manifest, absl::string_view token_ids_sha256,
          const std::vector<std::pair<std::string, std::string>>& fingerprint);

// Whether the name is bound to a context of these tokens by this model, which is then returned. AlreadyExists: it is
// bound to another. fingerprint: what the context's must have.
absl::StatusOr<std::optional<kvstore::BoundName>> FindSameContext(
    const kvstore::Bucket& bucket, const std::string& name, const std::string& token_ids_sha256,
    const std::vector<std::pair<std::string, std::string>>& fingerprint);

// What leaves a bucket of its jobs: those that ended, and what a submission or a worker that was killed left behind.
// What is younger than the grace, by the server's clock, stays, and so does every job that waits. Whoever asks for a
// swept job's document again asks for its first attempt. For carrel gc.
struct SweptJobs {
  int64_t ended = 0;      // jobs
  int64_t leftovers = 0;  // objects of no job
};
// dry_run: tells, and removes nothing.
absl::StatusOr<SweptJobs> SweepJobs(const JobBoard& board, absl::Duration grace, bool dry_run);

}  // namespace carrel::serving
