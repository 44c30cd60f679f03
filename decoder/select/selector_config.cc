#include "decoder/select/selector_config.h"

#include <functional>
#include <limits>
#include <map>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/named_settings.h"
#include "common/status.h"

namespace carrel::decoder {
namespace {

constexpr std::pair<absl::string_view, SelectorKind> kKinds[] = {
    {"exact", SelectorKind::kExact},
    {"hip", SelectorKind::kHip},
    {"infinitehip", SelectorKind::kInfiniteHip},
    {"hash", SelectorKind::kHash},
    {"channels", SelectorKind::kChannels}};

using Setter = std::function<absl::Status(absl::string_view)>;
using Setters = std::map<std::string, Setter, std::less<>>;

absl::Status Refused(absl::string_view value, absl::string_view wanted) {
  return absl::InvalidArgumentError(absl::StrCat("\"", value, "\" is not ", wanted));
}

template <typename T>
Setter Number(T& to, int64_t least, int64_t most) {
  return [&to, least, most](absl::string_view text) {
    int64_t value = 0;
    if (!absl::SimpleAtoi(text, &value) || value < least || value > most) {
      return Refused(text, absl::StrCat("a number in ", least, " .. ", most));
    }
    to = static_cast<T>(value);
    return absl::OkStatus();
  };
}

Setter Oversample(int64_t& to) {
  return [&to](absl::string_view text) {
    if (text == "auto") {
      to = kAutoOversample;
      return absl::OkStatus();
    }
    return Number(to, 1, kMaxOversample)(text);
  };
}

template <typename T>
Setter OneOf(T& to, std::vector<std::pair<std::string, T>> words) {
  return [&to, words = std::move(words)](absl::string_view text) {
    std::vector<std::string> known;
    for (const auto& [word, value] : words) {
      if (text == word) {
        to = value;
        return absl::OkStatus();
      }
      known.push_back(word);
    }
    return Refused(text, absl::StrCat("one of ", absl::StrJoin(known, ", ")));
  };
}

Setter Mask(SelectorMask& mask) {
  return OneOf<SelectorMask>(
      mask, {{"kv-head", SelectorMask::kKvHead}, {"q-head", SelectorMask::kQHead}});
}

Setters HipSetters(HipConfig& hip) {
  return {{"block_q", Number(hip.block_q, 1, 1024)},
          {"block_k", Number(hip.block_k, 1, 1024)},
          {"refresh", Number(hip.refresh, 1, 1024)},
          {"ensemble", Number(hip.ensemble, 1, 64)},
          {"votes", Number(hip.votes, 1, 64)},
          {"jitter",
           [&hip](absl::string_view text) {
             const bool good =
                 absl::SimpleAtod(text, &hip.jitter) && hip.jitter >= 0 && hip.jitter <= 1;
             return good ? absl::OkStatus() : Refused(text, "a number in 0 .. 1");
           }},
          {"widen", Number(hip.widen, 0, 1024)},
          {"seed", Number(hip.seed, 0, std::numeric_limits<int64_t>::max())}};
}

Setters HashSetters(HashConfig& hash) {
  return {{"codes", OneOf<HashSource>(hash.source, {{"auto", HashSource::kAuto},
                                                    {"random", HashSource::kRandom},
                                                    {"stored", HashSource::kStored}})},
          {"query", OneOf<HashQuery>(hash.query, {{"weights", HashQuery::kWeights},
                                                  {"signs", HashQuery::kSigns}})},
          {"bits", Number(hash.bits, 32, 256)},
          {"seed", Number(hash.seed, 0, std::numeric_limits<int64_t>::max())},
          {"oversample", Oversample(hash.oversample)}};
}

struct Presets {
  std::vector<int64_t> refresh = {16, 8, 4};
  bool scaled = false;
  bool given = false;  // either of them
};

// "CHUNK:SURVIVORS:REFRESH" of each stage, joined by "/"; survivors in tokens, or "Nx" budgets.
absl::Status ParseStages(absl::string_view text, std::vector<InfiniteHipStage>& stages) {
  constexpr absl::string_view kWanted =
      "stages CHUNK:SURVIVORS:REFRESH/.., survivors a number or Nx, the last 1x";
  stages.clear();
  for (absl::string_view one : absl::StrSplit(text, '/')) {
    const std::vector<absl::string_view> parts = absl::StrSplit(one, ':');
    InfiniteHipStage stage;
    if (parts.size() != 3) return Refused(text, kWanted);
    absl::string_view survivors = parts[1];
    const bool multiple = absl::ConsumeSuffix(&survivors, "x");
    int64_t& to = multiple ? stage.multiple : stage.survivors;
    const bool numbers = absl::SimpleAtoi(parts[0], &stage.chunk) &&
                         absl::SimpleAtoi(survivors, &to) &&
                         absl::SimpleAtoi(parts[2], &stage.refresh);
    constexpr int64_t kMost = int64_t{1} << 20;
    for (const int64_t value : {stage.chunk, to, stage.refresh}) {
      if (!numbers || value < 1 || value > kMost) return Refused(text, kWanted);
    }
    stages.push_back(stage);
  }
  return stages.back().multiple == 1 ? absl::OkStatus() : Refused(text, kWanted);
}

Setters InfiniteHipSetters(InfiniteHipConfig& config, Presets& presets) {
  using Refresh = std::vector<int64_t>;
  return {
      {"preset",
       OneOf<Refresh>(presets.refresh,
                      {{"default", {16, 8, 4}}, {"fast", {32, 16, 8}}, {"flash", {96, 24, 8}}})},
      {"survivors", OneOf<bool>(presets.scaled, {{"published", false}, {"scaled", true}})},
      {"stages", [&config](absl::string_view text) { return ParseStages(text, config.stages); }},
      {"block_q", Number(config.block_q, 1, 1024)}};
}

// random: bits or seed are given, which random codes alone have.
absl::Status FinishHash(bool random, HashConfig& hash) {
  if (hash.bits % 32 != 0) {
    return absl::InvalidArgumentError(absl::StrCat("bits=", hash.bits, " is not a multiple of 32"));
  }
  if (random && hash.source == HashSource::kStored) {
    return absl::InvalidArgumentError(
        "stored codes have their own bits; bits and seed go with random");
  }
  if (random) hash.source = HashSource::kRandom;
  return absl::OkStatus();
}

absl::Status CheckHip(const HipConfig& hip) {
  if (hip.votes > hip.ensemble) {
    return absl::InvalidArgumentError(
        absl::StrCat("votes=", hip.votes, " exceeds ensemble=", hip.ensemble));
  }
  return absl::OkStatus();
}

}  // namespace

absl::string_view SelectorKindName(SelectorKind kind) {
  for (const auto& [name, known] : kKinds) {
    if (known == kind) return name;
  }
  return "unknown";
}

int64_t OversampleOf(const SelectorConfig& config, int64_t automatic) {
  const SelectorConfig resolved = WithOversample(config, automatic);
  if (config.kind == SelectorKind::kHash) return resolved.hash.oversample;
  return config.kind == SelectorKind::kChannels ? resolved.channels.oversample : 1;
}

SelectorConfig WithOversample(SelectorConfig config, int64_t automatic) {
  if (config.channels.oversample == kAutoOversample) config.channels.oversample = automatic;
  if (config.hash.oversample == kAutoOversample && automatic == 1) config.hash.oversample = 1;
  return config;
}

std::string DescribeSelector(const SelectorConfig& config) {
  constexpr absl::string_view kSources[] = {"auto", "random", "stored"};
  constexpr absl::string_view kScores[] = {"q", "k", "qk"};
  const auto oversample = [](int64_t x) {
    return absl::StrCat(",oversample=", x == kAutoOversample ? "auto" : absl::StrCat(x));
  };
  const absl::string_view name = SelectorKindName(config.kind);
  switch (config.kind) {
    case SelectorKind::kExact:
      return config.exact.scan == ExactScan::kAuto
                 ? std::string(name)
                 : absl::StrCat(
                       name, config.exact.scan == ExactScan::kInt8 ? ":scan=int8" : ":scan=stored");
    case SelectorKind::kHash:
      return absl::StrCat(
          name, ":codes=", kSources[static_cast<size_t>(config.hash.source)],
          config.hash.source == HashSource::kRandom ? absl::StrCat(",bits=", config.hash.bits) : "",
          config.hash.query == HashQuery::kSigns ? ",query=signs" : "",
          oversample(config.hash.oversample));
    case SelectorKind::kChannels:
      return absl::StrCat(name, ":by=", kScores[static_cast<size_t>(config.channels.by)],
                          ",share=", config.channels.share, oversample(config.channels.oversample));
    case SelectorKind::kHip:
    case SelectorKind::kInfiniteHip:
      return absl::StrCat(name, config.mask == SelectorMask::kQHead ? ":mask=q-head" : "");
  }
  return std::string(name);
}

absl::StatusOr<SelectorConfig> ParseSelector(absl::string_view text) {
  const NamedSettings split = SplitNamedSettings(text);
  SelectorConfig config;
  ASSIGN_OR_RETURN(config.kind, ValueNamed("method", text, split.name, kKinds));
  Setters setters;
  Presets presets;
  switch (config.kind) {
    case SelectorKind::kExact:
      setters = {{"scan", OneOf<ExactScan>(config.exact.scan, {{"auto", ExactScan::kAuto},
                                                               {"stored", ExactScan::kStored},
                                                               {"int8", ExactScan::kInt8}})}};
      break;
    case SelectorKind::kHip:
      setters = HipSetters(config.hip);
      setters["mask"] = Mask(config.mask);
      break;
    case SelectorKind::kInfiniteHip:
      setters = InfiniteHipSetters(config.infinite_hip, presets);
      setters["mask"] = Mask(config.mask);
      break;
    case SelectorKind::kHash:
      setters = HashSetters(config.hash);
      break;
    case SelectorKind::kChannels:
      setters = {{"by", OneOf<ChannelScore>(config.channels.by, {{"q", ChannelScore::kQ},
                                                                 {"k", ChannelScore::kK},
                                                                 {"qk", ChannelScore::kQK}})},
                 {"share", Number(config.channels.share, 4, 16)},
                 {"oversample", Oversample(config.channels.oversample)}};
      break;
  }
  bool random_given = false, stages_given = false;
  for (const auto& [key, value] : split.settings) {
    const auto setter = setters.find(key);
    if (setter == setters.end()) return NoSuchParameter("method", text, split.name, key, setters);
    RETURN_IF_ERROR(Annotate(setter->second(value), absl::StrCat("method=", text, ": ", key)));
    random_given = random_given || key == "bits" || key == "seed";
    stages_given = stages_given || key == "stages";
    presets.given = presets.given || key == "preset" || key == "survivors";
  }
  RETURN_IF_ERROR(Annotate(CheckHip(config.hip), absl::StrCat("method=", text)));
  if (config.kind == SelectorKind::kHash) {
    RETURN_IF_ERROR(Annotate(FinishHash(random_given, config.hash), absl::StrCat("method=", text)));
  }
  if (stages_given) {
    if (!presets.given) return config;
    return absl::InvalidArgumentError(
        absl::StrCat("method=", text, ": stages stand instead of preset and survivors"));
  }
  for (size_t i = 0; i < config.infinite_hip.stages.size(); ++i) {
    InfiniteHipStage& stage = config.infinite_hip.stages[i];
    stage.refresh = presets.refresh[i];
    if (!presets.scaled) continue;
    stage.survivors = 0;
    stage.multiple = int64_t{1} << (2 * (config.infinite_hip.stages.size() - 1 - i));
  }
  return config;
}

}  // namespace carrel::decoder
