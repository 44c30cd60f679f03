// What:   documents that are being made, by name: the waiting ones in the order of arrival, the watchers of each, and
//         the errors of those that failed, until they are removed.
// States: queued, prefilling, and then removed (ready, or cancelled) or failed. A name has one job.
// Threads: one at a time, under its owner's lock, but for what a job says otherwise.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/ids.h"
#include "serving/document.h"

namespace carrel::serving {

// False: has seen enough.
using DocumentWatcher = std::function<bool(const Document&)>;

struct DocumentJob {
  Document document;  // its name stays, and may be read by any thread
  // Set before it is added, and read by any thread; tokens are of the thread that prefills from then on.
  std::string digest;
  std::vector<TokenId> tokens;
  std::function<absl::Status()> still;  // whether its bringer still may; null: always
  bool waits = false;                   // in a file, too
  std::shared_ptr<void> place;          // in a quota
  std::vector<DocumentWatcher> watchers;
  std::atomic<bool> cancelled{false};
  bool published = false;  // of the thread that prefills

  bool failed() const { return document.state == DocumentState::kFailed; }
  // What a watcher throws is its own matter: it has seen enough.
  void Tell();
  void Fail(const absl::Status& error);
};

class DocumentJobs {
 public:
  using Job = std::shared_ptr<DocumentJob>;

  const std::map<std::string, Job>& all() const { return jobs_; }
  Job Find(const std::string& name) const;  // null: there is none
  // It waits, unless it has failed already. One of the same name goes.
  void Add(const Job& job);
  // The first that waits, which is prefilled from now on. Not if none waits.
  Job Next();
  void Remove(const std::string& name);
  int64_t waiting() const { return static_cast<int64_t>(queue_.size()); }
  // Of more than so many that failed the names of the others, which are removed.
  std::vector<std::string> DropFailures(size_t most);

 private:
  std::map<std::string, Job> jobs_;
  std::deque<Job> queue_;
};

}  // namespace carrel::serving
