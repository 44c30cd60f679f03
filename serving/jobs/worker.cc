#include "serving/jobs/worker.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/shown.h"
#include "common/status.h"
#include "common/steady_time.h"
#include "common/thrown.h"
#include "kvstore/remote/sweep.h"

namespace carrel::serving {
namespace {

constexpr int kRarer = 10;  // looks of a worker that hears a doorbell

// What no other try can change.
bool IsForGood(const absl::Status& status) {
  return absl::IsInvalidArgument(status) || absl::IsAlreadyExists(status) ||
         absl::IsNotFound(status) || absl::IsOutOfRange(status) || absl::IsUnimplemented(status);
}

std::string Label(const JobRecord& record) {
  return absl::StrCat("job ", record.id.substr(0, 12), " ", Shown(record.name));
}

std::string TextOf(const absl::Status& status) {
  return absl::StrCat(absl::StatusCodeToString(status.code()), ": ", status.message());
}

}  // namespace

absl::Status WorkerConfig::Validate() const {
  RETURN_IF_ERROR(lease.Validate());
  if (poll < absl::Milliseconds(100) || poll > absl::Hours(1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("looks every ", absl::FormatDuration(poll), " must be 100ms to 1h apart"));
  }
  return absl::OkStatus();
}

Worker::Worker(JobBoard& board, JobRunner& runner, Doorbell& doorbell, WorkerConfig config)
    : board_(board), runner_(runner), doorbell_(doorbell), config_(std::move(config)) {}

void Worker::Say(const std::string& line) const {
  if (config_.say != nullptr) config_.say(line);
}

void Worker::Count(const std::function<void(WorkerStatistics&)>& add) {
  absl::MutexLock lock(&mu_);
  add(counted_);
}

WorkerStatistics Worker::statistics() const {
  absl::MutexLock lock(&mu_);
  return counted_;
}

void Worker::Stop() {
  stopping_ = true;
  doorbell_.Wake();
}

void Worker::Run() {
  bool silent = false;
  while (!stopping_) {
    const absl::StatusOr<bool> more = CatchThrown("a worker", [this] { return Step(); });
    if (!more.ok() && !silent && !stopping_) {
      Say(absl::StrCat("the bucket cannot be used now: ", TextOf(more.status())));
    }
    if (more.ok() && silent) Say("the bucket answers again");
    silent = !more.ok();
    if ((more.ok() && *more) || stopping_) continue;
    doorbell_.Wait(doorbell_.Hears() ? kRarer * config_.poll : config_.poll);
  }
}

void Worker::Refuse(const std::vector<BadJob>& bad) {
  for (const BadJob& one : bad) {
    if (!refused_.insert(one.queue_key).second) continue;
    Count([](WorkerStatistics& s) { ++s.refused; });
    Say(absl::StrCat("refused ", one.queue_key, ": ", TextOf(one.error)));
    const absl::Status away = board_.PutAway(one);
    if (!away.ok()) Say(absl::StrCat("it stays there: ", TextOf(away)));
  }
}

bool Worker::MayTake(const OpenJob& job) const {
  return job.lease_etag.empty() || job.status.lease.until <= board_.Now();
}

absl::StatusOr<bool> Worker::Step() {
  std::vector<BadJob> bad;
  ASSIGN_OR_RETURN(const std::vector<OpenJob> open, board_.Open(&bad));
  Refuse(bad);
  std::vector<const OpenJob*> fitting;
  for (const OpenJob& job : open) {
    if (runner_.Fits(job.status.record)) fitting.push_back(&job);
  }
  Count([&](WorkerStatistics& s) {
    s.queue = static_cast<int64_t>(open.size());
    s.fitting = static_cast<int64_t>(fitting.size());
  });
  for (const OpenJob* job : fitting) {
    if (stopping_) return false;
    if (!MayTake(*job)) continue;
    ASSIGN_OR_RETURN(const bool handled, Handle(*job));
    if (handled) return true;
  }
  return false;
}

// False: somebody else has it.
absl::StatusOr<bool> Worker::Handle(const OpenJob& job) {
  const JobRecord& record = job.status.record;
  const JobLease& before = job.status.lease;
  if (before.tries >= kMostTries) {
    RETURN_IF_ERROR(UsedUp(record, before));
    return true;
  }
  if (config_.jitter > absl::ZeroDuration()) {
    absl::SleepFor(config_.jitter * absl::Uniform<double>(bits_, 0, 1));
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<HeldLease> lease,
                   HeldLease::Take(board_, job, config_.lease));
  if (lease == nullptr) return false;
  Count([](WorkerStatistics& s) {
    ++s.taken;
    s.running = true;
  });
  const absl::Time begun = SteadyNow();
  const absl::Status status = Work(record, *lease);
  Count([&](WorkerStatistics& s) {
    s.running = false;
    s.seconds += absl::ToDoubleSeconds(SteadyNow() - begun);
  });
  RETURN_IF_ERROR(status);
  return true;
}

absl::Status Worker::Work(const JobRecord& record, HeldLease& lease) {
  // It may have ended since the queue was read, or in a process that ended before it could say so.
  ASSIGN_OR_RETURN(const std::optional<JobEnd> end, board_.FindEnd(record.id));
  if (end.has_value()) {
    Count([](WorkerStatistics& s) { ++s.found; });
    Say(absl::StrCat(Label(record), ": is ", NameOf(end->state), " already"));
    runner_.Forget(record);
    return board_.CleanUp(record, *end);
  }
  Say(absl::StrFormat("%s: taken (try %d of %d)", Label(record), lease.taken().tries, kMostTries));
  const absl::StatusOr<JobResult> result =
      CatchThrown("a job", [&] { return Compute(record, lease); });
  if (!result.ok()) return Failed(record, lease, result.status());
  return Finish(record, *result, lease.taken().tries);
}

absl::StatusOr<std::unique_ptr<PreparedJob>> Worker::Prepare(const JobRecord& record) {
  ASSIGN_OR_RETURN(std::string document, board_.ReadDocument(record));
  return runner_.Prepare(record, std::move(document));
}

// The job's context, if it is in the bucket; whoever brought it there.
absl::StatusOr<std::optional<JobResult>> Worker::FindThere(const JobRecord& record,
                                                           const PreparedJob& prepared) {
  ASSIGN_OR_RETURN(const std::optional<kvstore::BoundName> bound,
                   FindSameContext(board_.bucket(), record.name, prepared.token_ids_sha256(),
                                   prepared.fingerprint()));
  if (!bound.has_value()) return std::optional<JobResult>();
  Count([](WorkerStatistics& s) { ++s.found; });
  return std::optional<JobResult>(JobResult{.content_id = bound->content_id,
                                            .context_id = bound->context_id,
                                            .bytes = bound->bytes,
                                            .tokens = bound->tokens,
                                            .was_there = true});
}

absl::StatusOr<JobResult> Worker::Compute(const JobRecord& record, HeldLease& lease) {
  ASSIGN_OR_RETURN(const std::unique_ptr<PreparedJob> prepared, Prepare(record));
  ASSIGN_OR_RETURN(std::optional<JobResult> there, FindThere(record, *prepared));
  if (there.has_value()) return *there;
  const JobControl control{
      .still = [&]() -> absl::Status {
        if (stopping_) return absl::CancelledError("the worker stops");
        return lease.Held();
      },
      .tell = [&](double share, const std::string& where) { lease.Tell(share, where); }};
  absl::StatusOr<JobResult> result = prepared->Run(control);
  if (!absl::IsAlreadyExists(result.status())) return result;
  // Another worker, whose lease this one took over, may have come first after all.
  ASSIGN_OR_RETURN(there, FindThere(record, *prepared));
  if (there.has_value()) return *there;
  return result;
}

// All its tries are used up. The last one may have ended behind its last step but one.
absl::Status Worker::UsedUp(const JobRecord& record, const JobLease& last) {
  if (board_.bucket().ReadName(record.name).ok()) {
    const absl::StatusOr<std::unique_ptr<PreparedJob>> prepared = Prepare(record);
    if (prepared.ok()) {
      const absl::StatusOr<std::optional<JobResult>> there = FindThere(record, **prepared);
      if (there.ok() && there->has_value()) return Finish(record, **there, last.tries);
    }
  }
  return GiveUp(record, last.tries,
                last.reason.empty()
                    ? absl::StrCat("worker ", last.worker, " did not come back from the last of ",
                                   last.tries, " tries")
                    : last.reason);
}

absl::StatusOr<JobBoard::Bound> Worker::End(const JobRecord& record, JobEnd end) {
  end.worker = config_.lease.worker;
  end.ended = board_.Now();
  ASSIGN_OR_RETURN(JobBoard::Bound bound, board_.End(record, end));
  runner_.Forget(record);
  return bound;
}

absl::Status Worker::Finish(const JobRecord& record, const JobResult& result, int64_t tries) {
  ASSIGN_OR_RETURN(const JobBoard::Bound bound, End(record, {.state = JobState::kDone,
                                                             .content_id = result.content_id,
                                                             .context_id = result.context_id,
                                                             .bytes = result.bytes,
                                                             .tokens = result.tokens,
                                                             .tries = tries}));
  if (!bound.ours && bound.end.content_id != result.content_id) {
    Count([&](WorkerStatistics& s) {
      ++(bound.end.state == JobState::kCancelled ? s.cancelled : s.lost);
    });
    Say(absl::StrCat(Label(record), ": is ", NameOf(bound.end.state),
                     " already: this result is discarded"));
    RETURN_IF_ERROR(Discard(record, result));
  } else {
    Count([](WorkerStatistics& s) { ++s.done; });
    Say(absl::StrCat(Label(record), ": done, ", result.tokens, " tokens, ", result.bytes,
                     " bytes, content id ", result.content_id));
  }
  return board_.CleanUp(record, bound.end);
}

// What became visible although the job had ended otherwise.
absl::Status Worker::Discard(const JobRecord& record, const JobResult& result) {
  if (result.was_there) return absl::OkStatus();
  const absl::StatusOr<kvstore::BoundName> name = board_.bucket().ReadName(record.name);
  if (absl::IsNotFound(name.status())) return absl::OkStatus();
  RETURN_IF_ERROR(name.status());
  if (name->content_id != result.content_id) return absl::OkStatus();
  const absl::Status removed = kvstore::RemoveContext(board_.bucket(), record.name).status();
  return absl::IsNotFound(removed) ? absl::OkStatus() : removed;
}

absl::Status Worker::Failed(const JobRecord& record, HeldLease& lease, const absl::Status& error) {
  if (stopping_) {
    const absl::Status back = lease.GiveBack();
    Count([&](WorkerStatistics& s) { ++(back.ok() ? s.given_back : s.lost); });
    Say(absl::StrCat(Label(record), back.ok() ? ": given back, to be gone on with"
                                              : ": the lease runs out by itself"));
    return absl::OkStatus();
  }
  if (const absl::Status held = lease.Held(); !held.ok()) {
    const absl::StatusOr<std::optional<JobEnd>> end = board_.FindEnd(record.id);
    const bool ended = end.ok() && end->has_value();
    const bool cancelled = ended && (*end)->state == JobState::kCancelled;
    Count([&](WorkerStatistics& s) { ++(cancelled ? s.cancelled : s.lost); });
    Say(absl::StrCat(Label(record), ": ", cancelled ? "cancelled" : std::string(held.message())));
    if (ended) runner_.Forget(record);  // else the next try may be ours
    return absl::OkStatus();
  }
  Count([](WorkerStatistics& s) { ++s.failed; });
  const std::string reason = TextOf(error);
  const int64_t tries = lease.taken().tries;
  if (IsForGood(error) || tries >= kMostTries) return GiveUp(record, tries, reason);
  const absl::Duration after = config_.again_after * tries;
  Say(absl::StrCat(Label(record), ": try ", tries, " failed, again in ",
                   absl::FormatDuration(after), ": ", reason));
  const absl::Status left = lease.Fail(reason, after);
  return absl::IsAborted(left) ? absl::OkStatus() : left;
}

absl::Status Worker::GiveUp(const JobRecord& record, int64_t tries, const std::string& reason) {
  ASSIGN_OR_RETURN(const JobBoard::Bound bound,
                   End(record, {.state = JobState::kDead, .reason = reason, .tries = tries}));
  if (bound.ours) {
    Count([](WorkerStatistics& s) { ++s.dead; });
    Say(absl::StrCat(Label(record), ": given up after ", tries, " tries: ", reason));
  }
  return board_.CleanUp(record, bound.end);
}

}  // namespace carrel::serving
