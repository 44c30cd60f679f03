// What:    a decoder's side of one session with a store: many requests in flight, replies matched by
//          id. Implemented over gRPC (store_client_grpc.h) and for a store in this process
//          (library/embedded_client.h): the same requests bring the same replies and errors.
// Errors:  what the store answers keeps its code, prefixed with what was asked. After the session
//          ended every pending and later call fails with its status; nothing is retried here
//          (resuming_client.h does).
// Threads: one thread sends and waits. Destroying the client ends the session.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/ids.h"
#include "common/selection.h"

namespace carrel::v1 {
class Open;
class OpenReply;
class Query;
class FetchRows;
class SessionReply;
}  // namespace carrel::v1

namespace carrel::decoder {

using RequestId = uint64_t;

// A query for partial attention (want ATTEND) of a layer's zone, as numbers instead of a message.
struct AttendQuery {
  Layer layer;
  const float* q = nullptr;  // [n, q_heads, head_dim]
  int64_t n = 0;
  const select::Selection* selection = nullptr;
  int64_t effort = 0;
  bool estimate = false;
};

struct AttendReply {
  float* out = nullptr;  // [n, q_heads, head_dim]; in: where
  float* lse = nullptr;  // [n, q_heads]; in: where
  int64_t candidates = 0, visited = 0, rows = 0, bytes = 0;
};

class StoreClient {
 public:
  virtual ~StoreClient() = default;

  // Must be first, once.
  virtual absl::StatusOr<v1::OpenReply> Open(const v1::Open& open) = 0;

  // Accept and return; the answer is made meanwhile, or when it is waited for.
  virtual absl::StatusOr<RequestId> Send(v1::Query query) = 0;
  virtual absl::StatusOr<RequestId> Send(v1::FetchRows fetch) = 0;

  // The next part of a request's reply, waited for; its `last` says whether there are more. An
  // Error reply becomes its status.
  virtual absl::StatusOr<v1::SessionReply> Next(RequestId id) = 0;
  // Drops a request whose reply is not wanted any more; its parts are discarded as they arrive.
  // Nothing to do if all of it was received.
  virtual void Forget(RequestId id) = 0;

  // Whether Attend answers: the store is in this process, and the asking thread works on the answer. Then a query
  // that keeps nothing and measures nothing needs no message.
  virtual bool attends() const { return false; }
  // The numbers and errors of Send and Next.
  virtual absl::Status Attend(const AttendQuery&, AttendReply&) {
    return absl::UnimplementedError("a store elsewhere is sent messages");
  }

  // The session has ended: what was received before can still be taken, nothing else.
  virtual bool broken() const = 0;

  // Totals of the session so far, as messages; of what Attend answers, of the numbers in them.
  virtual int64_t bytes_sent() const = 0;
  virtual int64_t bytes_received() const = 0;
};

}  // namespace carrel::decoder
