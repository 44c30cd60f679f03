// What:   what a scheduler does next, as data: which requests get a place and are to be opened, which take part in the
//         next step, and which are over. Of a request it knows the id, the turn and the context only: there is no
//         clock, model or lock here. Times and tokens are arguments.
// States: waiting (by turns: turn_queue.h), opening (a decoder is opened for it), running (it takes part in steps:
//         step_plan.h), over (to be ended), and then unknown (Ended). A request that finds no room while others have
//         places waits again where it stood, and no request is admitted until one of those has ended.
// Rule:   requests that are over end first; then every request that gets a place is opened; then the running ones take
//         a step. A request that is opened at once takes part in that step.
// Errors: Submit: ResourceExhausted, as turn_queue.h; Unavailable after Stop.
// Cost:   a pass over what waits and runs per step.
// Threads: one at a time.
// Example: Schedule schedule({.places = 16});
//          RETURN_IF_ERROR(schedule.Submit(1, turn, "novel"));
//          Plan plan = schedule.NextStep(progress);       // plan.open is {1}
//          schedule.Opened(1);                            // once there is a decoder
//          plan = schedule.NextStep(progress);            // plan.step is {1}
//          schedule.Ended(1);                             // it has its answer
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "serving/step_plan.h"
#include "serving/turn_queue.h"

namespace carrel::serving {

using RequestId = int64_t;  // in the order in which they came

struct ScheduleLimits {
  int64_t places = 16;  // requests that are not waiting; 1 .., and a quarter more (turn_queue.h)
  int64_t waiting = INT64_MAX;          // one more is refused
  int64_t waiting_of_turn = INT64_MAX;  // of these, of one turn
  int64_t prompt_tokens = 0;            // as step_plan.h
};

struct Plan {
  std::vector<RequestId>
      open;  // have a place now; each is to be followed by Opened, OpenFailed or NoRoom
  std::vector<RequestId> step;  // take the next step together; empty where others open or end first
  std::vector<RequestId> end;   // are over; each is to be followed by Ended
  bool empty() const { return open.empty() && step.empty() && end.empty(); }
};

class Schedule {
 public:
  // What a running request goes on by.
  struct Progress {
    int64_t tokens = 1;
    bool prompt = false;  // a block of its prompt
  };

  explicit Schedule(const ScheduleLimits& limits);

  absl::Status Submit(RequestId id, Turn turn, std::string context);
  // Plans what is to be done now. progress says what each running request would go on by.
  Plan NextStep(absl::FunctionRef<Progress(RequestId)> progress);
  // The last step read so many tokens, and took so long.
  void Took(int64_t tokens, absl::Duration took) { shares_.Took(tokens, took); }

  // How an opening ended. NoRoom returns whether the request waits again; where nobody else has a place, nothing would
  // become free, and the request is over.
  void Opened(RequestId id);
  void OpenFailed(RequestId id);
  bool NoRoom(RequestId id);
  // The request is forgotten, and its place is free. It must not be opening.
  void Ended(RequestId id);
  // Every request is over from now on; one that is opening, once that has ended.
  void Stop();

  // Whether a request that has not ended reads the context, or waits to.
  bool Reads(const std::string& context) const;
  int64_t waiting() const { return waiting_.size(); }
  // Requests that open, run or are over.
  int64_t admitted() const { return static_cast<int64_t>(admitted_.size()); }
  bool empty() const { return waiting_.size() == 0 && admitted_.empty(); }

 private:
  enum class State : uint8_t { kOpening, kRunning, kOver };
  struct Request {
    RequestId id = 0;
    Turn turn;
    std::string context;
    State state = State::kOpening;
    bool has_place = true;
  };

  Request& Admitted(RequestId id);
  std::vector<RequestId> ChooseStep(absl::FunctionRef<Progress(RequestId)> progress);

  TurnQueue<Request> waiting_;
  StepPlan shares_;
  std::map<RequestId, Request> admitted_;
  std::vector<RequestId> running_;  // the one stepped longest ago is first
  bool no_room_ = false;            // for one more, until one of these ends
  bool stopping_ = false;
};

}  // namespace carrel::serving
