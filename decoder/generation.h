// What:   one answer on its way, a step at a time: blocks of the prompt, then token by token. Several
//         answers, each of a decoder of its own, take turns, or go on by one step: then the weights are
//         read once for all of them, and every token has the bits that it has alone.
// Errors: as Decoder::Generate. After one, or after done(), there is nothing more to do. What is thrown where an
//         answer takes its token (on_token, sampling) is its status alone; what a runner throws is the caller's.
//         How far each came is not known: none of them goes on.
// Ownership: the decoder outlives it, and does nothing else until it is over.
// Threads: one at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "decoder/decoder.h"
#include "decoder/runner/runner.h"

namespace carrel::decoder {

class Generation {
 public:
  static absl::StatusOr<Generation> Begin(Decoder& decoder, std::vector<TokenId> prompt,
                                          GenerateOptions options);

  bool reading_prompt() const { return at_ < static_cast<int64_t>(prompt_.size()); }
  bool done() const { return done_; }
  int64_t next_tokens() const { return static_cast<int64_t>(Next().size()); }  // of the next step
  // The next step of each, of which none is done: a block of its prompt, or a token. Each one's status.
  static std::vector<absl::Status> Step(absl::Span<Generation* const> generations);
  absl::Status Step() { return Step({this})[0]; }
  GenerateResult TakeResult();

 private:
  Generation(Decoder& decoder, std::vector<TokenId> prompt, GenerateOptions options);
  // What is read next: a block of the prompt, or the token that is known.
  absl::Span<const TokenId> Next() const;
  // Whether that gives the answer's next token, and its queries are to be kept.
  bool NextAnswers() const;
  Slice NextSlice();
  // After its step; what follows the last token is the next one.
  absl::Status Take(const Slice& slice, absl::StatusOr<TokenId> next);
  // The token that is known now: part of the answer, or its end.
  absl::Status Emit();

  Decoder* decoder_;
  std::vector<TokenId> prompt_;
  GenerateOptions options_;
  Sampler sampler_;
  GenerateResult result_;
  std::vector<float> logits_;  // of the last token, where it is drawn by them
  absl::Time start_, prompt_end_;
  int64_t at_ = 0;  // tokens of the prompt that were read
  TokenId token_ = 0;
  bool done_ = false;
};

}  // namespace carrel::decoder
