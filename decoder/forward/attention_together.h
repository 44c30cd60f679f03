// What:   attention of a block each of several sequences, layer by layer. Those that go with each other
//         (SequenceAttention::GoesWith: of one context, asking in the same way) ask for the zone in one
//         question, and the questions of all such groups are on their way at once.
// Errors: a sequence's own, in its status: what fails, or is not wanted any more, fails alone, and computes
//         zeros from there on.
// Ownership: keeps what a member points to for as long as it lives.
// Threads: one, and the pool's.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/thread_pool.h"
#include "decoder/forward/sequence_attention.h"

namespace carrel::decoder {

class AttentionTogether final : public model::SequencesAttention {
 public:
  struct Member {
    SequenceAttention* attention = nullptr;
    int64_t tokens = 1;                             // of its block
    const std::function<bool()>* wanted = nullptr;  // as ForwardPass::set_wanted
    // Told of what was attended; may be empty.
    std::function<void(const model::AttentionInput&, const float* attended)> observer;
    absl::Status* status = nullptr;
  };
  // width: numbers of a token's attended. Groups are finished side by side on the pool's threads.
  AttentionTogether(std::vector<Member> members, int64_t width, ThreadPool* pool);

  absl::Status Attend(absl::Span<const model::AttentionInput> inputs, float* attended) override;

 private:
  const std::vector<Member> members_;
  const int64_t width_;
  ThreadPool* const pool_;
  std::vector<std::vector<size_t>> groups_;  // of members that go together
};

absl::Status NotWanted();

}  // namespace carrel::decoder
