#include "eval/needle_document.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_join.h"
#include "common/status.h"
#include "eval/needle_language.h"

namespace carrel::eval {
namespace {

constexpr std::pair<absl::string_view, NeedleKind> kKinds[] = {
    {"single", NeedleKind::kSingle},
    {"multi-value", NeedleKind::kMultiValue},
    {"two-hop", NeedleKind::kTwoHop}};

// Facts of a registry stand apart; facts side by side are another task.
constexpr int64_t kGapSentences = 3;
constexpr int64_t kFillerTokens = 12;  // of a sentence, about

struct PlacedFact {
  double depth = 0;
  std::string sentence;
};

std::string Prompt(absl::string_view question) {
  return absl::StrCat("\n\nQuestion: ", question, "\nAnswer:");
}

// Draws facts, and keeps what is to be placed and asked.
class Plan {
 public:
  explicit Plan(const NeedleConfig& config) : config_(config), language_(config.seed) {
    for (const double depth : config.depths) {
      for (const NeedleKind kind : config.kinds) {
        for (int64_t i = 0; i < config.per_depth; ++i) Add(kind, depth);
      }
    }
    for (int64_t i = 0; i < config.others; ++i) {
      AddSingle((static_cast<double>(i) + language_.Uniform()) / static_cast<double>(config.others),
                /*asked=*/false);
    }
    std::stable_sort(facts_.begin(), facts_.end(),
                     [](const PlacedFact& a, const PlacedFact& b) { return a.depth < b.depth; });
  }

  NeedleLanguage& language() { return language_; }
  const std::vector<PlacedFact>& facts() const { return facts_; }
  std::vector<NeedleQuestion> TakeQuestions() { return std::move(questions_); }

 private:
  void Add(NeedleKind kind, double depth) {
    switch (kind) {
      case NeedleKind::kSingle:
        return AddSingle(depth, /*asked=*/true);
      case NeedleKind::kMultiValue:
        return AddMultiValue(depth);
      case NeedleKind::kTwoHop:
        return AddTwoHop(depth);
    }
  }

  void State(double depth, std::string sentence) { facts_.push_back({depth, std::move(sentence)}); }
  void Ask(NeedleKind kind, const char* type, double depth, absl::string_view question,
           std::string answer) {
    questions_.push_back({kind, type, depth, Prompt(question), std::move(answer)});
  }

  void AddSingle(double depth, bool asked) {
    constexpr NeedleKind kKind = NeedleKind::kSingle;
    const int64_t form = language_.Below(5);
    if (form < 3) {
      const std::string person = language_.Person();
      if (form == 2) {
        const std::string city = language_.City();
        State(depth, absl::StrCat(person, " lives in ", city, "."));
        if (asked) Ask(kKind, "city", depth, absl::StrCat("Where does ", person, " live?"), city);
        return;
      }
      const std::string number = language_.Number();
      State(depth, absl::StrCat("The badge number of ", person, " is ", number, "."));
      if (!asked) return;
      if (form == 0) {
        Ask(kKind, "badge", depth, absl::StrCat("What is the badge number of ", person, "?"),
            number);
      } else {
        Ask(kKind, "whose", depth, absl::StrCat("Whose badge number is ", number, "?"), person);
      }
      return;
    }
    const std::string building = language_.Building();
    if (form == 3) {
      const std::string number = language_.Number();
      State(depth, absl::StrCat("The access code of the ", building, " is ", number, "."));
      if (asked) {
        Ask(kKind, "code", depth, absl::StrCat("What is the access code of the ", building, "?"),
            number);
      }
      return;
    }
    const std::string keeper = language_.Person();
    State(depth, absl::StrCat("The key of the ", building, " is kept by ", keeper, "."));
    if (asked) {
      Ask(kKind, "keeper", depth, absl::StrCat("Who keeps the key of the ", building, "?"), keeper);
    }
  }

