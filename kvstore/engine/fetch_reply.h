// What:   rows of a layer as they are stored, head after head, in the order asked.
#pragma once

#include <memory>
#include <vector>

#include "kvstore/engine/reply.h"
#include "kvstore/engine/session.h"

namespace carrel::kvstore {

class FetchReply : public Reply {
 public:
  FetchReply(FetchRequest request, Session::Slot slot);
  absl::Status Run();  // once, first

  Kind kind() const override { return Kind::kFetch; }
  Layer layer() const override { return request_.layer; }
  ReplyFormat format() const override { return {slot_.session().context()->shape(), Want::kRows}; }
  bool done() const override { return next_head_ == heads_.size(); }
  absl::Status Next(int64_t max_bytes, std::vector<Piece>& pieces) override;
  absl::StatusOr<bool> Confirm() override;
  const QueryStatistics& statistics() const override { return statistics_; }

 private:
  const OpenContext& context() const { return *slot_.session().context(); }
  absl::Status OpenHeads();

  const FetchRequest request_;
  const Session::Slot slot_;
  std::vector<KvHead> kv_heads_;
  std::vector<std::shared_ptr<const MappedHead>> heads_;  // of kv_heads_
  const QueryStatistics statistics_;
  int64_t rows_ = 0;
  int64_t seen_ = 0;                       // what Look gave when heads_ were opened
  size_t next_head_ = 0, first_head_ = 0;  // of the next pieces, of those handed out last
  int64_t next_row_ = 0, first_row_ = 0;
};

}  // namespace carrel::kvstore
