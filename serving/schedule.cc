#include "serving/schedule.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "common/status.h"

namespace carrel::serving {

Schedule::Schedule(const ScheduleLimits& limits)
    : waiting_({.places = limits.places,
                .waiting = limits.waiting,
                .of_one_turn = limits.waiting_of_turn,
                .what = "answers"}),
      shares_(limits.prompt_tokens) {}

absl::Status Schedule::Submit(RequestId id, Turn turn, std::string context) {
  if (stopping_) return absl::UnavailableError("the server is stopping");
  return waiting_.Push({.id = id, .turn = std::move(turn), .context = std::move(context)});
}

Schedule::Request& Schedule::Admitted(RequestId id) {
  const auto found = admitted_.find(id);
  CARREL_CHECK(found != admitted_.end());
  return found->second;
}

Plan Schedule::NextStep(absl::FunctionRef<Progress(RequestId)> progress) {
  Plan plan;
  for (const auto& [id, request] : admitted_) {
    if (request.state == State::kOver) plan.end.push_back(id);
  }
  if (stopping_) return plan;
  while (!no_room_) {
    std::optional<Request> next = waiting_.Take();
    if (!next.has_value()) break;
    const RequestId id = next->id;
    plan.open.push_back(id);
    admitted_.emplace(id, *std::move(next));
  }
  if (plan.empty()) plan.step = ChooseStep(progress);
  return plan;
}

std::vector<RequestId> Schedule::ChooseStep(absl::FunctionRef<Progress(RequestId)> progress) {
  std::vector<StepPlan::Waiting> wanted;
  for (const RequestId id : running_) {
    const Progress one = progress(id);
    wanted.push_back({Admitted(id).turn.get(), one.tokens, one.prompt});
  }
  std::vector<RequestId> step, rest;
  for (const size_t i : shares_.Next(wanted)) step.push_back(running_[i]);
  for (const RequestId id : running_) {
    if (std::find(step.begin(), step.end(), id) == step.end()) rest.push_back(id);
  }
  running_ = std::move(rest);
  running_.insert(running_.end(), step.begin(), step.end());
  return step;
}

void Schedule::Opened(RequestId id) {
  Request& request = Admitted(id);
  CARREL_CHECK(request.state == State::kOpening);
  request.state = stopping_ ? State::kOver : State::kRunning;
  if (!stopping_) running_.push_back(id);
}

void Schedule::OpenFailed(RequestId id) { Admitted(id).state = State::kOver; }

bool Schedule::NoRoom(RequestId id) {
  if (stopping_ || admitted_.size() == 1) {
    OpenFailed(id);
    return false;
  }
  no_room_ = true;
  waiting_.PutBack(std::move(Admitted(id)));
  admitted_.erase(id);
  return true;
}

void Schedule::Ended(RequestId id) {
  const Request& request = Admitted(id);
  CARREL_CHECK(request.state != State::kOpening);
  if (request.has_place) waiting_.GiveBack(request.turn);
  std::erase(running_, id);
  admitted_.erase(id);
  no_room_ = false;
}

void Schedule::Stop() {
  stopping_ = true;
  for (const RequestId id : running_) Admitted(id).state = State::kOver;
  running_.clear();
  for (Request& request : waiting_.TakeAll()) {
    request.state = State::kOver;
    request.has_place = false;
    admitted_.emplace(request.id, std::move(request));
  }
}

bool Schedule::Reads(const std::string& context) const {
  const auto reads = [&](const Request& request) { return request.context == context; };
  return std::any_of(waiting_.waiting().begin(), waiting_.waiting().end(), reads) ||
         std::any_of(admitted_.begin(), admitted_.end(),
                     [&](const auto& entry) { return reads(entry.second); });
}

}  // namespace carrel::serving
