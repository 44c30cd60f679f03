// What:   which method chooses the rows of a zone in this host's memory, and its parameters.
//         Written "NAME" or "NAME:key=value,key=value"; the number of rows is the layer's budget.
// Source: docs/methods.md names paper and section of each.
// Errors: InvalidArgument an unknown name, key or a value outside its bounds: names it.
#pragma once

#include <any>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace carrel::decoder {

enum class SelectorKind : uint8_t {
#define CARREL_METHOD(Name) k##Name,
#define CARREL_GPU_METHOD(Name) CARREL_METHOD(Name)
#include "decoder/select/methods.def"
#undef CARREL_METHOD
#undef CARREL_GPU_METHOD
};

// A budget: every row of the zone.
inline constexpr int64_t kAllRows = -1;

// Who shares a choice of rows. kKvHead: the q heads of a KV head, by their maximum;
// kQHead: none, as in the papers; a group then attends to as many times the rows as it has q heads.
enum class SelectorMask : uint8_t { kKvHead = 0, kQHead = 1 };

// Candidates that codes and labels choose per row of the budget; exact scores choose rows among
// them. 1: codes and labels alone choose. Auto: of labels kOversample; of codes kHashOversample, but at
// least kLeastCandidates in all, on a GPU as many of these as it re-scores.
inline constexpr int64_t kAutoOversample = 0;
inline constexpr int64_t kOversample = 16;
inline constexpr int64_t kHashOversample = 2;
inline constexpr int64_t kLeastCandidates = 4096;
inline constexpr int64_t kMaxOversample = 64;

// kStored: codes and directions of the context's code index, which then sets the bits. kAuto: those
// where the context has them, random ones otherwise.
enum class HashSource : uint8_t { kAuto = 0, kRandom = 1, kStored = 2 };
// What codes of keys are compared with: the query's products with what each bit stands for, or the signs
// of these alone (the paper's).
enum class HashQuery : uint8_t { kWeights = 0, kSigns = 1 };
struct HashConfig {
  HashSource source = HashSource::kAuto;
  HashQuery query = HashQuery::kWeights;
  int64_t bits = 128;  // of random codes: a multiple of 32 in 32 .. 256
  uint64_t seed = 0;   // of random codes
};

struct SelectorConfig {
  SelectorKind kind = SelectorKind::kExact;
  SelectorMask mask = SelectorMask::kKvHead;
  int64_t oversample =
      kAutoOversample;  // or 1 .. kMaxOversample; of methods that take a second look
  HashConfig hash;
  std::any options;  // of a method of the lab, its own (lab/methods/options.h); none: its defaults
};

// exact
// hash:codes=auto|random|stored,query=weights|signs,bits=,seed=,oversample=auto|N
//   bits or seed: codes are random
// One of the lab, where this program has it (lab/README.md).
absl::StatusOr<SelectorConfig> ParseSelector(absl::string_view text);
// Where nobody names a method: exact; where all keys would cross a bus for each token (a zone in host
// memory that a GPU attends to), hash, of which the candidates' alone do (decision 074).
SelectorConfig UsualSelector(bool keys_cross_bus);
absl::string_view SelectorKindName(SelectorKind kind);

// The same config with what kAutoOversample is here instead of it; of codes only if that is 1.
SelectorConfig WithOversample(SelectorConfig config, int64_t automatic);

// What is reported: the method, and of hash and channels what chooses candidates, and how many.
std::string DescribeSelector(const SelectorConfig& config);

}  // namespace carrel::decoder
