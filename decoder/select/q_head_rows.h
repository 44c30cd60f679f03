// What:   a context's rows as if every q head had a KV head of its own: what mask=q-head chooses from
//         and attends to. Q head h reads the rows of KV head h / group.
// Edge:   nothing here estimates the rest: what no q head of a group chose is another set for each.
// Ownership: keeps the rows.   Threads: any.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "decoder/select/host_rows.h"

namespace carrel::decoder {

// The shape of such heads.
inline AttentionShape PerQHead(AttentionShape shape) {
  shape.kv_heads = shape.q_heads;
  return shape;
}

class QHeadRows final : public HostRows {
 public:
  QHeadRows(std::shared_ptr<const HostRows> rows, int64_t group)
      : rows_(std::move(rows)), group_(static_cast<int32_t>(group)) {}

  absl::Status CheckUnchanged() const override { return rows_->CheckUnchanged(); }
  int64_t tokens() const override { return rows_->tokens(); }
  const HeadView& At(Layer layer, KvHead q_head) const override {
    return rows_->At(layer, KvHead(q_head.value() / group_));
  }
  absl::StatusOr<std::vector<float>> SampledQueries(Layer, KvHead) const override {
    return absl::FailedPreconditionError("rows per q head calibrate nothing");
  }
  absl::StatusOr<HeadCodes> StoredCodes(Layer, KvHead) const override {
    return absl::FailedPreconditionError("rows per q head have no codes");
  }

 private:
  const std::shared_ptr<const HostRows> rows_;
  const int32_t group_;
};

}  // namespace carrel::decoder
