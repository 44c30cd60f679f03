// What:   which of the running answers take part in the next step, so that a client with few answers does not wait
//         for a client with many. A turn is a tenant or a key (kvstore::Principal::turn), as in turn_queue.h.
// Rule:   a turn that is alone takes all its answers in each step. Beside others, each turn gets the same number of
//         tokens per step: as many as the smallest turn wants, and as many more as the fixed part of a step is worth. So
//         the smallest turn's step takes about twice its time alone at most (with T turns: T times); where reading the
//         weights is most of a step, no turn is held back. A block of a prompt is not divided: tokens beyond the turn's
//         share are owed in the next steps. A block that found no room goes first in the next step. Deficit round robin
//         (Shreedhar and Varghese, SIGCOMM 1995, section 3), with debts in place of savings.
// Cost:   a pass over the answers per step.
// Threads: one at a time.
// Example: StepPlan plan(32);
//          for (size_t i : plan.Next(waiting)) ...;   // a step of these
//          plan.Took(tokens, SteadyNow() - start);
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"

namespace carrel::serving {

class StepPlan {
 public:
  struct Waiting {
    const void* turn = nullptr;
    int64_t tokens = 1;   // that it goes on by: a block of its prompt, or one
    bool prompt = false;  // it reads its prompt
  };
  // prompt_tokens: of blocks of several prompts in a step, at most; the first block is taken whatever its length.
  explicit StepPlan(int64_t prompt_tokens) : prompt_tokens_(prompt_tokens) {}

  // Indices of those that go on, of answers in the order in which they went on last, the longest ago first. Not
  // empty unless waiting is.
  std::vector<size_t> Next(absl::Span<const Waiting> waiting);
  // How long a step of so many tokens took: how much of it is fixed is learnt from this.
  void Took(int64_t tokens, absl::Duration took);
  // What the fixed part of a step is worth, in tokens; 0 ..
  double fixed_tokens() const;

 private:
  static constexpr double kForget = 0.98;         // of what older steps weigh, a step
  static constexpr double kMostFixedTokens = 64;  // of a device that is far from busy

  const int64_t prompt_tokens_;
  // Of a turn on its way.
  struct Share {
    double balance = 0;   // tokens that it was given, and did not use or owes
    int64_t crowded = 0;  // steps since which a block of it had no room beside the blocks of others
  };
  std::map<const void*, Share> shares_;
  // Weighted sums over past steps, of the line seconds = fixed + tokens * slope.
  double weight_ = 0, tokens_ = 0, squares_ = 0, seconds_ = 0, products_ = 0;
};

}  // namespace carrel::serving
