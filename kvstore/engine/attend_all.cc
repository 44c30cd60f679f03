#include "kvstore/engine/attend_all.h"

#include <algorithm>
#include <cmath>

#include "common/status.h"
#include "kernels/attention/merge_states/merge_states.h"
#include "kernels/attention/sparse_attention/sparse_attention.h"

namespace carrel::kvstore {
namespace {

void FillAddresses(const Rows& rows, RowRange range, std::vector<const void*>& addresses) {
  addresses.clear();
  rows.ForEachPiece(range, [&](Position, const void* at, int64_t count) {
    for (int64_t j = 0; j < count; ++j) {
      addresses.push_back(static_cast<const char*>(at) + j * rows.row_bytes());
    }
  });
}

// Parts that keep a thread busy enough until the last ones.
constexpr int64_t kPartsPerThread = 4;
// Each block has a state of its own: so few tokens, so few blocks.
constexpr int64_t kCutTokens = 8, kMostBlocks = 128;

int64_t PartsOf(RowRange zone, int64_t rows) { return (zone.rows() + rows - 1) / rows; }

bool MayCutSpans(RowRange zone, int64_t tokens) {
  return tokens <= kCutTokens && PartsOf(zone, kAttendBlockRows) <= kMostBlocks;
}

}  // namespace

int64_t AttendSpanLength(RowRange zone) {
  const int64_t even = (zone.rows() + kAttendMaxSpans - 1) / kAttendMaxSpans;
  const int64_t whole_blocks = (even + kAttendBlockRows - 1) / kAttendBlockRows * kAttendBlockRows;
  return std::max(kAttendSpanRows, whole_blocks);
}

std::vector<RowRange> AttendCut(RowRange zone, int64_t tokens, int64_t kv_heads, int threads) {
  const int64_t length = AttendSpanLength(zone);
  const bool enough = PartsOf(zone, length) * kv_heads >= kPartsPerThread * threads;
  const int64_t rows = !enough && MayCutSpans(zone, tokens) ? kAttendBlockRows : length;
  std::vector<RowRange> cut;
  for (Position at = zone.begin; at < zone.end; at += rows) {
    cut.push_back({at, std::min(zone.end, at + rows)});
  }
  return cut;
}

int64_t AttendMostCut(RowRange zone, int64_t tokens) {
  return PartsOf(zone, MayCutSpans(zone, tokens) ? kAttendBlockRows : AttendSpanLength(zone));
}

absl::Status AttendSpan(const AttendSpanParams& p) {
  const Rows& keys = p.rows->keys;
  const Rows& values = p.rows->values;
  const int64_t d = keys.head_dim();
  thread_local std::vector<const void*> k, v;
  thread_local std::vector<float> scores, state;
  scores.resize(static_cast<size_t>(p.group * kAttendBlockRows));
  state.resize(static_cast<size_t>(p.group * (d + 1)));
  for (int64_t t = 0; t < p.tokens; ++t) {
    std::fill_n(p.out + t * p.out_stride, p.group * d, 0.0f);
    std::fill_n(p.lse + t * p.lse_stride, p.group, -INFINITY);
  }
  keys.AskAhead(p.span);
  values.AskAhead(p.span);
  for (Position at = p.span.begin; at < p.span.end; at += kAttendBlockRows) {
    if (p.cancelled->load(std::memory_order_relaxed)) return absl::CancelledError("cancelled");
    const RowRange block{at, std::min(p.span.end, at + kAttendBlockRows)};
    RETURN_IF_ERROR(keys.Verify(block));
    RETURN_IF_ERROR(values.Verify(block));
    FillAddresses(keys, block, k);
    FillAddresses(values, block, v);
    for (int64_t t = 0; t < p.tokens; ++t) {
      kernels::SparseAttentionParams attention;
      attention.q = p.queries + t * p.query_stride;
      attention.group = p.group;
      attention.k = k.data();
      attention.v = v.data();
      attention.rows = block.rows();
      attention.head_dim = d;
      attention.scale = p.scale;
      attention.scores = scores.data();
      attention.out = state.data();
      attention.lse = state.data() + p.group * d;
      kernels::SparseAttention(attention);
      kernels::MergeStates(p.out + t * p.out_stride, p.lse + t * p.lse_stride, attention.out,
                           attention.lse, p.group, d);
    }
  }
  return absl::OkStatus();
}

}  // namespace carrel::kvstore
