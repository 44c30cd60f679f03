// What:   a retrieval::Session that survives its store (decision 036): when the stream breaks it connects
//         again, opens the same context, sends what is outstanding again, and whoever waits goes on
//         waiting. A session is read-only and its answers are determined by context and request, so
//         the decoder notices nothing but the time.
//         Candidates that the old session kept for a query to come are asked for again first.
//         Parts of a reply that were handed out already are skipped.
// Errors: as Session's, and of a broken stream only once no store could be reached for retry_for;
//         FailedPrecondition the name now stands for another context; DataLoss an answer that comes
//         in other parts than before.
// Cost:   a copy of every request in flight.
// Threads: as Session's.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "retrieval/session.h"

namespace carrel::decoder {

struct ResumeConfig {
  // A new stream to the store, within the time, for a session with this context.
  std::function<absl::StatusOr<std::unique_ptr<retrieval::Session>>(absl::Duration,
                                                                    const std::string& context)>
      connect;
  // From a break on; 0: none, the first break is final.
  absl::Duration retry_for = absl::Seconds(30);
  // Of the first connection and Open, breaks included.
  absl::Duration open_within = absl::Seconds(10);
  // Told once per break, and once when all goes on; may be null.
  std::function<void(const std::string&)> tell;
};

std::unique_ptr<retrieval::Session> MakeResumingClient(ResumeConfig config);

}  // namespace carrel::decoder
