// What:   which of several servers of the same contexts is asked about one: by rendezvous hashing of its name
//         (common/routing.h), those last that failed a moment ago. No placement of ours: every client chooses alike,
//         and a server that lacks a context fetches it.
// Threads: any.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace carrel::library {

class ServerChoice {
 public:
  // For so long a server that failed comes last.
  static constexpr absl::Duration kAvoid = absl::Seconds(5);

  explicit ServerChoice(std::vector<std::string> servers) : servers_(std::move(servers)) {}

  // All of them, in the order in which they are to be tried.
  std::vector<std::string> For(const std::string& context) const;
  void Failed(const std::string& server);

 private:
  const std::vector<std::string> servers_;
  mutable absl::Mutex mu_;
  std::map<std::string, absl::Time> failed_ ABSL_GUARDED_BY(mu_);
};

}  // namespace carrel::library
