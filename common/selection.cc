#include "common/selection.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace carrel::select {
namespace {

template <typename... Parts>
absl::Status Refused(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

// One overload for each of Selection.
struct Check {
  const SelectionBounds& bounds;

  absl::Status operator()(const All&) const { return absl::OkStatus(); }
  absl::Status operator()(const Range& range) const {
    RETURN_IF_ERROR(MaxRows(range.max_rows));
    if (range.below > 0 && std::isfinite(range.below)) return absl::OkStatus();
    return Refused("range=", range.below, " is not a positive number");
  }
  absl::Status operator()(const Mass& mass) const {
    RETURN_IF_ERROR(MaxRows(mass.max_rows));
    if (mass.share > 0 && mass.share <= 1) return absl::OkStatus();
    return Refused("mass=", mass.share, " is outside (0, 1]");
  }
  absl::Status operator()(const TopK& top_k) const {
    if (top_k.rows < 1) return Refused("top_k=", top_k.rows, " is less than 1");
    if (top_k.rows > bounds.max_top_k) {
      return Refused("top_k=", top_k.rows, " exceeds max_top_k=", bounds.max_top_k);
    }
    if (top_k.rows > bounds.tokens) {
      return Refused("top_k=", top_k.rows, " exceeds the context's tokens=", bounds.tokens);
    }
    const auto heads = static_cast<int64_t>(top_k.of_head.size());
    if (heads > 0 && bounds.kv_heads > 0 && heads != bounds.kv_heads) {
      return Refused("head_top_k has ", heads, " values, the context ", bounds.kv_heads,
                     " KV heads");
    }
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t rows = top_k.of_head[static_cast<size_t>(head)];
      if (rows >= 1 && rows <= top_k.rows) continue;
      return Refused("head_top_k=", rows, " of kv_head ", head,
                     " is outside [1, top_k=", top_k.rows, "]");
    }
    return absl::OkStatus();
  }
  absl::Status MaxRows(int64_t max_rows) const {
    if (max_rows < 0) return Refused("max_rows=", max_rows, " is outside [0, infinity)");
    if (max_rows <= bounds.max_top_k) return absl::OkStatus();
    return Refused("max_rows=", max_rows, " is outside [1, max_top_k=", bounds.max_top_k, "]");
  }
};

}  // namespace

int64_t MostRows(const Selection& selection, int64_t zone_rows, int64_t allowed) {
  int64_t rows = zone_rows;
  if (const auto* top_k = std::get_if<TopK>(&selection)) rows = top_k->rows;
  if (const auto* range = std::get_if<Range>(&selection)) rows = range->max_rows;
  if (const auto* mass = std::get_if<Mass>(&selection)) rows = mass->max_rows;
  return std::min(rows == 0 ? allowed : rows, zone_rows);
}

absl::Status ValidateSelection(const Selection& selection, const SelectionBounds& bounds) {
  return std::visit(Check{bounds}, selection);
}

}  // namespace carrel::select
