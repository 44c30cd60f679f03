#include "decoder/generation.h"

#include <algorithm>
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
      logits_(static_cast<size_t>(decoder.checkpoint_.config.vocab_size)),
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
  generation.at_ = decoder.Resume(generation.prompt_, generation.options_);
  decoder.resumed_tokens_ = generation.at_;
  decoder.pass_->set_wanted(generation.options_.wanted);
  decoder.pass_->set_reading_prompt(true);
  return generation;
}

absl::Span<const TokenId> Generation::Next() const {
  if (!reading_prompt()) return {&token_, 1};
  return absl::MakeConstSpan(prompt_).subspan(static_cast<size_t>(at_),
                                              static_cast<size_t>(decoder_->max_block_));
}

Position Generation::position() const {
  const Position begin = decoder_->context_tokens_ - decoder_->given_up_;
  if (reading_prompt()) return begin + at_;
  return begin + static_cast<int64_t>(prompt_.size() + result_.ids.size()) - 1;
}

bool Generation::NextAnswers() const {
  return at_ + decoder_->max_block_ >= static_cast<int64_t>(prompt_.size());
}

absl::Status Generation::Step() {
  CARREL_CHECK(!done_);
  const absl::Span<const TokenId> block = Next();
  RETURN_IF_ERROR(decoder_->Run(block, position(), NextAnswers()));
  return Take(block);
}

absl::Status Generation::Take(absl::Span<const TokenId> block) {
  const bool read_prompt = reading_prompt();
  const auto n = static_cast<int64_t>(block.size());
  if (read_prompt) {
    at_ += n;
  } else {
    ++result_.steps;
  }
  if (options_.keep_logits) {
    const size_t before = result_.logits.size();
    result_.logits.resize(before + static_cast<size_t>(n) * logits_.size());
    RETURN_IF_ERROR(decoder_->pass_->Logits(n, &result_.logits[before]));
  }
  if (reading_prompt()) return absl::OkStatus();
  const absl::StatusOr<TokenId> next = decoder_->NextToken(sampler_, options_, logits_);
  if (absl::IsInternal(next.status())) {  // a logit that is not a number
    return model::NameNonFinite(*decoder_->checkpoint_.weights, next.status());
  }
  ASSIGN_OR_RETURN(token_, next);
  if (read_prompt) {
    decoder_->pass_->set_reading_prompt(false);
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
  if (position() >= decoder_->max_tokens_) return end(StopReason::kContextLength);
  return absl::OkStatus();
}

std::vector<absl::Status> Generation::StepTogether(absl::Span<Generation* const> generations) {
  std::vector<PassBlock> blocks;
  for (const Generation* one : generations) {
    CARREL_CHECK(!one->done_);
    one->decoder_->BeginBlock(one->NextAnswers());
    blocks.push_back(
        {one->decoder_->pass_.get(), one->Next(), one->position(), one->NextAnswers(), {}});
  }
  if (blocks.empty()) return {};
  blocks[0].pass->RunTogether(absl::MakeSpan(blocks));
  std::vector<absl::Status> statuses;
  for (size_t i = 0; i < blocks.size(); ++i) {
    Generation& one = *generations[i];
    PassBlock& block = blocks[i];
    if (block.status.ok()) {
      block.status = CatchThrown("a generation", [&] {  // it is this one's: the others have read
        one.decoder_->sequence_.insert(one.decoder_->sequence_.end(), block.tokens.begin(),
                                       block.tokens.end());
        return one.Take(block.tokens);
      });
    }
    statuses.push_back(std::move(block.status));
  }
  return statuses;
}

GenerateResult Generation::TakeResult() { return std::move(result_); }

}  // namespace carrel::decoder