  void AddMultiValue(double depth) {
    const std::string building = language_.Building();
    std::vector<std::pair<double, std::string>> values = {{depth, language_.Number()}};
    const int64_t more = 1 + language_.Below(3);
    for (int64_t i = 0; i < more; ++i) {
      const double elsewhere = language_.Uniform();
      values.emplace_back(elsewhere, language_.Number());
    }
    for (const auto& [at, number] : values) {
      State(at, absl::StrCat("A spare code of the ", building, " is ", number, "."));
    }
    std::stable_sort(values.begin(), values.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    std::vector<std::string> in_order;
    for (const auto& [at, number] : values) in_order.push_back(number);
    Ask(NeedleKind::kMultiValue, "spare", depth,
        absl::StrCat("List the spare codes of the ", building, "."), absl::StrJoin(in_order, ", "));
  }

  void AddTwoHop(double depth) {
    const std::string building = language_.Building(), keeper = language_.Person();
    const std::string city = language_.City();
    State(depth, absl::StrCat("The key of the ", building, " is kept by ", keeper, "."));
    State(language_.Uniform(), absl::StrCat(keeper, " lives in ", city, "."));
    // The demo model was trained to name the keeper on the way.
    Ask(NeedleKind::kTwoHop, "hop", depth,
        absl::StrCat("In which city does the keeper of the key of the ", building, " live?"),
        absl::StrCat(keeper, ", ", city));
  }

  const NeedleConfig& config_;
  NeedleLanguage language_;
  std::vector<PlacedFact> facts_;
  std::vector<NeedleQuestion> questions_;
};

}  // namespace

absl::StatusOr<NeedleKind> ParseNeedleKind(absl::string_view name) {
  for (const auto& [known, kind] : kKinds) {
    if (name == known) return kind;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("kind=", name, " is none of single, multi-value, two-hop"));
}

absl::string_view NeedleKindName(NeedleKind kind) {
  for (const auto& [name, known] : kKinds) {
    if (known == kind) return name;
  }
  return "unknown";
}

absl::Status ValidateNeedleConfig(const NeedleConfig& config) {
  const auto outside = [](absl::string_view field, auto value, absl::string_view bounds) {
    return absl::InvalidArgumentError(absl::StrCat(field, "=", value, " is outside ", bounds));
  };
  if (config.tokens < 64 || config.tokens > int64_t{1} << 24)
    return outside("tokens", config.tokens, "[64, 16777216]");
  if (config.per_depth < 1 || config.per_depth > 64)
    return outside("per_depth", config.per_depth, "[1, 64]");
  if (config.others < 0 || config.others > 65536)
    return outside("others", config.others, "[0, 65536]");
  if (config.depths.empty() || config.kinds.empty())
    return absl::InvalidArgumentError("needles need at least one depth and one kind");
  for (const double depth : config.depths) {
    if (!(depth >= 0 && depth <= 1)) return outside("depth", depth, "[0, 1]");
  }
  if (std::set<double>(config.depths.begin(), config.depths.end()).size() != config.depths.size())
    return absl::InvalidArgumentError("depths: one is given twice");
  if (std::set<NeedleKind>(config.kinds.begin(), config.kinds.end()).size() != config.kinds.size())
    return absl::InvalidArgumentError("kinds: one is given twice");
  return absl::OkStatus();
}

absl::StatusOr<NeedleDocument> MakeNeedleDocument(const NeedleConfig& config,
                                                  const TokenCounter& count) {
  RETURN_IF_ERROR(ValidateNeedleConfig(config));
  Plan plan(config);
  NeedleDocument document;
  const auto add = [&](const std::string& sentence) -> absl::Status {
    const std::string text = absl::StrCat(" ", sentence);
    ASSIGN_OR_RETURN(const int64_t tokens, count(text));
    document.tokens += tokens;
    document.text += text;
    return absl::OkStatus();
  };
  // What the facts still to come will take is known ahead, so that the document ends where it
  // should: their tokens and those of the filler that keeps them apart.
  int64_t facts_left = 0;
  for (const PlacedFact& fact : plan.facts()) {
    ASSIGN_OR_RETURN(const int64_t tokens, count(absl::StrCat(" ", fact.sentence)));
    facts_left += tokens + kGapSentences * kFillerTokens;
  }
  const int64_t facts_in_all = facts_left;
  if (facts_in_all > config.tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("tokens=", config.tokens, ": ", plan.facts().size(),
                     " facts and the filler between them take ", facts_in_all,
                     " tokens; ask for fewer facts or a longer document"));
  }
  const double elastic = static_cast<double>(std::max<int64_t>(1, config.tokens - facts_in_all));
  size_t next = 0;
  int64_t since_fact = kGapSentences;
  while (next < plan.facts().size() || document.tokens + facts_left < config.tokens) {
    // Depth counts what may be stretched: many facts at one place do not push each other away.
    const double passed =
        static_cast<double>(document.tokens - (facts_in_all - facts_left)) / elastic;
    const bool due = next < plan.facts().size() && (passed >= plan.facts()[next].depth ||
                                                    document.tokens + facts_left >= config.tokens);
    if (!due || since_fact < kGapSentences) {
      RETURN_IF_ERROR(add(plan.language().Filler()));
      ++since_fact;
      continue;
    }
    const int64_t before = document.tokens;
    RETURN_IF_ERROR(add(plan.facts()[next++].sentence));
    facts_left -= document.tokens - before + kGapSentences * kFillerTokens;
    since_fact = 0;
  }
  document.questions = plan.TakeQuestions();
  return document;
}

}  // namespace carrel::eval
