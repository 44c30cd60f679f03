// What:   requests of a session, and until when each is waited for: the wire's are converted in
//         kvstore/service/convert.
#pragma once

#include <chrono>
#include <memory>

#include "absl/status/status.h"
#include "retrieval/query.h"
#include "retrieval/session.h"

namespace carrel::kvstore {

// Until when somebody waits for an answer, by a clock that nobody sets.
using Deadline = std::chrono::steady_clock::time_point;
inline constexpr Deadline kNoDeadline = Deadline::max();

// DeadlineExceeded once it has passed.
inline absl::Status CheckDeadline(Deadline deadline) {
  if (deadline == kNoDeadline || std::chrono::steady_clock::now() < deadline) {
    return absl::OkStatus();
  }
  return absl::DeadlineExceededError("nobody waits for it any more: its time is over");
}

using retrieval::FingerprintFields;
using retrieval::Piece;
using retrieval::QueryStatistics;
using retrieval::Want;

struct OpenRequest : retrieval::OpenRequest {
  // Whose turn the session's requests take (WorkQueue); null: of those who have none of their own.
  std::shared_ptr<const void> tenant = nullptr;
  Deadline deadline = kNoDeadline;
};
struct QueryRequest : retrieval::Query {
  Deadline deadline = kNoDeadline;
  float *out = nullptr, *lse = nullptr;  // where Session::Attend puts them, as AttendReply's
};
struct FetchRequest : retrieval::Fetch {
  Deadline deadline = kNoDeadline;
};

}  // namespace carrel::kvstore
