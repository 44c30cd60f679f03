// What:   a step: the next tokens of each of some sequences, and what comes of them. One sequence is the
//         case of one slice. A prompt is tokens that are not computed yet.
// Shapes: logits [vocab_size] f32 of a token, in this host's memory.
// Ownership: keeps nothing: who steps owns the sequences, the tokens and where logits go.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/ids.h"

namespace carrel::decoder {

class Sequence;

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

// A step in parts: as many of the slices of `order` together as have at most so many tokens; what has more is
// a part of its own. Those of few tokens come first, those of as many in order: answers stay together whatever
// prompts there are, and the same answers are the same part in the next step.
std::vector<std::vector<size_t>> PartsOf(absl::Span<const Slice> batch,
                                         absl::Span<const size_t> order, int64_t most);

}  // namespace carrel::decoder
