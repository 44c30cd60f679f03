#include "decoder/generation.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/time/clock.h"
#include "common/status.h"
#include "common/thrown.h"
#include "model/non_finite.h"

namespace carrel::decoder {

Generation::Generation(Decoder& decoder, std::vector<TokenId> prompt, GenerateOptions options)
    : decoder_(&decoder),
      prompt_(std::move(prompt)),
      options_(std::move(options)),
      sampler_(options_.sampling),
      start_(absl::Now()) {}

absl::StatusOr<Generation> Generation::Begin(Decoder& decoder, std::vector<TokenId> prompt,
                                             GenerateOptions options) {
  RETURN_IF_ERROR(ValidateSamplingConfig(options.sampling));
  RETURN_IF_ERROR(decoder.CheckPrompt(prompt, options));
  RETURN_IF_ERROR(model::ValidateTokenIds(options.history, decoder.checkpoint_.config));
  Generation generation(decoder, std::move(prompt), std::move(options));
  generation.sampler_.Saw(generation.options_.history);
  generation.sampler_.Saw(generation.prompt_);
  RETURN_IF_ERROR(decoder.StartTrace(generation.options_.trace));
  const GenerateOptions& of = generation.options_;
  generation.at_ =
      decoder.sequence_->Sync(generation.prompt_, of.resume && !of.keep_logits, of.give_up);
  decoder.resumed_tokens_ = generation.at_;
  decoder.sequence_->set_wanted(of.wanted);
  return generation;
}

absl::Span<const TokenId> Generation::Next() const {
  if (!reading_prompt()) return {&token_, 1};
  return absl::MakeConstSpan(prompt_).subspan(static_cast<size_t>(at_),
                                              static_cast<size_t>(decoder_->max_block_));
}

bool Generation::NextAnswers() const {
  return at_ + decoder_->max_block_ >= static_cast<int64_t>(prompt_.size());
}

// Greedily the device chooses, and logits need not come back.
Slice Generation::NextSlice() {
  const auto vocab = static_cast<size_t>(decoder_->checkpoint_.config.vocab_size);
  Slice slice;
  slice.sequence = decoder_->sequence_.get();
  slice.tokens = Next();
  slice.of_prompt = reading_prompt();
  slice.wants_next = NextAnswers();
  if (slice.wants_next && !options_.sampling.greedy()) {
    logits_.resize(vocab);
    slice.next_logits = logits_.data();
  }
  if (options_.keep_logits) {
    const size_t before = result_.logits.size();
    result_.logits.resize(before + slice.tokens.size() * vocab);
    slice.all_logits = &result_.logits[before];
  }
  return slice;
}

absl::Status Generation::Take(const Slice& slice, absl::StatusOr<TokenId> next) {
  if (slice.of_prompt) {
    at_ += static_cast<int64_t>(slice.tokens.size());
    if (reading_prompt()) return absl::OkStatus();
  } else {
    ++result_.steps;
  }
  if (slice.next_logits != nullptr) next = sampler_.Sample(logits_);
  if (absl::IsInternal(next.status())) {  // a logit that is not a number
    return model::NameNonFinite(*decoder_->checkpoint_.weights, next.status());
  }
  ASSIGN_OR_RETURN(token_, next);
  if (slice.of_prompt) {
    prompt_end_ = absl::Now();
    result_.prompt_seconds = absl::ToDoubleSeconds(prompt_end_ - start_);
  }
  return Emit();
}

absl::Status Generation::Emit() {
  const std::vector<TokenId>& eos = decoder_->checkpoint_.config.eos_token_ids;
  const auto end = [&](StopReason stop) {
    result_.stop = stop;
    result_.generate_seconds = absl::ToDoubleSeconds(absl::Now() - prompt_end_);
    done_ = true;
    return absl::OkStatus();
  };
  const auto full = [&] { return static_cast<int64_t>(result_.ids.size()) >= options_.max_tokens; };
  if (full()) return end(StopReason::kMaxTokens);
  if (!options_.ignore_eos && std::find(eos.begin(), eos.end(), token_) != eos.end()) {
    result_.end_token = token_;
    return end(StopReason::kEos);
  }
  result_.ids.push_back(token_);
  sampler_.Saw({&token_, 1});
  if (options_.on_token) RETURN_IF_ERROR(options_.on_token(token_));
  if (full()) return end(StopReason::kMaxTokens);
  if (decoder_->sequence_->end() >= decoder_->max_tokens_) return end(StopReason::kContextLength);
  return absl::OkStatus();
}

std::vector<absl::Status> Generation::Step(absl::Span<Generation* const> generations) {
  std::map<Runner*, std::vector<size_t>> of_runners;
  for (size_t i = 0; i < generations.size(); ++i) {
    CARREL_CHECK(!generations[i]->done_);
    of_runners[&generations[i]->decoder_->sequence_->runner()].push_back(i);
  }
  std::vector<absl::Status> statuses(generations.size());
  for (const auto& of_runner : of_runners) {
    const std::vector<size_t>& those = of_runner.second;
    std::vector<Slice> batch;
    for (const size_t i : those) batch.push_back(generations[i]->NextSlice());
    std::vector<SliceResult> results = of_runner.first->Step(batch);
    for (size_t k = 0; k < those.size(); ++k) {
      absl::Status& status = statuses[those[k]];
      status = std::move(results[k].status);
      if (!status.ok()) continue;
      status = CatchThrown("a generation", [&] {  // it is this one's: the others have read
        return generations[those[k]]->Take(batch[k], std::move(results[k].next));
      });
    }
  }
  return statuses;
}

GenerateResult Generation::TakeResult() { return std::move(result_); }

}  // namespace carrel::decoder
