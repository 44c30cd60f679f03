#include "serving/jobs/job_follower.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "common/steady_time.h"
#include "common/thrown.h"

namespace carrel::serving {
namespace {

absl::Status NoJob(const std::string& name) {
  return absl::NotFoundError(absl::StrCat("there is no job for a context \"", name, "\""));
}

}  // namespace

JobFollower::JobFollower(std::unique_ptr<kvstore::Bucket> bucket,
                         std::unique_ptr<Doorbell> doorbell, FollowerConfig config)
    : bucket_(std::move(bucket)),
      doorbell_(std::move(doorbell)),
      config_(std::move(config)),
      board_(*bucket_, config_.clock) {
  thread_ = std::thread([this] { Run(); });
}

JobFollower::~JobFollower() { Stop(); }

void JobFollower::Stop() {
  {
    absl::MutexLock lock(&mu_);
    ended_ = true;
  }
  if (thread_.joinable()) thread_.join();
  absl::MutexLock lock(&mu_);
  for (auto& [name, one] : jobs_) one.watchers.clear();
}

void JobFollower::Run() {
  bool silent = false;
  for (;;) {
    bool look;
    {
      absl::MutexLock lock(&mu_);
      mu_.AwaitWithTimeout(absl::Condition(&ended_), config_.tell_every);
      if (ended_) return;
      look = SteadyNow() - looked_ >= config_.look_every;
    }
    if (look) {
      const absl::Status looked = CatchThrown("jobs", [this] { return Look(); });
      if (!looked.ok() && !silent) {
        spdlog::warn("jobs cannot be looked at now: {}", std::string(looked.message()));
      }
      silent = !looked.ok();
    }
    Ask();
    absl::MutexLock lock(&mu_);
    if (ended_) return;
    for (auto& [name, one] : jobs_) Tell(one);
  }
}

// What watchers throw is their own matter.
void JobFollower::Tell(Followed& one) {
  std::erase_if(one.watchers, [&](const JobWatcher& watcher) {
    const auto more =
        CatchThrown("a watcher", [&]() -> absl::StatusOr<bool> { return watcher(one.status); });
    return !more.value_or(false) || one.status.ended();
  });
}

// Whose key was withdrawn has his jobs end.
void JobFollower::Ask() {
  std::vector<std::pair<std::string, std::function<absl::Status()>>> asked;
  {
    absl::MutexLock lock(&mu_);
    for (const auto& [name, one] : jobs_) {
      if (one.still != nullptr && !one.status.ended()) asked.emplace_back(name, one.still);
    }
  }
  for (const auto& [name, still] : asked) {
    const absl::Status may = CatchThrown("jobs", [&, ask = &still] { return (*ask)(); });
    if (may.ok()) continue;
    spdlog::warn("job of {}: given up: {}", name, std::string(may.message()));
    const absl::Status gone =
        Remove(name, absl::StrCat("context \"", name,
                                  "\": the key that brought it may not bring it any more"))
            .status();
    if (!gone.ok()) spdlog::warn("job of {}: {}", name, std::string(gone.message()));
  }
}

void JobFollower::Update(const JobStatus& status) {
  Followed& one = jobs_[status.record.name];
  const bool other = one.status.record.id != status.record.id;
  // Of one name what is open counts, or else what was submitted last.
  if (other && !one.status.record.id.empty()) {
    const bool stays = !one.status.ended() && status.ended();
    const bool later = one.status.record.submitted > status.record.submitted;
    if (stays || (one.status.ended() == status.ended() && later)) return;
    one.place = nullptr;
    one.still = nullptr;
  }
  const bool changed = other || one.status.state != status.state ||
                       one.status.lease.progress != status.lease.progress ||
                       one.status.lease.where != status.lease.where;
  one.status = status;
  one.until = absl::InfiniteFuture();
  if (status.ended()) {
    one.place = nullptr;
    one.still = nullptr;
    if (status.state != JobState::kDead) one.until = SteadyNow() + kKeepDone;
  }
  if (changed) Tell(one);
}

absl::Status JobFollower::LookAtDead() {
  std::set<std::string> ids;
  const std::string folder = board_.Key("dead", "");
  RETURN_IF_ERROR(
      bucket_->client().ForEach(folder, [&](const kvstore::ListedObject& object) -> absl::Status {
        ids.insert(object.key.substr(folder.size()));
        return absl::OkStatus();
      }));
  std::erase_if(letters_, [&](const auto& letter) { return !ids.contains(letter.first); });
  for (const std::string& id : ids) {
    if (letters_.contains(id) || !IsJobId(id)) continue;
    const absl::StatusOr<JobStatus> status = board_.Get(id);
    if (absl::IsUnavailable(status.status())) return status.status();
    if (status.ok() && status->ended()) letters_[id] = *status;  // else it is for people to look at
  }
  return absl::OkStatus();
}

absl::Status JobFollower::Look() { return LookSince(absl::InfiniteFuture()); }

absl::Status JobFollower::LookSince(absl::Time since) {
  absl::MutexLock one_look(&looking_);
  std::vector<std::string> before;  // ids
  {
    absl::MutexLock lock(&mu_);
    if (looked_ >= since) return absl::OkStatus();  // somebody else did while we waited
    looked_ = SteadyNow();
    removed_.clear();
    for (const auto& [name, one] : jobs_) {
      if (!one.status.ended()) before.push_back(one.status.record.id);
    }
  }
  ASSIGN_OR_RETURN(const std::vector<OpenJob> open, board_.Open(nullptr));
  RETURN_IF_ERROR(LookAtDead());
  std::set<std::string> ids;
  for (const OpenJob& job : open) ids.insert(job.status.record.id);
  std::vector<JobStatus> seen;
  for (const OpenJob& job : open) seen.push_back(job.status);
  for (const auto& [id, letter] : letters_) {
    if (ids.insert(id).second) seen.push_back(letter);
  }
  for (const std::string& id : before) {  // those that have left the queue
    if (ids.contains(id)) continue;
    absl::StatusOr<JobStatus> status = board_.Get(id);
    if (absl::IsNotFound(status.status())) continue;  // and are swept
    RETURN_IF_ERROR(status.status());
    seen.push_back(*std::move(status));
    ids.insert(id);
  }
  absl::MutexLock lock(&mu_);
  for (const JobStatus& status : seen) {
    if (!removed_.contains(status.record.id)) Update(status);
  }
  std::erase_if(jobs_, [&](const auto& entry) {
    const Followed& one = entry.second;
    const bool kept_done =
        one.status.ended() && one.status.state != JobState::kDead && SteadyNow() < one.until;
    // What was submitted while this looked is not among what it saw.
    const bool newer = !one.status.ended() && std::find(before.begin(), before.end(),
                                                        one.status.record.id) == before.end();
    return !ids.contains(one.status.record.id) && !kept_done && !newer;
  });
  for (auto& [name, one] : jobs_) {
    if (one.status.ended() && one.status.state != JobState::kDead && SteadyNow() >= one.until) {
      one.watchers.clear();
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<JobBoard::Submitted> JobFollower::Submit(JobRecord record,
                                                        absl::string_view document,
                                                        Submitter submitter) {
  const std::string name = record.name;
  ASSIGN_OR_RETURN(JobBoard::Submitted submitted,
                   board_.Submit(std::move(record), document, submitter.sees));
  std::string letter;  // of what failed before under this name
  {
    absl::MutexLock lock(&mu_);
    const auto there = jobs_.find(name);
    if (there != jobs_.end() && there->second.status.state == JobState::kDead) {
      letter = there->second.status.record.id;
    }
    removed_.erase(submitted.status.record.id);
    Update(submitted.status);
    Followed& one = jobs_[name];
    if (!submitted.existed && one.status.record.id == submitted.status.record.id) {
      one.place = std::move(submitter.place);
      one.still = std::move(submitter.still);
    }
  }
  if (!letter.empty()) {
    (void)board_.RemoveLetter(letter);  // it would be listed again once this one is there
  }
  if (!submitted.existed) {
    if (const absl::Status rung = doorbell_->Ring(); !rung.ok()) {
      spdlog::info("workers find the job of {} when they look next: {}", name,
                   std::string(rung.message()));
    }
  }
  return submitted;
}

std::optional<JobStatus> JobFollower::Find(const std::string& name) {
  const absl::Time asked = SteadyNow();
  for (int attempt = 0;; ++attempt) {
    {
      absl::MutexLock lock(&mu_);
      const auto found = jobs_.find(name);
      if (found != jobs_.end()) return found->second.status;
      if (attempt > 0) return std::nullopt;
    }
    // It may have been submitted elsewhere a moment ago.
    (void)LookSince(asked);
  }
}

std::vector<JobStatus> JobFollower::All() const {
  absl::MutexLock lock(&mu_);
  std::vector<JobStatus> all;
  for (const auto& [name, one] : jobs_) all.push_back(one.status);
  return all;
}

int64_t JobFollower::queued() const {
  absl::MutexLock lock(&mu_);
  int64_t queued = 0;
  for (const auto& [name, one] : jobs_) queued += one.status.state == JobState::kQueued ? 1 : 0;
  return queued;
}

std::vector<JobRecord> JobFollower::WithoutPlace() const {
  absl::MutexLock lock(&mu_);
  std::vector<JobRecord> records;
  for (const auto& [name, one] : jobs_) {
    if (!one.status.ended() && one.place == nullptr) records.push_back(one.status.record);
  }
  return records;
}

absl::StatusOr<JobStatus> JobFollower::Remove(const std::string& name, const std::string& reason) {
  const std::optional<JobStatus> found = Find(name);
  if (!found.has_value()) return NoJob(name);
  const std::string& id = found->record.id;
  JobStatus now = *found;
  if (!found->ended()) {
    ASSIGN_OR_RETURN(now, board_.Cancel(id, reason));
  } else if (found->state == JobState::kDead) {
    RETURN_IF_ERROR(board_.RemoveLetter(id));
  }
  absl::MutexLock lock(&mu_);
  removed_.insert(id);
  const auto there = jobs_.find(name);
  if (there == jobs_.end() || there->second.status.record.id != id) return now;
  Update(now);  // who watches is told
  jobs_.erase(there);
  return now;
}

absl::Status JobFollower::Watch(const std::string& name, JobWatcher watcher) {
  if (!Find(name).has_value()) return NoJob(name);
  absl::MutexLock lock(&mu_);
  const auto found = jobs_.find(name);
  if (found == jobs_.end()) return NoJob(name);
  Followed& one = found->second;
  if (watcher(one.status) && !one.status.ended()) one.watchers.push_back(std::move(watcher));
  return absl::OkStatus();
}

}  // namespace carrel::serving
