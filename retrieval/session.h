// What:    a decoder's side of one session with whoever retrieves: many requests in flight, replies matched by
//          id. Over gRPC it is decoder/client/store_client_grpc.h; of a store in this process it is
//          library/embedded_client.h. The same requests bring the same replies and errors.
// Errors:  what the store answers keeps its code, prefixed with what was asked. After the session
//          ended every pending and later call fails with its status; nothing is retried here
//          (decoder/client/resuming_client.h does).
// Threads: one thread sends and waits. Destroying it ends the session.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "retrieval/opened.h"
#include "retrieval/query.h"

namespace carrel::retrieval {

struct QueryStatistics {
  int64_t candidates = 0;  // rows among which the selection was made by exact scores
  int64_t visited = 0;     // keys that the index looked at
  int64_t queue_us = 0;    // from acceptance to the start of the search
  int64_t search_us = 0;   // of the search; copying rows into the reply is not counted
  int64_t rows = 0;        // selected
};

// A run of rows of one token and KV head. Spans and pointers are valid as long as what they came with.
struct Piece {
  int64_t token = 0;
  KvHead kv_head;
  int64_t first_row = 0;  // index of its first row within this token's and head's rows
  int64_t rows = 0;
  std::vector<Position> ids;  // [rows]; empty: partial attention, and rows that were fetched
  std::vector<float> scores;  // [group, rows], or empty
  std::vector<const void*> k,
      v;  // [rows] less those that the asker holds, or empty; bf16 at any address
  absl::Span<const float> out;       // [group, head_dim], or empty
  absl::Span<const float> lse;       // [group], or empty
  absl::Span<const float> zone_lse;  // [group], on the first piece of a token and head, or empty
  absl::Span<const float>
      rest;  // [group, 1 + head_dim], likewise: HeadResult.rest (retrieval.proto)
};

// A part of a reply. Its pieces have the shapes that Piece says, whoever sent them; K rows of a piece follow one
// another in memory, and so do V rows.
struct Part {
  std::vector<Piece> pieces;
  QueryStatistics statistics;  // of a query, on the last part
  bool last = false;
  int64_t bytes = 0;  // of the message; within a process of the numbers and rows
  // What pieces point at.
  std::vector<float> floats;
  std::shared_ptr<const void> rows;
};

// Where the answer to a query with want ATTEND goes, and what it counts.
struct AttendReply {
  float* out = nullptr;  // [tokens, q_heads, head_dim]; in: where
  float* lse = nullptr;  // [tokens, q_heads]; in: where
  QueryStatistics statistics;
  int64_t bytes = 0;
};

class Session {
 public:
  virtual ~Session() = default;

  // Must be first, once.
  virtual absl::StatusOr<Opened> Open(const OpenRequest& open) = 0;

  // Accept and return; the answer is made meanwhile, or when it is waited for.
  virtual absl::StatusOr<RequestId> Send(Query query) = 0;
  virtual absl::StatusOr<RequestId> Send(Fetch fetch) = 0;

  // The next part of a request's reply, waited for.
  virtual absl::StatusOr<Part> Next(RequestId id) = 0;
  // Drops a request whose reply is not wanted any more; its parts are discarded as they arrive.
  // Nothing to do if all of it was received.
  virtual void Forget(RequestId id) = 0;

  // Whether Attend answers: the store is in this process, and who asks works on the answer.
  virtual bool attends() const { return false; }
  // Send and all of Next at once, of a query that keeps nothing and measures nothing.
  virtual absl::Status Attend(Query, AttendReply&) {
    return absl::UnimplementedError("a store elsewhere is sent queries");
  }

  // The session has ended: what was received before can still be taken, nothing else.
  virtual bool broken() const = 0;

  // Totals of the session so far, as Part's.
  virtual int64_t bytes_sent() const = 0;
  virtual int64_t bytes_received() const = 0;
};

}  // namespace carrel::retrieval
