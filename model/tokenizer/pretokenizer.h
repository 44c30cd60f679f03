// What:   cuts text into the pieces that BPE merges within, as tokenizer.json's pre_tokenizer says.
// Source: Hugging Face tokenizers: Sequence, Split (five behaviors, invert), Digits (as a Split)
//         and ByteLevel (as a space before every piece, then GPT-2's Split), Metaspace. The byte-level
//         alphabet itself is the vocabulary's matter: pieces are plain bytes here.
// Edge:   empty pieces are dropped; each step sees the previous step's pieces one by one.
// Threads: immutable, reentrant.
#pragma once

#include <deque>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "model/tokenizer/split_pattern.h"

namespace carrel::model {

// What becomes of a match ("delimiter") and of the text between matches.
enum class SplitBehavior {
  kRemoved,             // matches are left out
  kIsolated,            // every match is a piece of its own
  kMergedWithPrevious,  // a match ends the piece before it
  kMergedWithNext,      // a match begins the piece after it
  kContiguous,          // as kIsolated, neighbouring matches joined
};

struct PretokenStep {
  enum class Kind { kSplit, kPrefixSpace, kMetaspace };
  enum class Prepend { kNever, kFirst, kAlways };
  Kind kind = Kind::kSplit;
  // kSplit:
  std::string pattern;
  bool literal = false;  // pattern is a plain string, not a regular expression
  SplitBehavior behavior = SplitBehavior::kIsolated;
  bool invert = false;  // matches and the text between them change roles
  // kMetaspace: U+2581 takes the place of spaces, and stands before what does not begin with it: before
  // every text, or that at the beginning of all.
  Prepend prepend = Prepend::kNever;
  bool split = false;  // and begins a piece
};

extern const char kGpt2Pattern[];

class Pretokenizer {
 public:
  static absl::StatusOr<Pretokenizer> Create(const std::vector<PretokenStep>& steps);

  // Replaces *pieces. They view `text` or *owned, which must outlive them.
  // at_start: nothing stands before the text.
  absl::Status Split(absl::string_view text, bool at_start, std::deque<std::string>* owned,
                     std::vector<absl::string_view>* pieces) const;

 private:
  struct Step {
    PretokenStep step;
    std::vector<SplitPattern> pattern;  // one for kSplit, else none
  };
  std::vector<Step> steps_;
};

}  // namespace carrel::model
