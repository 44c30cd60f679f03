// What:   which efforts an audit measures: the effort that a search of an index uses unless told
//         otherwise, and ladders of powers of two around it.
// Units:  of effort: see kvstore::IndexParams. hnsw, graph: beam width; ivf: lists probed; code:
//         rows scored exactly; flat has none (0 stands for it).
#pragma once

#include <cstdint>
#include <vector>

#include "absl/strings/string_view.h"
#include "kvstore/index/index.h"

namespace carrel::audit {

inline constexpr int kLadderHalvings = 3;   // steps of a ladder below the default ...
inline constexpr int kLadderDoublings = 3;  // ... and above

bool HasEffort(kvstore::IndexKind kind);
absl::string_view EffortWord(kvstore::IndexKind kind);  // "beam width", "lists probed", ...

// What effort 0 of a search comes to; 0 for flat.
int32_t OwnEffort(const kvstore::IndexParams& params, int64_t top_k, int64_t rows);

// Below it a search does not work less; 0 for flat.
int32_t LeastEffort(kvstore::IndexKind kind, int64_t top_k);

// kLadderHalvings + 1 + kLadderDoublings efforts, own * 2^i, kept inside [least, kMaxEffort]: heads
// of different kinds have ladders of the same length, step for step.
std::vector<int32_t> Ladder(const kvstore::IndexParams& params, int64_t top_k, int64_t rows);

}  // namespace carrel::audit
