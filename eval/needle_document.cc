#include "eval/needle_document.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "common/status.h"
#include "synth/random.h"

namespace carrel::eval {
namespace {

// In order of frequency.
constexpr absl::string_view kNouns[] = {
    "river",   "harbor",  "lantern",  "captain", "orchard", "winter",  "market",   "bridge",
    "teacher", "engine",  "garden",   "window",  "letter",  "forest",  "mountain", "station",
    "kitchen", "village", "island",   "castle",  "journey", "doctor",  "painter",  "hammer",
    "basket",  "blanket", "carpet",   "candle",  "dragon",  "evening", "compass",  "curtain",
    "cottage", "feather", "kettle",   "gate",    "fisher",  "grain",   "glove",    "ladder",
    "hall",    "meadow",  "merchant", "oven",    "horse",   "queen",   "night",    "morning",
    "ocean",   "lake",    "pocket",   "pilot",   "sailor",  "path",    "mirror",   "road",
    "street",  "shadow",  "roof",     "silver",  "song",    "ship",    "school",   "soldier",
    "tailor",  "storm",   "weaver",   "student", "temple",  "star",    "spring",   "stone",
    "summer",  "train",   "violin",   "wall",    "archive", "tree",    "wolf",     "thunder",
    "cable",   "valley",  "voyage",   "yard",    "writer",  "well",    "workshop", "barrel",
    "turbine", "tower",   "button",   "branch",  "bottle",  "wind",    "harvest",  "battery",
    "signal",  "chimney", "canal",    "wood",    "sensor",  "desert",  "anchor",   "wheel",
    "cloud",   "ledger",  "brick",    "boat",    "brush",   "cabin",   "flame",    "wagon",
    "frame",   "corner",  "drum",     "fruit",   "fog",     "coat",    "field",    "guard",
    "cellar",  "flute",   "guest",    "bell",    "coin",    "chair",   "dust",     "folder"};
constexpr absl::string_view kAdjectives[] = {
    "old",    "quiet",   "heavy",  "narrow",  "bright",   "frozen",  "gentle", "hidden",  "broken",
    "golden", "ancient", "hollow", "patient", "careful",  "distant", "empty",  "famous",  "foreign",
    "humble", "jagged",  "idle",   "kind",    "nervous",  "modest",  "lonely", "rapid",   "proud",
    "silent", "sacred",  "simple", "pale",    "stubborn", "steady",  "tall",   "rusty",   "slender",
    "sudden", "vast",    "timid",  "wild",    "young",    "tender",  "weary",  "wooden",  "bitter",
    "brave",  "yellow",  "calm",   "crooked", "early",    "fierce",  "clever", "cheap",   "cold",
    "blue",   "faint",   "damp",   "curious", "fresh",    "dark",    "deep",   "fragile", "dusty",
    "grey",   "honest",  "green"};
constexpr absl::string_view kVerbs[] = {
    "carried",  "painted",    "repaired", "followed", "watched",  "crossed",  "opened",
    "closed",   "described",  "ignored",  "measured", "counted",  "gathered", "lifted",
    "polished", "borrowed",   "buried",   "answered", "returned", "washed",   "admired",
    "traded",   "remembered", "studied",  "noticed",  "folded",   "guarded",  "praised",
    "mended",   "cleaned",    "drew",     "sketched", "forgot",   "examined", "delivered",
    "sold",     "bought",     "hid",      "built"};
constexpr absl::string_view kAdverbs[] = {"slowly",    "quietly",  "often",   "rarely", "gladly",
                                          "carefully", "suddenly", "eagerly", "twice",  "finally",
                                          "calmly",    "badly",    "proudly", "early",  "usually",
                                          "gently",    "late",     "somehow"};
// Those that occur in the registry documents: unlike last names they come from a fixed set, which
// the model knows.
constexpr absl::string_view kFirstNames[] = {
    "Baito",     "Bavcev",     "Beelpoun",  "Biakou",     "Bikon",      "Bilvri",     "Bougia",
    "Breltvrou", "Briarpee",   "Bruzia",    "Calfid",     "Ceaprea",    "Cheanskou",  "Cheelthio",
    "Chobrer",   "Chodrion",   "Chudbeerk", "Ciaflo",     "Ciocea",     "Ciordren",   "Curmind",
    "Daste",     "Dianar",     "Docu",      "Doulial",    "Dreakea",    "Dreatreel",  "Dreavul",
    "Dreeltgia", "Drendmiask", "Drentai",   "Drequain",   "Drougril",   "Drufo",      "Drundthus",
    "Drunu",     "Durkstio",   "Fealeelt",  "Fecel",      "Fiaklum",    "Fipria",     "Flioquio",
    "Flurske",   "Fubou",      "Futhklai",  "Gacha",      "Gaivtu",     "Garkolt",    "Gine",
    "Giorjairk", "Goxsha",     "Greaschou", "Greevrousk", "Grequio",    "Groure",     "Gudai",
    "Gugreeth",  "Hete",       "Hilgia",    "Hiovreer",   "Houltround", "Jadklio",    "Jaivlia",
    "Jalea",     "Jeebralt",   "Jeeki",     "Jeepelt",    "Jeesrio",    "Jilund",     "Kasta",
    "Keerou",    "Kethio",     "Kiarmi",    "Kiodraid",   "Kionshi",    "Klaimjai",   "Klastiov",
    "Kleadhur",  "Kleanpax",   "Kleavrark", "Kleeskvai",  "Kliopand",   "Klociam",    "Kloustiar",
    "Koskskal",  "Kucha",      "Kumeth",    "Learvir",    "Leekou",     "Lestou",     "Lezai",
    "Lialti",    "Liothbaix",  "Lomand",    "Louxprur",   "Luskead",    "Luthdai",    "Mainou",
    "Miarbree",  "Miathlio",   "Mona",      "Mubre",      "Mucov",      "Naistou",    "Naxska",
    "Neejel",    "Niskia",     "Noxthul",   "Peabre",     "Peelskai",   "Peelvi",     "Peetreth",
    "Pepree",    "Piaflo",     "Piaxmia",   "Pradgeark",  "Preadklir",  "Pregrai",    "Proskiolt",
    "Quiasi",    "Quiowoth",   "Quobrou",   "Quondthu",   "Reencee",    "Riacor",     "Riamusk",
    "Rouvfee",   "Rulou",      "Sainfor",   "Seergru",    "Shidpri",    "Shimoun",    "Shiolthe",
    "Shiorvo",   "Shivreev",   "Shuvtra",   "Siodros",    "Siogre",     "Sioncee",    "Skeabri",
    "Skioskpi",  "Skuceesk",   "Skuskain",  "Sogeel",     "Soundraisk", "Staichai",   "Stailtquior",
    "Staltand",  "Steevkio",   "Stendpee",  "Stiathu",    "Stiontrev",  "Stiovri",    "Stixgrio",
    "Stotrouv",  "Stourkste",  "Stugoun",   "Stumgraind", "Sundhor",    "Susur",      "Tavea",
    "Thearvrea", "Theevru",    "Thiovquio", "Thosren",    "Tiolchosk",  "Tioquu",     "Tirksa",
    "Tolair",    "Toulai",     "Tourbria",  "Treangad",   "Vaigo",      "Vandwee",    "Viornia",
    "Voumklad",  "Vravdou",    "Vreaxjio",  "Vriasstio",  "Vroucho",    "Vumgre",     "Waiskav",
    "Wevia",     "Wiahi",      "Wiarkbree", "Wiasgia",    "Zangrio",    "Zathsteark", "Ziokleend",
    "Ziskou",    "Zoudsouv",   "Zubo",      "Zupai"};
// Equally frequent.
constexpr absl::string_view kPlaces[] = {"across", "through", "near",   "behind",
                                         "around", "within",  "along",  "beyond",
                                         "above",  "under",   "beside", "against"};
constexpr absl::string_view kBuildings[] = {"warehouse",   "library", "archive", "vault",
                                            "observatory", "mill",    "bunker",  "tower",
                                            "depot",       "chapel"};
constexpr absl::string_view kOnsets[] = {
    "st", "l", "w",  "m",  "s",  "z",  "j",  "qu", "h",  "k", "sh", "b", "dr", "c", "v",  "g",
    "vr", "n", "sk", "gr", "pr", "tr", "kl", "f",  "th", "t", "r",  "d", "ch", "p", "br", "fl"};
constexpr absl::string_view kVowels[] = {"u",  "ia", "e", "o",  "ee", "a",
                                         "io", "ea", "i", "ou", "ai"};
constexpr absl::string_view kCodas[] = {"n",  "n", "l",  "l", "r",  "r", "m", "rk",
                                        "nd", "d", "lt", "x", "th", "v", "s", "sk"};

template <size_t kCount>
absl::string_view OneOf(const absl::string_view (&words)[kCount], int64_t i) {
  return words[static_cast<size_t>(i)];
}

// The language of the demo model's registry documents: plain sentences about nothing, made up names, and sentences that
// state a fact. Sentence patterns, words in order of frequency (weight about rank^-0.7), and syllables were read off the
// registry documents (models/demo/README.md). No last name, building or city is handed out twice by one object, nor is
// a number. The same seed gives the same sequence.
class NeedleLanguage {
 public:
  explicit NeedleLanguage(uint64_t seed) : state_(seed) {}

