#include "decoder/forward/attention_together.h"

#include <algorithm>
#include <utility>

namespace carrel::decoder {

absl::Status NotWanted() { return absl::CancelledError("nobody wants the answer any more"); }

AttentionTogether::AttentionTogether(std::vector<Member> members, int64_t width, ThreadPool* pool)
    : members_(std::move(members)), width_(width), pool_(pool) {
  std::vector<int64_t> tokens;  // of each group
  for (size_t i = 0; i < members_.size(); ++i) {
    size_t group = 0;
    for (; group < groups_.size(); ++group) {
      const SequenceAttention& first = *members_[groups_[group].front()].attention;
      if (tokens[group] + members_[i].tokens <= first.most_together() &&
          first.GoesWith(*members_[i].attention)) {
        break;
      }
    }
    if (group == groups_.size()) {
      groups_.emplace_back();
      tokens.push_back(0);
    }
    groups_[group].push_back(i);
    tokens[group] += members_[i].tokens;
  }
}

absl::Status AttentionTogether::Attend(absl::Span<const model::AttentionInput> inputs,
                                       float* attended) {
  std::vector<float*> to;
  for (size_t i = 0; i < members_.size(); ++i) {
    const Member& one = members_[i];
    if (one.status->ok() && *one.wanted && !(*one.wanted)()) *one.status = NotWanted();
    to.push_back(attended);
    attended += inputs[i].n * width_;
  }
  std::vector<std::vector<SequenceBlock>> questions;
  for (const std::vector<size_t>& group : groups_) {
    std::vector<SequenceBlock> blocks;
    for (const size_t i : group) {
      if (!members_[i].status->ok()) continue;
      blocks.push_back({members_[i].attention, inputs[i], to[i], members_[i].status});
    }
    if (!blocks.empty()) questions.push_back(std::move(blocks));
  }
  pool_->ParallelFor(static_cast<int64_t>(questions.size()), [&](int64_t i) {
    const std::vector<SequenceBlock>& blocks = questions[static_cast<size_t>(i)];
    blocks[0].attention->StartTogether(blocks);
  });
  // Side by side: a thread that has a question of its own waits for nobody within it, and helps with the
  // last ones.
  pool_->ParallelForOfLoops(static_cast<int64_t>(questions.size()), [&](int64_t i) {
    const std::vector<SequenceBlock>& blocks = questions[static_cast<size_t>(i)];
    blocks[0].attention->FinishTogether(blocks);
  });
  for (size_t i = 0; i < members_.size(); ++i) {
    if (!members_[i].status->ok()) {
      std::fill_n(to[i], inputs[i].n * width_, 0.0f);
    } else if (members_[i].observer) {
      members_[i].observer(inputs[i], to[i]);
    }
  }
  return absl::OkStatus();
}

}  // namespace carrel::decoder
