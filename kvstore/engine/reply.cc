#include "kvstore/engine/reply.h"

#include <cstring>

#include "common/status.h"
#include "kvstore/engine/open_context.h"

namespace carrel::kvstore {
namespace {

// Copies what the pieces point at to where the part keeps it.
void Own(int64_t row_bytes, std::vector<Piece>& pieces, retrieval::Part& part) {
  int64_t floats = 0, rows = 0, numbers = 0;
  for (Piece& piece : pieces) {
    for (const auto* span : {&piece.out, &piece.lse, &piece.zone_lse, &piece.rest})
      floats += static_cast<int64_t>(span->size());
    rows += static_cast<int64_t>(piece.k.size() + piece.v.size());
    numbers += static_cast<int64_t>(2 * piece.ids.size() + piece.scores.size());
  }
  part.floats.clear();
  part.floats.reserve(static_cast<size_t>(floats));
  const auto bytes = std::make_shared_for_overwrite<char[]>(static_cast<size_t>(rows * row_bytes));
  char* to = bytes.get();
  for (Piece& piece : pieces) {
    for (auto* span : {&piece.out, &piece.lse, &piece.zone_lse, &piece.rest}) {
      const float* const begin = part.floats.data() + part.floats.size();
      part.floats.insert(part.floats.end(), span->begin(), span->end());
      *span = {begin, span->size()};
    }
    for (auto* of : {&piece.k, &piece.v}) {
      for (const void*& row : *of) {
        std::memcpy(to, row, static_cast<size_t>(row_bytes));
        row = to;
        to += row_bytes;
      }
    }
  }
  part.rows = bytes;
  part.bytes = 4 * (floats + numbers) + rows * row_bytes;
  part.pieces.swap(pieces);
}

}  // namespace

absl::Status TakePieces(Reply& reply, int64_t max_bytes,
                        absl::FunctionRef<void(std::vector<Piece>&)> copy) {
  std::vector<Piece> pieces;
  for (int attempt = 0; attempt < OpenContext::kMostAttempts; ++attempt) {
    absl::Status status = reply.Next(max_bytes, pieces);
    if (status.ok()) copy(pieces);
    // Whatever came of it: of files that changed meanwhile it says nothing.
    ASSIGN_OR_RETURN(const bool confirmed, reply.Confirm());
    if (confirmed) return status;
  }
  return absl::DataLossError(
      absl::StrCat("layer ", reply.layer().value(), ": the files of the context changed ",
                   OpenContext::kMostAttempts, " times while a reply was made of them"));
}

absl::Status TakePart(Reply& reply, int64_t max_bytes, retrieval::Part& part) {
  const int64_t row_bytes = int64_t{reply.format().shape.head_dim} * 2;
  RETURN_IF_ERROR(TakePieces(reply, max_bytes,
                             [&](std::vector<Piece>& pieces) { Own(row_bytes, pieces, part); }));
  part.last = reply.done();
  if (part.last && reply.kind() == Reply::Kind::kQuery) part.statistics = reply.statistics();
  return absl::OkStatus();
}

}  // namespace carrel::kvstore
