// What:    a decoder's side of one RetrievalService.Session: many requests in flight, replies
//          matched by id. The only place of decoder/ that knows gRPC.
// Errors:  Unavailable no server at the address (names it) or the stream broke; what the server
//          answers keeps its code, prefixed with what was asked. After the stream broke every
//          pending and later call fails with that status; nothing is retried here
//          (resuming_client.h does).
// Threads: one thread sends and waits; a reader thread of the client's own receives. Destroying the
//          client cancels the stream.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/ids.h"
#include "common/server_login.h"

namespace grpc {
class Channel;
}

namespace carrel::v1 {
class Open;
class OpenReply;
class Query;
class FetchRows;
class SessionReply;
}  // namespace carrel::v1

namespace carrel::decoder {

using RequestId = uint64_t;

class StoreClient {
 public:
  // address: "unix:PATH" or "HOST:PORT". Connects within the deadline or fails.
  static absl::StatusOr<std::unique_ptr<StoreClient>> Connect(const std::string& address,
                                                              absl::Duration deadline,
                                                              const ServerLogin& login = {});
  // The same over a channel that exists: the in-process channel of an embedded store.
  static absl::StatusOr<std::unique_ptr<StoreClient>> OverChannel(
      std::shared_ptr<grpc::Channel> channel, absl::Duration deadline, const std::string& key = "");
  virtual ~StoreClient() = default;

  // Must be first, once.
  virtual absl::StatusOr<v1::OpenReply> Open(const v1::Open& open) = 0;

  // Enqueue and return; the request is on its way.
  virtual absl::StatusOr<RequestId> Send(v1::Query query) = 0;
  virtual absl::StatusOr<RequestId> Send(v1::FetchRows fetch) = 0;

  // The next part of a request's reply, waited for; its `last` says whether there are more. An
  // Error reply becomes its status.
  virtual absl::StatusOr<v1::SessionReply> Next(RequestId id) = 0;
  // Drops a request whose reply is not wanted any more; its parts are discarded as they arrive.
  // Nothing to do if all of it was received.
  virtual void Forget(RequestId id) = 0;

  // The stream has ended: what was received before can still be taken, nothing else.
  virtual bool broken() const = 0;

  // Totals of the session so far.
  virtual int64_t bytes_sent() const = 0;
  virtual int64_t bytes_received() const = 0;
};

}  // namespace carrel::decoder