  std::string Filler();    // "The old harvest counted the patient candle along the river."
  std::string Person();    // "Hilgia Sheesko"
  std::string City();      // "Breltvrou"
  std::string Building();  // "Dionvia observatory"
  std::string Number();    // six digits

  double Uniform();  // in [0, 1)
  int64_t Below(int64_t bound);

 private:
  std::string Clause(bool may_have_place);
  std::string Thing(double adjective_share);
  std::string Name();
  absl::string_view Frequent(absl::Span<const absl::string_view> words);

  uint64_t state_;
  std::set<std::string> taken_;
};

double NeedleLanguage::Uniform() {
  state_ = synth::Mix(state_);
  return synth::Uniform(state_);
}

int64_t NeedleLanguage::Below(int64_t bound) {
  state_ = synth::Mix(state_);
  return synth::Below(state_, bound);
}

// Rank r (from 1) with density r^-0.7: the inverse of its distribution, r = (1 + u (n^0.3 -
// 1))^(1/0.3).
absl::string_view NeedleLanguage::Frequent(absl::Span<const absl::string_view> words) {
  constexpr double kShare = 0.3;
  const double n = static_cast<double>(words.size()) + 1;
  const double rank = std::pow(1 + Uniform() * (std::pow(n, kShare) - 1), 1 / kShare);
  return words[std::min(words.size() - 1, static_cast<size_t>(rank) - 1)];
}

std::string NeedleLanguage::Thing(double adjective_share) {
  if (Uniform() >= adjective_share) return absl::StrCat("the ", Frequent(kNouns));
  const absl::string_view adjective = Frequent(kAdjectives);
  return absl::StrCat("the ", adjective, " ", Frequent(kNouns));
}

std::string NeedleLanguage::Clause(bool may_have_place) {
  const std::string subject = Thing(0.65);
  const std::string adverb = Uniform() < 0.25 ? absl::StrCat(Frequent(kAdverbs), " ") : "";
  const absl::string_view verb = Frequent(kVerbs);
  std::string clause = absl::StrCat(subject, " ", adverb, verb, " ", Thing(0.6));
  if (may_have_place && Uniform() < 0.6) {
    const absl::string_view where = OneOf(kPlaces, Below(std::size(kPlaces)));
    absl::StrAppend(&clause, " ", where, " ", Thing(0.57));
  }
  return clause;
}

std::string NeedleLanguage::Filler() {
  const bool two = Uniform() < 0.14;
  std::string sentence = Clause(!two);
  if (two) absl::StrAppend(&sentence, ", and ", Clause(false));
  sentence[0] = 'T';
  return sentence + ".";
}

std::string NeedleLanguage::Name() {
  const int64_t syllables = Uniform() < 0.5 ? 2 : 3;
  std::string name;
  for (int64_t i = 0; i < syllables; ++i) {
    absl::StrAppend(&name, OneOf(kOnsets, Below(std::size(kOnsets))));
    absl::StrAppend(&name, OneOf(kVowels, Below(std::size(kVowels))));
    if (Uniform() < 0.45) absl::StrAppend(&name, OneOf(kCodas, Below(std::size(kCodas))));
  }
  name[0] = static_cast<char>(name[0] - 'a' + 'A');
  return taken_.insert(name).second ? name : Name();
}

std::string NeedleLanguage::Person() {
  const absl::string_view first = OneOf(kFirstNames, Below(std::size(kFirstNames)));
  return absl::StrCat(first, " ", Name());
}

std::string NeedleLanguage::City() { return Name(); }

std::string NeedleLanguage::Building() {
  const std::string name = Name();
  return absl::StrCat(name, " ", OneOf(kBuildings, Below(std::size(kBuildings))));
}

std::string NeedleLanguage::Number() {
  const std::string number = absl::StrFormat("%06d", Below(1000000));
  return taken_.insert(number).second ? number : Number();
}

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
    if (kind == NeedleKind::kSingle) AddSingle(depth, /*asked=*/true);
    if (kind == NeedleKind::kMultiValue) AddMultiValue(depth);
    if (kind == NeedleKind::kTwoHop) AddTwoHop(depth);
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
