#include "model/tokenizer/pretokenizer.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/status.h"
#include "model/tokenizer/byte_alphabet.h"

namespace carrel::model {
namespace {

struct Part {
  size_t begin;
  size_t end;
  bool is_match;
};

// The text as matches and what lies between them, in order and without gaps.
void Cover(const std::vector<SplitPattern::Match>& matches, size_t text_size, bool invert,
           std::vector<Part>* parts) {
  parts->clear();
  size_t end = 0;
  for (const SplitPattern::Match& match : matches) {
    if (end < match.begin) parts->push_back({end, match.begin, invert});
    parts->push_back({match.begin, match.end, !invert});
    end = match.end;
  }
  if (end < text_size) parts->push_back({end, text_size, invert});
}

// Joins parts to pieces. A run of matches is merged only by its first one (kMergedWithPrevious) or
// its last one (kMergedWithNext); the others stay alone.
void Join(SplitBehavior behavior, std::vector<Part>* parts) {
  size_t kept = 0;
  for (size_t i = 0; i < parts->size(); ++i) {
    const Part part = (*parts)[i];
    bool extend = false;  // the piece before
    if (kept > 0) {
      Part& last = (*parts)[kept - 1];
      switch (behavior) {
        case SplitBehavior::kRemoved:
        case SplitBehavior::kIsolated:
          break;
        case SplitBehavior::kMergedWithPrevious:
          extend = part.is_match && !last.is_match;
          break;
        case SplitBehavior::kMergedWithNext:
          extend = !part.is_match && last.is_match;
          break;
        case SplitBehavior::kContiguous:
          extend = part.is_match == last.is_match;
          break;
      }
      if (extend) {
        last.end = part.end;
        last.is_match = part.is_match;
      }
    }
    if (!extend) (*parts)[kept++] = part;
  }
  parts->resize(kept);
}

std::string WithMetaspace(const PretokenStep& step, absl::string_view piece, bool first) {
  std::string text = absl::StrReplaceAll(piece, {{" ", kSpaceSymbol}});
  const bool prepends = step.prepend == PretokenStep::Prepend::kAlways ||
                        (step.prepend == PretokenStep::Prepend::kFirst && first);
  if (prepends && !absl::StartsWith(text, kSpaceSymbol)) text.insert(0, kSpaceSymbol);
  return text;
}

void SplitMetaspace(const PretokenStep& step, absl::string_view text,
                    std::vector<absl::string_view>* pieces) {
  while (step.split) {
    const size_t next = text.find(kSpaceSymbol, 1);
    if (next == absl::string_view::npos) break;
    pieces->push_back(text.substr(0, next));
    text.remove_prefix(next);
  }
  pieces->push_back(text);
}

}  // namespace

const char kGpt2Pattern[] =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

absl::StatusOr<Pretokenizer> Pretokenizer::Create(const std::vector<PretokenStep>& steps) {
  Pretokenizer result;
  for (const PretokenStep& step : steps) {
    Step compiled{step, {}};
    if (step.kind == PretokenStep::Kind::kSplit) {
      ASSIGN_OR_RETURN(SplitPattern pattern, step.literal
                                                 ? SplitPattern::CompileLiteral(step.pattern)
                                                 : SplitPattern::CompileRegex(step.pattern));
      compiled.pattern.push_back(std::move(pattern));
    }
    result.steps_.push_back(std::move(compiled));
  }
  return result;
}

absl::Status Pretokenizer::Split(absl::string_view text, bool at_start,
                                 std::deque<std::string>* owned,
                                 std::vector<absl::string_view>* pieces) const {
  pieces->clear();
  if (text.empty()) return absl::OkStatus();
  pieces->push_back(text);
  std::vector<absl::string_view> next;
  std::vector<SplitPattern::Match> matches;
  std::vector<Part> parts;
  for (const auto& [step, pattern] : steps_) {
    if (step.kind == PretokenStep::Kind::kPrefixSpace) {
      for (absl::string_view& piece : *pieces) {
        if (absl::StartsWith(piece, " ")) continue;
        piece = owned->emplace_back(absl::StrCat(" ", piece));
      }
      continue;
    }
    next.clear();
    for (const absl::string_view piece : *pieces) {
      if (step.kind == PretokenStep::Kind::kMetaspace) {
        const bool first = at_start && piece.data() == pieces->front().data();
        SplitMetaspace(step, owned->emplace_back(WithMetaspace(step, piece, first)), &next);
        continue;
      }
      RETURN_IF_ERROR(pattern[0].FindMatches(piece, &matches));
      Cover(matches, piece.size(), step.invert, &parts);
      Join(step.behavior, &parts);
      for (const Part& part : parts) {
        if (part.begin == part.end) continue;
        if (part.is_match && step.behavior == SplitBehavior::kRemoved) continue;
        next.push_back(piece.substr(part.begin, part.end - part.begin));
      }
    }
    pieces->swap(next);
  }
  return absl::OkStatus();
}

}  // namespace carrel::model
