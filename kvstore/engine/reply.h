// What:   the answer to a request, taken piece by piece, so that a large one never lies in memory
//         whole: rows are verified and pointed at when a piece is taken.
//         What is pointed at may change on disk: pieces are used only once Confirm said so.
// Errors: DataLoss a row that is not what was written, or files that cannot be read.
// Threads: one at a time.
// Ownership: keeps rows mapped, and its request in flight, while it lives.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
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
  // After the pieces were copied: true if their bytes were right all the while. False: the files
  // changed; drop the copy, the next call of Next makes the same pieces of the files as they are.
  virtual absl::StatusOr<bool> Confirm() = 0;
  virtual const QueryStatistics& statistics() const = 0;  // of a query
};

// The next pieces, of about max_bytes, copied (once or several times) until Confirm says that they are right.
// DataLoss: their files change too often.
absl::Status TakePieces(Reply& reply, int64_t max_bytes,
                        absl::FunctionRef<void(std::vector<Piece>&)> copy);
// The same as a part that lives on its own.
absl::Status TakePart(Reply& reply, int64_t max_bytes, retrieval::Part& part);

}  // namespace carrel::kvstore
