// What:   a document with facts hidden at chosen depths of filler prose, and the questions about
//         them: the needle test, in the language of the demo model.
// Math:   a fact at depth f of a document of T tokens stands after the first sentence that ends at
//         or beyond f T tokens. kSingle states one fact. kMultiValue states two to four values of
//         one key, the first at its depth, and asks for all of them; kTwoHop states who keeps a key
//         at its depth, where the keeper lives elsewhere, and asks where. What is elsewhere stands
//         at a depth drawn evenly from the whole document. At least three sentences stand between
//         two facts: those of one depth follow each other.
// Shapes: prompts and answers as in models/demo/docs; a question carries kind, depth and length.
// Edge:   the text begins with a space, as the demo's documents do; it ends with a whole sentence,
//         so the document is longer than asked by at most a sentence.
// Errors: those of the counter; InvalidArgument by ValidateNeedleConfig, which names the field.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace carrel::eval {

enum class NeedleKind : uint8_t { kSingle = 0, kMultiValue = 1, kTwoHop = 2 };

absl::StatusOr<NeedleKind> ParseNeedleKind(absl::string_view name);
absl::string_view NeedleKindName(NeedleKind kind);

struct NeedleConfig {
  int64_t tokens = 0;                                     // of the document; 64 .. 2^24
  std::vector<double> depths;                             // 0: the beginning, 1: the end; each once
  std::vector<NeedleKind> kinds = {NeedleKind::kSingle};  // each is put at every depth; each once
  int64_t per_depth = 1;  // needles of each kind at each depth; 1 .. 64
  int64_t others = 0;  // facts of other people and buildings that nobody asks for, spread evenly;
                       // 0 .. 65536: 0 hides the needles in filler alone
  uint64_t seed = 0;
};

struct NeedleQuestion {
  NeedleKind kind = NeedleKind::kSingle;
  std::string type;  // of the fact: badge, whose, city, code, keeper, spare, hop
  double depth = 0;
  std::string prompt, answer;
};

struct NeedleDocument {
  std::string text;
  int64_t tokens = 0;  // as counted
  std::vector<NeedleQuestion> questions;
};

absl::Status ValidateNeedleConfig(const NeedleConfig& config);

// count(text): the tokens of a text that begins with a space.
using TokenCounter = std::function<absl::StatusOr<int64_t>(absl::string_view)>;
absl::StatusOr<NeedleDocument> MakeNeedleDocument(const NeedleConfig& config,
                                                  const TokenCounter& count);

}  // namespace carrel::eval
