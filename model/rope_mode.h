// What:   where keys and queries stand while attention is computed.
//         kTrained: where the document has them, as the model was trained. kInfiniteHip: at
//         positions that attention gives, so that none exceeds what the model was trained for
//         (prefill/sparse_attention.h, decoder/zone/repositioned_attention.h); keys are stored before
//         RoPE then.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace carrel::model {

enum class Rope : uint8_t { kTrained = 0, kInfiniteHip = 1 };

// InfiniteHiP: while rows are chosen, keys of the first layers stand where the number of their
// chunk says, those of later layers right behind what is attended anyway.
inline constexpr int32_t kChunkIndexedLayers = 3;

inline absl::string_view RopeName(Rope rope) {
  return rope == Rope::kTrained ? "trained" : "infinitehip";
}

// InvalidArgument another name.
inline absl::StatusOr<Rope> ParseRope(absl::string_view name) {
  if (name == RopeName(Rope::kTrained)) return Rope::kTrained;
  if (name == RopeName(Rope::kInfiniteHip)) return Rope::kInfiniteHip;
  return absl::InvalidArgumentError(
      absl::StrCat("rope=", name, " is none of trained, infinitehip"));
}

}  // namespace carrel::model
