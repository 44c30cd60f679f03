// What:   one decoding sequence over a context: prompt in, tokens out.
// Errors: FailedPrecondition the context was computed by another model (names every differing
//         field); NotFound no such context; Unavailable no store; InvalidArgument a config, prompt
//         or token id out of bounds, a sequence longer than max_position_embeddings; what the store
//         answers.
// Ownership: checkpoint and pool outlive it, and are shared; it owns its client, and its share of
//         host_rows.
// Threads: one at a time. Many decoders share one Weights and one ThreadPool.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "common/thread_pool.h"
#include "decoder/config.h"
#include "decoder/plan/plan.h"
#include "decoder/runner/runner.h"
#include "decoder/sampler.h"
#include "decoder/statistics.h"
#include "model/checkpoint.h"
#include "model/transformer.h"
#include "retrieval/session.h"

namespace carrel::decoder {

struct GenerateOptions {
  int64_t max_tokens = 64;  // >= 0
  // Its repetition_penalty counts the tokens of `history`, of the prompt and of the answer; a document's
  // are text to speak about, and are not counted.
  SamplingConfig sampling;
  std::vector<TokenId>
      history;               // what a caller took from the prompt's front: rows are there already
  bool keep_logits = false;  // of every prompt and generated position
  // So many of the document's last tokens are not part of the sequence, since the prompt says them in
  // another way (model/tokenizer/seam.h); at most most_given_up().
  int64_t give_up = 0;
  bool resume = false;      // what the sequence begins with of the prompt is not read again
  bool trace = false;       // keep what AttendedRows asks with
  bool ignore_eos = false;  // go on after EOS, which then is a token like others: for measurements
  std::function<bool()> wanted;  // asked in each layer, on the CPU; false: Cancelled. null: it is
  // Called for each generated token, EOS excluded, as soon as it is known; an error ends generation
  // with that error.
  std::function<absl::Status(TokenId)> on_token;
};

enum class StopReason : uint8_t { kEos = 0, kMaxTokens = 1, kContextLength = 2 };

struct GenerateResult {
  std::vector<TokenId> ids;  // EOS excluded
  StopReason stop = StopReason::kMaxTokens;
  TokenId end_token = -1;     // of kEos: the token that ended it
  std::vector<float> logits;  // [positions, vocab_size] if kept: prompt tokens, then generated
                              // tokens that were fed back
  double prompt_seconds = 0;
  double generate_seconds = 0;
  // Tokens fed back: what generate_seconds are of, since the prompt gives the first token.
  int64_t steps = 0;
};

// What a decoder presents when it opens a context: of the checkpoint, for contexts whose keys are stored as `config`
// reads them.
std::vector<std::pair<std::string, std::string>> PresentedFingerprint(
    const model::Checkpoint& checkpoint, const RetrievalConfig& config);

class Decoder {
 public:
  // Opens the context on a connected client and fetches sink and local rows. host_rows: of
  // this context, in this host's memory, where NeedsHostRows. With a GPU and HostZoneOptions
  // they may be null: the zone is fetched from the store then. Pass null for every other zone.
  static absl::StatusOr<std::unique_ptr<Decoder>> Open(
      const model::Checkpoint& checkpoint, std::unique_ptr<retrieval::Session> client,
      const std::string& context, const RetrievalConfig& config, ThreadPool* pool,
      const DeviceConfig& device = DeviceConfig(),
      std::shared_ptr<const HostRows> host_rows = nullptr);
  // Without a context: the model alone, dense attention over the prompt and what follows it.
  static absl::StatusOr<std::unique_ptr<Decoder>> OpenModelOnly(
      const model::Checkpoint& checkpoint, ThreadPool* pool,
      const DeviceConfig& device = DeviceConfig());
  ~Decoder();

  // Continues the document with the prompt. Each call starts from the document anew, unless `resume`:
  // then rows of the last one stay as they are, as far as its prompt and answer are this prompt.
  absl::StatusOr<GenerateResult> Generate(const std::vector<TokenId>& prompt,
                                          const GenerateOptions& options);

  // After a Generate with `trace`: the rows of the document that the answer's tokens attended to.
  absl::StatusOr<std::vector<AttendedRow>> AttendedRows();

  // What this decoder holds behind the document: of the last prompt, and of the answer the tokens that were
  // fed back. To be set aside and restored between calls.
  Sequence& sequence() { return *sequence_; }
  const Sequence& sequence() const { return *sequence_; }
  // Of the last Generate's prompt: tokens that were not read again.
  int64_t resumed_tokens() const { return resumed_tokens_; }

  Statistics statistics() const;
  int64_t context_tokens() const { return context_tokens_; }
  int64_t most_given_up() const { return most_given_up_; }
  // How the zone is attended to, where that was left to be planned.
  const std::optional<Plan>& plan() const { return plan_; }
  // Of what is open; empty: no context, or one of an old format that has none.
  const std::string& content_id() const { return content_id_; }

  // For tests, of a decoder on the CPU.
  void set_observer(Observer observer);

 private:
  friend class Generation;  // generation.h: the steps of Generate

  Decoder(const model::Checkpoint& checkpoint, const DeviceConfig& device)
      : checkpoint_(checkpoint), device_(device), max_tokens_(checkpoint.config.MaxTokens()) {}
  absl::Status MakeSequence(const OpenedContext& context);
  // What is left to the context, and then the sequence. of_config: where it is opened by a plan, of the way taken.
  absl::Status OpenZone(const retrieval::Opened& opened, const std::string& context,
                        RetrievalConfig config, ThreadPool* pool,
                        std::shared_ptr<const HostRows> host_rows);
  absl::Status OpenByPlan(const retrieval::Opened& opened, const std::string& context,
                          const RetrievalConfig& config, ThreadPool* pool);
  absl::Status CheckPrompt(const std::vector<TokenId>& prompt,
                           const GenerateOptions& options) const;
  absl::Status StartTrace(bool trace);

  const model::Checkpoint& checkpoint_;
  const DeviceConfig device_;
  int64_t context_tokens_ = 0;
  int64_t most_given_up_ = 0;
  std::string content_id_;
  double target_error_ = 0, promised_error_ = 0;
  std::optional<Plan> plan_;
  PromisedOn promised_on_ = PromisedOn::kNothing;
  int64_t max_tokens_;                          // of context, prompt and answer together
  int64_t max_block_ = 1;                       // tokens per pass: what one Query may carry
  std::unique_ptr<retrieval::Session> client_;  // null: the model alone
  ZoneLimits limits_;                           // without rows: there is no context
  std::unique_ptr<QueryTrace> trace_;           // of the last Generate; null: none was kept
  int64_t resumed_tokens_ = 0;
  std::unique_ptr<Sequence> sequence_;
};

}  // namespace carrel::decoder
