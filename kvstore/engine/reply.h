// What:   the answer to a request, taken piece by piece, so that a large one never lies in memory
//         whole: rows are verified and pointed at when a piece is taken.
// Errors: DataLoss a row that is not what was written.
// Threads: one at a time.
// Ownership: keeps rows mapped, and its request in flight, while it lives.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/ids.h"
#include "kvstore/engine/request.h"

namespace carrel::kvstore {

// What a piece holds and in which shapes.
struct ReplyFormat {
  AttentionShape shape;
  Want want = Want::kRows;
};

class Reply {
 public:
  enum class Kind : uint8_t { kQuery = 0, kFetch = 1 };

  virtual ~Reply() = default;
  virtual Kind kind() const = 0;
  virtual Layer layer() const = 0;
  virtual ReplyFormat format() const = 0;
  virtual bool done() const = 0;  // no piece is left
  // Replaces pieces by the next ones, of about max_bytes in sum; at least one row, or none if done.
  virtual absl::Status Next(int64_t max_bytes, std::vector<Piece>& pieces) = 0;
  virtual const QueryStatistics& statistics() const = 0;  // of a query
};

}  // namespace carrel::kvstore
