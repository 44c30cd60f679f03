#include "serving/step_plan.h"

#include <algorithm>
#include <numeric>

namespace carrel::serving {

std::vector<size_t> StepPlan::Next(absl::Span<const Waiting> waiting) {
  std::map<const void*, std::vector<size_t>> turns;
  std::map<const void*, int64_t> wanted;
  for (size_t i = 0; i < waiting.size(); ++i) {
    turns[waiting[i].turn].push_back(i);
    wanted[waiting[i].turn] += waiting[i].tokens;
  }
  // Who has nothing on its way neither saves nor owes.
  for (auto it = balance_.begin(); it != balance_.end();) {
    it = turns.count(it->first) > 0 ? std::next(it) : balance_.erase(it);
  }
  int64_t smallest = 0;
  for (const auto& [turn, tokens] : wanted) {
    smallest = smallest == 0 ? tokens : std::min(smallest, tokens);
  }
  const bool alone = turns.size() <= 1;
  const double given = alone ? 0
                             : static_cast<double>(smallest) +
                                   fixed_tokens() / static_cast<double>(turns.size() - 1);

  std::vector<const void*> order;  // who was given most and used least is first
  for (const auto& [turn, answers] : turns) {
    balance_[turn] = alone ? 0 : std::min(balance_[turn] + given, given);
    order.push_back(turn);
  }
  std::stable_sort(order.begin(), order.end(), [&](const void* a, const void* b) {
    return std::pair(-balance_[a], wanted[a]) < std::pair(-balance_[b], wanted[b]);
  });

  std::vector<size_t> chosen;
  int64_t prompt_tokens = 0;
  const auto take = [&](const void* turn, size_t i) {
    const Waiting& one = waiting[i];
    if (one.prompt) {
      if (prompt_tokens > 0 && prompt_tokens + one.tokens > prompt_tokens_) return;
      prompt_tokens += one.tokens;
    }
    if (!alone) balance_[turn] -= static_cast<double>(one.tokens);
    chosen.push_back(i);
  };
  for (const void* turn : order) {
    for (size_t i : turns[turn]) {
      if (!alone && balance_[turn] <= 0) break;
      take(turn, i);
    }
  }
  // All owe: who owes least goes on.
  if (chosen.empty() && !waiting.empty()) take(order.front(), turns[order.front()].front());
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

void StepPlan::Took(int64_t tokens, absl::Duration took) {
  const auto n = static_cast<double>(tokens);
  const double seconds = absl::ToDoubleSeconds(took);
  for (double* sum : {&weight_, &tokens_, &squares_, &seconds_, &products_}) *sum *= kForget;
  weight_ += 1;
  tokens_ += n;
  squares_ += n * n;
  seconds_ += seconds;
  products_ += n * seconds;
}

double StepPlan::fixed_tokens() const {
  const double spread = weight_ * squares_ - tokens_ * tokens_;
  if (spread <= 1e-9 * weight_ * squares_) return 0;  // steps of one size say nothing of it
  const double slope = (weight_ * products_ - tokens_ * seconds_) / spread;
  const double fixed = (seconds_ - slope * tokens_) / weight_;
  if (fixed <= 0) return 0;
  return slope <= fixed / kMostFixedTokens ? kMostFixedTokens : fixed / slope;
}

}  // namespace carrel::serving
