// What:   attention of the slices of a step on the CPU, layer by layer: each token to the rows that its
//         sequence holds and to the zone, merged. Slices with one batch_key lie side by side, and ask for
//         the zone in one question; the questions of all are on their way at once.
// Math:   out = merge(window attention, zone attention): sink, local and new rows are disjoint from the
//         zone, so with every zone row retrieved this is dense attention up to rounding (the master test,
//         tests/master_test.cc).
// Errors: a slice's own, in its status: what fails, or is not wanted any more, fails alone, and computes
//         zeros from there on. Where a question of several fails each asks alone.
// Ownership: keeps what members point to until the next Begin.
// Threads: one, and the pool's.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/thread_pool.h"
#include "decoder/runner/batch.h"
#include "decoder/runner/cpu_sequence.h"
#include "decoder/window/partial.h"
#include "model/transformer.h"

namespace carrel::decoder {

class BatchAttention final : public model::SequencesAttention {
 public:
  struct Member {
    CpuSequence* sequence = nullptr;
    const Slice* slice = nullptr;
    SliceResult* result = nullptr;

    absl::Status& status() const { return result->status; }
    int64_t tokens() const { return static_cast<int64_t>(slice->tokens.size()); }
  };

  BatchAttention(const AttentionShape& shape, ThreadPool* pool);

  // A step, whose blocks are these members', those with one key together.
  void Begin(absl::Span<const Member> members);
  absl::Status Attend(absl::Span<const model::AttentionInput> inputs, float* attended) override;
  // Whether any of them still goes on.
  bool goes_on() const;

 private:
  // Members that ask as one, and what they computed of the layer at hand.
  struct Group {
    size_t first = 0, count = 0;  // members
    int64_t tokens = 0;
    absl::Span<const model::AttentionInput> inputs;
    float* attended = nullptr;  // [tokens, q_heads, head_dim]
    absl::Status answered;
    LayerStatistics before;  // of the first member, before the question
    Partial window, zone;    // [tokens, q_heads]
  };
  struct Token {
    CpuSequence* sequence = nullptr;
    const model::AttentionInput* input = nullptr;
    int64_t at = 0;  // in the input
  };

  int64_t width() const { return int64_t{shape_.q_heads} * shape_.head_dim; }
  CpuSequence& FirstOf(const Group& group) const { return *members_[group.first].sequence; }
  bool GoesOn(const Group& group) const;
  void Start(Group& group);
  void Finish(Group& group);
  absl::Status AttendGroup(Group& group);
  // In units of one KV head of some tokens, which look at the rows of a context together.
  void AttendWindow(Group& group, absl::Span<const Token> tokens, int64_t together,
                    int64_t unit) const;
  // index, first: of the group's tokens.
  void AttendNewRows(Group& group, const Token& token, int64_t index, KvHead head) const;
  void AttendContextRows(Group& group, absl::Span<const Token> tokens, int64_t first,
                         KvHead head) const;
  // What was counted of the first member becomes everybody's.
  void ShareCounted(const Group& group) const;
  // What the zone gave to `count` members from `first` on, whose tokens begin at `at`, joins the window's.
  void Merge(Group& group, size_t first, size_t count, int64_t at) const;
  // Each asks for itself, of what the window has attended to already.
  void AskApart(Group& group);

  const AttentionShape shape_;
  ThreadPool* const pool_;
  std::vector<Member> members_;
  std::vector<Group> groups_;  // more than there are, of steps before
  size_t count_ = 0;
};

}  // namespace carrel::decoder
