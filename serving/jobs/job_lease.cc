#include "serving/jobs/job_lease.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "common/thrown.h"

namespace carrel::serving {
namespace {

bool IsRefused(const absl::Status& status) {
  return absl::IsAborted(status) || absl::IsAlreadyExists(status) || absl::IsNotFound(status);
}

absl::Status OtherHasIt(absl::string_view id, absl::string_view why) {
  return absl::AbortedError(absl::StrCat("the lease on job ", id, " is lost: ", why));
}

}  // namespace

absl::Status LeaseConfig::Validate() const {
  if (time < absl::Seconds(5) || time > absl::Hours(1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("a lease of ", absl::FormatDuration(time), " must be 5s to 1h"));
  }
  if (renew_every < absl::Milliseconds(50) || renew_every > time / 2) {
    return absl::InvalidArgumentError(
        absl::StrCat("a lease that is renewed every ", absl::FormatDuration(renew_every),
                     " must be renewed every 50ms to ", absl::FormatDuration(time / 2)));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<HeldLease>> HeldLease::Take(JobBoard& board, const OpenJob& job,
                                                           const LeaseConfig& config) {
  const std::string& id = job.status.record.id;
  kvstore::S3Client& client = board.bucket().client();
  // Most who come too late learn it here: a conditional PUT that loses may take a second.
  const absl::StatusOr<kvstore::ObjectInfo> there = client.Head(board.LeaseKey(id));
  if (!there.ok() && !absl::IsNotFound(there.status())) return there.status();
  if (job.lease_etag != (there.ok() ? there->etag : "")) return nullptr;
  const JobLease lease{.worker = config.worker,
                       .tries = job.status.lease.tries + 1,
                       .until = board.Now() + config.time,
                       .reason = job.status.lease.reason};
  const absl::StatusOr<std::string> etag =
      client.Put(board.LeaseKey(id), lease.Encode(),
                 job.lease_etag.empty() ? kvstore::Condition::Absent()
                                        : kvstore::Condition::IfMatch(job.lease_etag));
  if (IsRefused(etag.status())) return nullptr;
  RETURN_IF_ERROR(etag.status());
  std::unique_ptr<HeldLease> held(new HeldLease(board, id, config, lease, *etag));
  held->thread_ = std::thread([h = held.get()] { h->Run(); });
  return held;
}

HeldLease::HeldLease(JobBoard& board, std::string id, const LeaseConfig& config, JobLease taken,
                     std::string etag)
    : board_(board),
      id_(std::move(id)),
      config_(config),
      taken_(taken),
      etag_(std::move(etag)),
      now_(std::move(taken)) {}

HeldLease::~HeldLease() { StopRenewing(); }

void HeldLease::StopRenewing() {
  {
    absl::MutexLock lock(&mu_);
    ended_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

void HeldLease::Run() {
  for (;;) {
    {
      absl::MutexLock lock(&mu_);
      mu_.AwaitWithTimeout(absl::Condition(&ended_), config_.renew_every);
      if (ended_ || lost_) return;
    }
    // What the bucket does not answer is tried again; in the end the time is over.
    (void)CatchThrown("a lease", [this] { return Renew(); });
  }
}

absl::Status HeldLease::Held() const {
  absl::MutexLock lock(&mu_);
  if (lost_) return OtherHasIt(id_, "another worker has it, or the job has ended");
  // Servers tell the time to the second: another may see it over a second before we do.
  const absl::Duration margin = std::max(config_.time / 10, absl::Seconds(1));
  if (board_.Now() < now_.until - margin) return absl::OkStatus();
  return OtherHasIt(id_, "its time was over before it was renewed");
}

void HeldLease::Tell(double progress, const std::string& where) {
  absl::MutexLock lock(&mu_);
  now_.progress = progress;
  now_.where = where;
}

absl::Status HeldLease::Lost(absl::string_view why) {
  absl::MutexLock lock(&mu_);
  lost_ = true;
  return OtherHasIt(id_, why);
}

absl::Status HeldLease::Write(const JobLease& lease) {
  kvstore::S3Client& client = board_.bucket().client();
  const std::string key = board_.LeaseKey(id_), bytes = lease.Encode();
  absl::StatusOr<std::string> etag = client.Put(key, bytes, kvstore::Condition::IfMatch(etag_));
  if (IsRefused(etag.status())) {
    // A renewal whose reply was lost was made all the same.
    kvstore::ObjectInfo info;
    const absl::StatusOr<std::string> there = client.Read(key, kMostJobObject, &info);
    if (there.ok()) {
      const absl::StatusOr<JobLease> its = JobLease::Decode(*there, client.UriOf(key));
      const bool ours = its.ok() && its->worker == config_.worker && its->tries == taken_.tries;
      if (ours) etag = client.Put(key, bytes, kvstore::Condition::IfMatch(info.etag));
    }
  }
  if (IsRefused(etag.status())) return Lost("another worker has it, or the job has ended");
  RETURN_IF_ERROR(etag.status());
  etag_ = *std::move(etag);
  absl::MutexLock lock(&mu_);
  now_.until = lease.until;
  return absl::OkStatus();
}

absl::Status HeldLease::Renew() {
  absl::MutexLock writing(&writing_);
  RETURN_IF_ERROR(Held());
  JobLease lease;
  {
    absl::MutexLock lock(&mu_);
    lease = now_;
  }
  lease.until = board_.Now() + config_.time;
  return Write(lease);
}

absl::Status HeldLease::GiveBack() {
  JobLease lease = taken_;
  --lease.tries;
  return LeaveTo(lease, absl::ZeroDuration());
}

absl::Status HeldLease::Fail(const std::string& reason, absl::Duration again_after) {
  JobLease lease = taken_;
  lease.reason = reason;
  return LeaveTo(lease, again_after);
}

absl::Status HeldLease::LeaveTo(JobLease lease, absl::Duration again_after) {
  StopRenewing();
  absl::MutexLock writing(&writing_);
  RETURN_IF_ERROR(Held());
  lease.worker.clear();
  lease.until = board_.Now() + again_after;
  return Write(lease);
}

}  // namespace carrel::serving
