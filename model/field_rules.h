// What:   which fields of a configuration may stand there though nobody reads them: by rules on name and
//         value, so that a field of tomorrow passes if it says that there is nothing, and is refused by
//         name if it could change K, V or the logits. The same for config.json and GGUF metadata.
//           null, false, "", [], {}   there is nothing
//           0                          none of them; not where the name is of a factor, a limit, a base
//           1, or a list of 1          where the name is of a factor that multiplies
//           any value                  what holds while training, and names and ids of tokens
//           a fact                     what the model does anyway, said again
// Edge:   a fact that says something else is refused where nothing else shows it, also false and 0
//         ("use_rope": false). Where tensors show it (biases, norms of q and k), they decide.
//         attention_multiplier and its like replace 1/sqrt(head_dim), so that 1 is no neutral value: they
//         are facts.
//         Also the bounds of what both say.
#pragma once

#include <string>
#include <variant>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "model/config.h"
#include "nlohmann/json_fwd.hpp"

namespace carrel::model {

// Bounds that catch nonsense before it becomes an allocation; far above every published model.
inline constexpr int64_t kMaxLayers = 1024, kMaxHeads = 1024, kMaxHeadDim = 1024;
inline constexpr int64_t kMaxWidth = int64_t{1} << 20, kMaxIntermediate = int64_t{1} << 22;
inline constexpr int64_t kMaxVocab = int64_t{1} << 24, kMaxPositions = int64_t{1} << 30;
inline constexpr int64_t kMaxExperts = 4096, kMaxExpertsPerToken = 256;
inline constexpr double kMaxTheta = 1e30, kMaxFactor = 1e6;  // of rope; well inside float

// Whether a field of config.json is read, or known by its name to change nothing.
bool IsKnownField(Architecture architecture, absl::string_view name);

// Of a value that nobody reads. monostate: null, or an empty text, list or object.
struct Something {};  // whatever else
using FieldValue =
    std::variant<std::monostate, bool, double, std::vector<double>, std::string, Something>;
FieldValue ToFieldValue(const nlohmann::json& value);

struct Fact {
  absl::string_view name;
  std::variant<bool, double, absl::string_view> value;
  bool shown = false;  // tensors show it
};

// What config.json may say again of a model that is read to its end.
std::vector<Fact> FactsOf(const ModelConfig& config);

bool ChangesNothing(absl::string_view name, const FieldValue& value, absl::Span<const Fact> facts);

}  // namespace carrel::model
