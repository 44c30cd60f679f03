#include "kvstore/engine/fetch_reply.h"

#include <algorithm>
#include <utility>

#include "common/status.h"

namespace carrel::kvstore {

FetchReply::FetchReply(FetchRequest request, Session::Slot slot)
    : request_(std::move(request)), slot_(std::move(slot)) {}

absl::Status FetchReply::Run() {
  if (slot_.session().cancelled()) return absl::CancelledError("fetch rows: cancelled");
  RETURN_IF_ERROR(Annotate(CheckDeadline(request_.deadline), "fetch rows"));
  kv_heads_ = request_.kv_heads;
  for (int32_t h = 0; request_.kv_heads.empty() && h < context().shape().kv_heads; ++h) {
    kv_heads_.push_back(KvHead(h));
  }
  rows_ = request_.by_ids ? static_cast<int64_t>(request_.ids.size()) : request_.range.rows();
  ASSIGN_OR_RETURN(seen_, context().Look(request_.layer));
  return OpenHeads();
}

absl::Status FetchReply::OpenHeads() {
  heads_.clear();
  for (KvHead kv_head : kv_heads_) {
    ASSIGN_OR_RETURN(heads_.emplace_back(), context().Head(request_.layer, kv_head));
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> FetchReply::Confirm() {
  ASSIGN_OR_RETURN(const int64_t now, context().Look(request_.layer));
  if (now == seen_) return true;
  seen_ = now;
  next_head_ = first_head_;
  next_row_ = first_row_;
  RETURN_IF_ERROR(OpenHeads());
  return false;
}

absl::Status FetchReply::Next(int64_t max_bytes, std::vector<Piece>& pieces) {
  pieces.clear();
  first_head_ = next_head_;
  first_row_ = next_row_;
  slot_.session().context()->Touch(request_.layer);
  int64_t room = max_bytes;
  while (!done()) {
    const MappedHead& rows = *heads_[next_head_];
    const int64_t row_bytes = 2 * rows.keys.row_bytes();
    if (!pieces.empty() && room < row_bytes) break;
    Piece piece;
    piece.kv_head = kv_heads_[next_head_];
    piece.first_row = next_row_;
    piece.rows = std::clamp<int64_t>(room / row_bytes, 1, rows_ - next_row_);
    piece.k.reserve(piece.rows);
    piece.v.reserve(piece.rows);
    if (!request_.by_ids) {
      const RowRange range{request_.range.begin + next_row_,
                           request_.range.begin + next_row_ + piece.rows};
      RETURN_IF_ERROR(rows.keys.Verify(range));
      RETURN_IF_ERROR(rows.values.Verify(range));
    } else {
      RETURN_IF_ERROR(rows.keys.VerifyRows(&request_.ids[next_row_], piece.rows));
      RETURN_IF_ERROR(rows.values.VerifyRows(&request_.ids[next_row_], piece.rows));
    }
    for (int64_t j = next_row_; j < next_row_ + piece.rows; ++j) {
      const Position id = request_.by_ids ? request_.ids[j] : request_.range.begin + j;
      piece.k.push_back(rows.keys.Address(id));
      piece.v.push_back(rows.values.Address(id));
    }
    room -= piece.rows * row_bytes;
    next_row_ += piece.rows;
    if (next_row_ == rows_) {
      next_row_ = 0;
      ++next_head_;
    }
    pieces.push_back(std::move(piece));
  }
  return absl::OkStatus();
}

}  // namespace carrel::kvstore
