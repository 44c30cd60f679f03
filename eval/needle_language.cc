#include "eval/needle_language.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
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

}  // namespace

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

}  // namespace carrel::eval
