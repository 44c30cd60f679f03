#include "eval/source_tally.h"

#include <algorithm>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_split.h"

namespace carrel::eval {
namespace {

bool IsWord(char c) {
  return absl::ascii_isalnum(c) || (static_cast<unsigned char>(c) & 0x80) != 0;
}

absl::flat_hash_set<std::string> WordsOf(absl::string_view text) {
  absl::flat_hash_set<std::string> words;
  std::string word;
  for (size_t i = 0; i <= text.size(); ++i) {
    if (i < text.size() && IsWord(text[i])) {
      word += text[i];
      continue;
    }
    if (!word.empty()) words.insert(word);
    word.clear();
  }
  return words;
}

bool HoldsWords(absl::string_view text, absl::string_view words) {
  for (size_t at = text.find(words); at != absl::string_view::npos; at = text.find(words, at + 1)) {
    const size_t end = at + words.size();
    if ((at == 0 || !IsWord(text[at - 1])) && (end == text.size() || !IsWord(text[end])))
      return true;
  }
  return false;
}

}  // namespace

std::vector<std::vector<int64_t>> FactPassages(const library::DocumentText& document,
                                               absl::string_view question,
                                               absl::string_view answer) {
  const absl::flat_hash_set<std::string> asked = WordsOf(question);
  std::vector<std::vector<int64_t>> facts;
  for (absl::string_view part : absl::StrSplit(answer, ", ")) {
    part = absl::StripAsciiWhitespace(part);
    if (part.empty()) continue;
    std::vector<int64_t> best;
    int64_t most = 0;
    for (size_t i = 0; i < document.passages().size(); ++i) {
      const std::string text = document.TextOf(document.passages()[i]);
      if (!HoldsWords(text, part)) continue;
      int64_t shared = 0;
      for (const std::string& word : WordsOf(text)) shared += asked.contains(word);
      if (shared > most || best.empty()) {
        best.clear();
        most = shared;
      }
      if (shared == most) best.push_back(static_cast<int64_t>(i));
    }
    if (!best.empty()) facts.push_back(std::move(best));
  }
  return facts;
}

void SourceTally::Add(const library::DocumentText& document, const std::string& question,
                      absl::string_view answer, absl::Span<const serving::AnswerSource> sources,
                      int64_t most) {
  const std::vector<std::vector<int64_t>> facts = FactPassages(document, question, answer);
  if (facts.empty()) return;
  const auto held = std::count_if(facts.begin(), facts.end(), [&](const auto& passages) {
    return std::any_of(passages.begin(), passages.end(), [&](int64_t passage) {
      const RowRange rows = document.passages()[static_cast<size_t>(passage)];
      return std::any_of(sources.begin(), sources.end(), [&](const serving::AnswerSource& source) {
        return source.first_token <= rows.begin && rows.end <= source.end_token;
      });
    });
  });
  ++asked;
  with_fact += held > 0;
  with_every += held >= std::min<int64_t>(most, static_cast<int64_t>(facts.size()));
  if (held == 0) missed.push_back(question);
}

}  // namespace carrel::eval
