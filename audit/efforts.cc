#include "audit/efforts.h"

#include <algorithm>

#include "kvstore/index/index_type.h"

namespace carrel::audit {

using kvstore::IndexKind;
using kvstore::kMaxEffort;

bool HasEffort(IndexKind kind) { return !kvstore::IndexTypeOf(kind).exact(); }

absl::string_view EffortWord(IndexKind kind) { return kvstore::IndexTypeOf(kind).effort_word(); }

int32_t LeastEffort(IndexKind kind, int64_t top_k) {
  if (!HasEffort(kind)) return 0;
  return static_cast<int32_t>(
      std::clamp<int64_t>(kvstore::IndexTypeOf(kind).LeastEffort(top_k), 1, kMaxEffort));
}

int32_t OwnEffort(const kvstore::IndexParams& params, int64_t top_k, int64_t rows) {
  if (!HasEffort(params.kind)) return 0;
  return static_cast<int32_t>(std::clamp<int64_t>(kvstore::EffortOf(params, top_k, rows),
                                                  LeastEffort(params.kind, top_k), kMaxEffort));
}

std::vector<int32_t> Ladder(const kvstore::IndexParams& params, int64_t top_k, int64_t rows) {
  const int64_t least = LeastEffort(params.kind, top_k);
  const int64_t own = OwnEffort(params, top_k, rows);
  std::vector<int32_t> ladder;
  for (int i = -kLadderHalvings; i <= kLadderDoublings; ++i) {
    const int64_t effort = i < 0 ? own >> -i : own << i;
    ladder.push_back(static_cast<int32_t>(
        HasEffort(params.kind) ? std::clamp<int64_t>(effort, least, kMaxEffort) : 0));
  }
  return ladder;
}

}  // namespace carrel::audit
