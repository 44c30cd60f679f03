// What:    the client of ContextService: what a store holds, for people and tools.
// Errors:  what the server answers, code kept; Unavailable no server at the address (names it).
// Routing: a call about one context names it to proxies (common/routing.h).
// Threads: any.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "common/ids.h"
#include "kvstore/format/context_id.h"

namespace grpc {
class Channel;
}

namespace carrel::v1 {
class ImportReply;
class ListResponse;
class StatisticsResponse;
class TokensRequest;
class TokensResponse;
class Manifest;
class VerifyResponse;
class WarmReply;
}  // namespace carrel::v1

namespace carrel::kvstore {

// What to say of a connection that fails.
struct ConnectionHints {
  bool plain = false;  // it is not encrypted: the server may want it to be
  std::string proxy;   // of common/http_proxy.h
};

class ContextClient {
 public:
  // address: of the server, for messages. deadline: of each call. key: presented; empty: none.
  ContextClient(std::shared_ptr<grpc::Channel> channel, std::string address,
                absl::Duration deadline, std::string key = "", ConnectionHints hints = {});
  ~ContextClient();

  absl::StatusOr<v1::ListResponse> List();
  absl::StatusOr<v1::Manifest> Get(const std::string& name);
  // All of the document's tokens, part by part, verified by the digest of the context's manifest.
  // content_id: of the context, or its beginning; empty: whichever it has, but one and the same for
  // all parts. FailedPrecondition: it has another; DataLoss: they are not those of the digest;
  // Unimplemented: a server of an older version.
  absl::StatusOr<std::vector<TokenId>> Tokens(const std::string& name,
                                              const std::string& content_id);
  absl::StatusOr<v1::StatisticsResponse> Statistics();
  // Takes as long as the context is large: no deadline.
  absl::StatusOr<v1::VerifyResponse> Verify(const std::string& name, bool deep);
  // Calls sink with each piece of the context's stream; what it returns ends the export.
  absl::Status Export(const std::string& name,
                      absl::FunctionRef<absl::Status(absl::string_view)> sink);
  // Asks `source` for some bytes of a stream from an offset on, at most a few MiB, none where it
  // ends. name: what the context is to be called; empty: as the stream says. Interrupted, the same
  // call goes on where it was. progress: told position and bytes of the whole.
  absl::StatusOr<v1::ImportReply> Import(
      const std::string& name,
      absl::FunctionRef<absl::StatusOr<absl::string_view>(int64_t offset)> source,
      absl::FunctionRef<void(int64_t position, int64_t bytes)> progress);
  // Whether this client may import a context of that name: what the server would say at once.
  absl::Status AskImport(const std::string& name);
  // A file of a context that is still being computed, for an import to come: kvstore/storage's
  // BeginAhead. bytes: all of it; go_on: asked before each piece, false is Cancelled.
  // Returns how many bytes the server did not have.
  absl::StatusOr<int64_t> SendAhead(const std::string& name, ContextId id, int64_t file,
                                    absl::string_view bytes, absl::FunctionRef<bool()> go_on);
  absl::Status Delete(const std::string& name);
  // Waits until the context is where the server reads it, for as long as it takes: no deadline. progress: told
  // about once a second; false ends it (Cancelled). Unimplemented: a server of an older version.
  absl::Status Warm(const std::string& name,
                    absl::FunctionRef<bool(const v1::WarmReply&)> progress);
  // By which address the server that answers is reached itself; empty: it does not say. Unimplemented: likewise.
  absl::StatusOr<std::string> Locate(const std::string& name);

 private:
  struct Server;
  absl::StatusOr<v1::TokensResponse> TokensFrom(const v1::TokensRequest& request);
  const std::unique_ptr<const Server> server_;
};

}  // namespace carrel::kvstore
