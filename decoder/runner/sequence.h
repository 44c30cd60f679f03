// What:   everything of one conversation behind one document, and nothing else: its tokens, the rows that
//         they left, and how they attend. A runner takes it on.
// Errors: Restore: DataLoss rows of another shape; the sequence is empty then.
// Ownership: as OpenedContext. Holds its runner.
// Threads: one.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "decoder/sources/attended_rows.h"
#include "decoder/statistics.h"
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

}  // namespace carrel::decoder
