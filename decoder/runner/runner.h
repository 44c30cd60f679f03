// What:   the part of decoding that depends on the device: takes slices through every layer of the model,
//         with each sequence's window here and its zone wherever it lives. A runner owns what a step needs
//         (backend, activations, streams), once for all sequences over a checkpoint on a device.
//         A step: the next tokens of each of some sequences, and what comes of them. One sequence is the
//         case of one slice. A prompt is tokens that are not computed yet.
// Shapes: logits [vocab_size] f32 of a token, in this host's memory.
// Bits:   batch-invariant: a slice gets beside others the bits that it gets alone. A step is cut where the
//         backend could not hold to that.
// Errors: Step, of each slice: InvalidArgument a token outside the vocabulary; ResourceExhausted more new
//         tokens than a GPU's window has room for; Cancelled nobody wants it any more; what the store and
//         the device say. Opening: Unavailable no such device, FailedPrecondition a build without CUDA,
//         Unimplemented a shape that the device's kernels do not run, ResourceExhausted memory.
// Ownership: sequences share their runner; it goes with the last. The checkpoint and the pool outlive them.
//         A step keeps nothing: who steps owns the sequences, the tokens and where logits go.
// Threads: any, with sequences of its own each. On a GPU one step at a time; others wait.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "decoder/sources/attended_rows.h"
#include "decoder/statistics.h"
#include "decoder/zone/zone_attention.h"
#include "model/checkpoint.h"
#include "model/transformer.h"

namespace carrel::decoder {

class CpuSequence;
class CudaSequence;
class Runner;

// What was computed behind a document: tokens, and their K and V as they were computed.
struct SavedSequence {
  int64_t given_up = 0;  // of the document's last tokens
  std::vector<TokenId> tokens;
  std::vector<float> rows;
};

// Sees every layer's input and attended output. Tests.
using Observer = std::function<void(const model::AttentionInput&, const float* attended)>;

// Everything of one conversation behind one document, and nothing else: its tokens, the rows that they left, and how they
// attend. A runner takes it on, which it holds. One thread.
class Sequence {
 public:
  explicit Sequence(Position context_tokens) : context_tokens_(context_tokens) {}
  virtual ~Sequence() = default;

  virtual Runner& runner() = 0;
  // Of the runner of that device; null: it is another's.
  virtual CpuSequence* on_cpu() { return nullptr; }
  virtual CudaSequence* on_cuda() { return nullptr; }

  virtual int64_t max_tokens() const { return INT64_MAX; }  // of a slice
  // Behind the document, whose rows are held.
  const std::vector<TokenId>& tokens() const { return tokens_; }
  // Tokens of the document that it does without.
  int64_t given_up() const { return given_up_; }
  // Where the next token stands.
  Position end() const {
    return context_tokens_ - given_up_ + static_cast<int64_t>(tokens_.size());
  }

  // Forgets what the prompt does not begin with, or everything unless `resume`, and gives how many tokens
  // of the prompt are held; its last one never is. A sequence that cannot go on, or gave up another number
  // of the document's last tokens, begins anew.
  int64_t Sync(absl::Span<const TokenId> prompt, bool resume, int64_t give_up);
  // To resume this sequence later. Without tokens if its rows cannot be exported (a GPU, positions given
  // by attention).
  SavedSequence Save() const;
  // DataLoss rows of another shape; the sequence is empty then.
  absl::Status Restore(SavedSequence saved);
  // A runner's: these tokens have passed all layers.
  void Took(absl::Span<const TokenId> tokens) {
    tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
  }

  // Asked while a step goes on, as often as the device allows; false: the slice is Cancelled. null: it is
  // wanted.
  void set_wanted(std::function<bool()> wanted) { wanted_ = std::move(wanted); }
  absl::Status CheckWanted() const;

  virtual Statistics statistics() const = 0;
  // What it attends from now on is added to the trace, which outlives that; null: no longer.
  virtual absl::Status set_trace(QueryTrace* trace);
  // Of the document's rows that are held here.
  virtual void AttendedHere(const QueryTrace&, Layer, std::vector<AttendedRow>&) const {}
  // On the CPU.
  void set_observer(Observer observer) { observer_ = std::move(observer); }
  const Observer& observer() const { return observer_; }

 protected:
  // Forgets everything since the context: the next token continues the document again, but for its last
  // `give_up` tokens (MostGivenUp), whose rows nobody attends to until the next such call. Statistics
  // stay.
  virtual void Start(int64_t give_up) = 0;
  // Forgets all but the first `tokens` since the context. False: it cannot, and nothing changed.
  virtual bool Keep(int64_t) { return false; }
  // As Window's; empty and false where rows are not kept so.
  virtual std::vector<float> CopyRows(int64_t) const { return {}; }
  virtual bool RestoreRows(const std::vector<float>&, int64_t) { return false; }

 private:
  const Position context_tokens_;
  std::vector<TokenId> tokens_;
  int64_t given_up_ = 0;
  std::function<bool()> wanted_;
  Observer observer_;
};

// A sequence occurs once in a step.
struct Slice {
  Sequence* sequence = nullptr;
  absl::Span<const TokenId> tokens;  // 1 to sequence->max_tokens(); they follow what it has
  bool of_prompt = false;            // or tokens that were generated
  bool wants_next = true;            // what follows the last token
  float* next_logits = nullptr;      // of the last token; null: the likeliest token is enough
  float* all_logits = nullptr;       // [tokens]; null: they are not wanted
};

struct SliceResult {
  absl::Status status;  // a slice fails alone
  // The likeliest token, where wants_next and next_logits is null; Internal a logit is NaN.
  absl::StatusOr<TokenId> next = TokenId{-1};
};

class Runner {
 public:
  virtual ~Runner() = default;
  // Of each slice, whose sequences this runner opened, its result.
  virtual std::vector<SliceResult> Step(absl::Span<const Slice> batch) = 0;
};

// A step in parts: as many of the slices of `order` together as have at most so many tokens; what has more is
// a part of its own. Those of few tokens come first, those of as many in order: answers stay together whatever
// prompts there are, and the same answers are the same part in the next step.
std::vector<std::vector<size_t>> PartsOf(absl::Span<const Slice> batch,
                                         absl::Span<const size_t> order, int64_t most);

// Names what a runner computes with: checkpoints with one key are one model with the same weights and adapter in
// memory, which somebody holds, so that their sequences may share a runner.
std::string RunnerKey(const model::Checkpoint& checkpoint);

// Both fetch sink and local rows before they return. context.rows: where NeedsHostRows, and what a GPU's
// host zone copies, or null.
absl::StatusOr<std::unique_ptr<Sequence>> OpenCpuSequence(const model::Checkpoint& checkpoint,
                                                          const OpenedContext& context);
absl::StatusOr<std::unique_ptr<Sequence>> OpenCudaSequence(const model::Checkpoint& checkpoint,
                                                           const OpenedContext& context);
// With rope=infinitehip, by lab/positions: Unimplemented a shape or stages that the kernels do not run, named.
absl::StatusOr<std::unique_ptr<Sequence>> OpenCudaRepositioned(const model::Checkpoint& checkpoint,
                                                               const OpenedContext& context);

}  // namespace carrel::decoder
