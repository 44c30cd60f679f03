// What:   the probe (model/tokenizer/probe.h) as a model's chat template writes it: the end of the user's
//         turn that a document stands in, questions, and where answers begin.
// Edge:   a template that refuses talks of several turns is given one; where it refuses that, too, or there is
//         none, the probe is plain; empty, where the tokenizer has no tokens for it.
// Threads: any.     Cost: a chat rendered a few times.
#pragma once

#include <vector>

#include "absl/types/span.h"
#include "common/ids.h"

namespace carrel::model {
class Tokenizer;
}

namespace carrel::serving {

class ChatTemplate;

// chat: null: none.
std::vector<TokenId> ChatProbe(ChatTemplate* chat, const model::Tokenizer& tokenizer,
                               absl::Span<const TokenId> document);

}  // namespace carrel::serving
