#include "serving/step_plan.h"

#include <algorithm>
#include <tuple>

namespace carrel::serving {

std::vector<size_t> StepPlan::Next(absl::Span<const Waiting> waiting) {
  std::map<const void*, std::vector<size_t>> turns;
  std::map<const void*, int64_t> wanted;
  for (size_t i = 0; i < waiting.size(); ++i) {
    turns[waiting[i].turn].push_back(i);
    wanted[waiting[i].turn] += waiting[i].tokens;
  }
  // Who has nothing on its way neither saves nor owes.
  std::erase_if(shares_, [&](const auto& entry) { return turns.count(entry.first) == 0; });
  int64_t smallest = 0;
  for (const auto& [turn, tokens] : wanted) {
    smallest = smallest == 0 ? tokens : std::min(smallest, tokens);
  }
  const bool alone = turns.size() <= 1;
  const double given = alone ? 0
                             : static_cast<double>(smallest) +
                                   fixed_tokens() / static_cast<double>(turns.size() - 1);

  // Whose block had no room for longest is first; then who was given most and used least.
  std::vector<const void*> order;
  for (const auto& [turn, answers] : turns) {
    double& balance = shares_[turn].balance;
    balance = alone ? 0 : std::min(balance + given, given);
    order.push_back(turn);
  }
  const auto place = [&](const void* turn) {
    const Share& share = shares_[turn];
    return std::tuple(-share.crowded, -share.balance, wanted[turn]);
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](const void* a, const void* b) { return place(a) < place(b); });

  std::vector<size_t> chosen;
  int64_t prompt_tokens = 0;
  const auto take = [&](Share& share, size_t i) {
    const Waiting& one = waiting[i];
    if (one.prompt) {
      if (prompt_tokens > 0 && prompt_tokens + one.tokens > prompt_tokens_) return false;
      prompt_tokens += one.tokens;
    }
    if (!alone) share.balance -= static_cast<double>(one.tokens);
    chosen.push_back(i);
    return true;
  };
  for (const void* turn : order) {
    Share& share = shares_[turn];
    bool read = false, crowded = false;
    for (size_t i : turns[turn]) {
      if (!alone && share.balance <= 0) break;
      if (crowded && !read && waiting[i].prompt) continue;  // no shorter one passes the first
      const bool taken = take(share, i);
      read |= taken && waiting[i].prompt;
      crowded |= !taken;
    }
    if (read || alone) share.crowded = 0;
    if (crowded && !read) ++share.crowded;
  }
  // All owe: who owes least goes on.
  if (chosen.empty() && !waiting.empty()) {
    take(shares_[order.front()], turns[order.front()].front());
  }
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
