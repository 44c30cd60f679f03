#include "serving/document_jobs.h"

#include "absl/status/statusor.h"
#include "common/status.h"
#include "common/thrown.h"

namespace carrel::serving {

void DocumentJob::Tell() {
  std::erase_if(watchers, [&](const DocumentWatcher& watcher) {
    const auto more =
        CatchThrown("a watcher", [&]() -> absl::StatusOr<bool> { return watcher(document); });
    return !more.value_or(false);
  });
}

void DocumentJob::Fail(const absl::Status& error) {
  document.state = DocumentState::kFailed;
  document.error = error;
  Tell();
  watchers.clear();
}

DocumentJobs::Job DocumentJobs::Find(const std::string& name) const {
  const auto found = jobs_.find(name);
  return found == jobs_.end() ? nullptr : found->second;
}

void DocumentJobs::Add(const Job& job) {
  Remove(job->document.name);
  jobs_[job->document.name] = job;
  if (!job->failed()) queue_.push_back(job);
}

DocumentJobs::Job DocumentJobs::Next() {
  CARREL_CHECK(!queue_.empty());
  Job job = queue_.front();
  queue_.pop_front();
  job->document.state = DocumentState::kPrefilling;
  return job;
}

void DocumentJobs::Remove(const std::string& name) {
  const auto found = jobs_.find(name);
  if (found == jobs_.end()) return;
  std::erase(queue_, found->second);
  jobs_.erase(found);
}

std::vector<std::string> DocumentJobs::DropFailures(size_t most) {
  size_t failed = 0;
  std::vector<std::string> dropped;
  for (const auto& [name, job] : jobs_) {
    if (job->failed() && ++failed > most) dropped.push_back(name);
  }
  for (const std::string& name : dropped) jobs_.erase(name);
  return dropped;
}

}  // namespace carrel::serving
