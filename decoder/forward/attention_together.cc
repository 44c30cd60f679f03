#include "decoder/forward/attention_together.h"

#include <algorithm>
#include <utility>

namespace carrel::decoder {

absl::Status NotWanted() { return absl::CancelledError("nobody wants the answer any more"); }

AttentionTogether::AttentionTogether(std::vector<Member> members, int64_t width, ThreadPool* pool)
    : members_(std::move(members)), width_(width), pool_(pool) {
  for (size_t i = 0; i < members_.size(); ++i) {
    const auto group = std::find_if(groups_.begin(), groups_.end(), [&](const auto& one) {
      const SequenceAttention& first = *members_[one.front()].attention;
      return static_cast<int64_t>(one.size()) < first.most_together() &&
             first.GoesWith(*members_[i].attention);
    });
    if (group == groups_.end()) {
      groups_.push_back({i});
    } else {
      group->push_back(i);
    }
  }
}

absl::Status AttentionTogether::Attend(absl::Span<const model::AttentionInput> inputs,
                                       float* attended) {
  for (const Member& one : members_) {
    if (one.status->ok() && *one.wanted && !(*one.wanted)()) *one.status = NotWanted();
  }
  std::vector<std::vector<SequenceToken>> questions;
  for (const std::vector<size_t>& group : groups_) {
    std::vector<SequenceToken> tokens;
    for (const size_t i : group) {
      if (!members_[i].status->ok()) continue;
      tokens.push_back({members_[i].attention, inputs[i],
                        attended + static_cast<int64_t>(i) * width_, members_[i].status});
    }
    if (!tokens.empty()) questions.push_back(std::move(tokens));
  }
  for (const auto& tokens : questions) tokens[0].attention->StartTogether(tokens);
  // Side by side: a thread that has a question of its own waits for nobody within it.
  pool_->ParallelFor(static_cast<int64_t>(questions.size()), [&](int64_t i) {
    const std::vector<SequenceToken>& tokens = questions[static_cast<size_t>(i)];
    tokens[0].attention->FinishTogether(tokens);
  });
  for (size_t i = 0; i < members_.size(); ++i) {
    float* const out = attended + static_cast<int64_t>(i) * width_;
    if (!members_[i].status->ok()) {
      std::fill_n(out, width_, 0.0f);
    } else if (members_[i].observer) {
      members_[i].observer(inputs[i], out);
    }
  }
  return absl::OkStatus();
}

}  // namespace carrel::decoder
