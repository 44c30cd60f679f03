// What:   a queue for a few places, by turns: answers wait for a place among the running ones, requests for a
//         thread. A turn is a tenant or a key (kvstore::Principal::turn), as in step_plan.h; null: no turn.
// Rule:   the turn with the fewest places goes first; of equal ones, the turn that was served longest ago; within a
//         turn, first come, first served. A quarter more places are reserved for turns that have none, so that one turn
//         cannot keep the others out. So turns share places, and the time in them, equally, however long their entries
//         take. The number of waiting entries is bounded, in all and per turn.
// Errors: ResourceExhausted as many wait as may, in all or of one turn.
// Cost:   a pass over what waits.
// Threads: one at a time.
// Example: TurnQueue<Job> queue({.places = 4});           // a Job has a member `Turn turn`
//          RETURN_IF_ERROR(queue.Push(std::move(job)));
//          while (auto next = queue.Take()) ...;          // and GiveBack(next->turn) once it is over
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace carrel::serving {

using Turn = std::shared_ptr<const void>;

struct TurnQueueConfig {
  int64_t places = 1;           // 1 ..
  int64_t waiting = INT64_MAX;  // at most
  int64_t of_one_turn =
      INT64_MAX;  // of these, of one turn; entries without a turn are not bounded so
  absl::string_view what = "tasks";  // for messages; outlives the queue
};

// Which turns have places, and when each was last given one.
class TurnPlaces {
 public:
  explicit TurnPlaces(int64_t places) : places_(places), reserve_((places + 3) / 4) {}

  int64_t most() const { return places_ + reserve_; }
  int64_t taken() const { return taken_; }
  bool HasPlaceFor(const void* turn) const {
    return taken_ < places_ + (turn != nullptr && Of(turn) == 0 ? reserve_ : 0);
  }
  // Of two turns, the lower goes first.
  std::pair<int64_t, int64_t> Rank(const void* turn) const {
    const auto given = given_.find(turn);
    return {Of(turn), given == given_.end() ? 0 : given->second};
  }
  void Take(const void* turn) {
    if (given_.size() >= kMostTurns) given_.clear();
    given_[turn] = ++times_;
    ++running_[turn];
    ++taken_;
  }
  void GiveBack(const void* turn) {
    --taken_;
    if (const auto found = running_.find(turn); --found->second == 0) running_.erase(found);
  }

 private:
  static constexpr size_t kMostTurns = 4096;  // that are remembered; keys come and go

  int64_t Of(const void* turn) const {
    const auto found = running_.find(turn);
    return found == running_.end() ? 0 : found->second;
  }

  const int64_t places_, reserve_;
  int64_t taken_ = 0, times_ = 0;
  std::map<const void*, int64_t> running_, given_;
};

template <class Job>
class TurnQueue {
 public:
  explicit TurnQueue(TurnQueueConfig config) : config_(config), places_(config.places) {}

  absl::Status Push(Job job) {
    if (size() >= config_.waiting) return Full(size(), "");
    const int64_t mine = job.turn == nullptr ? 0 : CountOf(job.turn.get());
    if (mine >= config_.of_one_turn) return Full(mine, " of the same key or tenant");
    PushAnyway(std::move(job));
    return absl::OkStatus();
  }
  // One that was accepted already: it is bounded by what that was.
  void PushAnyway(Job job) { jobs_.push_back(std::move(job)); }

  // The next one, which has a place from now on; none: nobody waits, or has a place.
  std::optional<Job> Take() {
    auto best = jobs_.end();
    std::pair<int64_t, int64_t> best_rank;
    std::set<const void*> seen;  // the first of each turn stands for it
    for (auto job = jobs_.begin(); job != jobs_.end(); ++job) {
      const void* const turn = job->turn.get();
      if (!seen.insert(turn).second || !places_.HasPlaceFor(turn)) continue;
      const auto rank = places_.Rank(turn);
      if (best == jobs_.end() || rank < best_rank) {
        best = job;
        best_rank = rank;
      }
    }
    if (best == jobs_.end()) return std::nullopt;
    places_.Take(best->turn.get());
    std::optional<Job> next(std::move(*best));
    jobs_.erase(best);
    return next;
  }
  void GiveBack(const Turn& turn) { places_.GiveBack(turn.get()); }
  // It has its place no more, and waits again where it stood: before those that came after it (Job::id).
  void PutBack(Job job) {
    places_.GiveBack(job.turn.get());
    const auto after = std::find_if(jobs_.begin(), jobs_.end(),
                                    [&](const Job& other) { return other.id > job.id; });
    jobs_.insert(after, std::move(job));
  }

  int64_t size() const { return static_cast<int64_t>(jobs_.size()); }  // that wait
  int64_t most_places() const { return places_.most(); }               // those in reserve, too
  const std::deque<Job>& waiting() const { return jobs_; }
  std::deque<Job> TakeAll() { return std::exchange(jobs_, {}); }  // without places

 private:
  int64_t CountOf(const void* turn) const {
    return std::count_if(jobs_.begin(), jobs_.end(),
                         [&](const Job& job) { return job.turn.get() == turn; });
  }
  absl::Status Full(int64_t count, absl::string_view whose) const {
    return absl::ResourceExhaustedError(
        absl::StrCat(count, " ", config_.what, whose, " wait already; ", "come again later"));
  }

  const TurnQueueConfig config_;
  TurnPlaces places_;
  std::deque<Job> jobs_;
};

}  // namespace carrel::serving
