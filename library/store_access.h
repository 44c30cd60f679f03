// What:      a store for decoders: remote at an address, or embedded: opened in this process,
//            where sessions need no gRPC (embedded_client.h) and contexts are managed through the
//            same service over a channel inside the process, which is started when it is first asked
//            for; what comes or goes as a stream does without (move_context.h). With these and
//            mapped_rows.h the only places that join decoder/ and kvstore/.
// Errors:    NotFound no store in the folder; Unavailable no server at the address;
//            FailedPrecondition locked by another process.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/certificate.h"
#include "common/ids.h"
#include "common/server_login.h"
#include "common/thread_pool.h"
#include "kvstore/engine/context_source.h"
#include "kvstore/storage/store.h"

namespace carrel::retrieval {
class Session;
}
namespace carrel::kvstore {
class ContextClient;
class Engine;
class Store;
}  // namespace carrel::kvstore

namespace carrel::library {

struct StoreAddress {
  std::string folder;
  std::string server;
  // Beside `server`, of the same contexts: which of them is asked about one, its name says (server_choice.h).
  std::vector<std::string> other_servers;
  // Of clients that are decoders': how long a store that is gone is waited for; 0: not at all.
  absl::Duration retry_for = absl::ZeroDuration();
  // Of the same: how long the answer to one of their requests is waited for.
  absl::Duration request_timeout = absl::Minutes(2);
  // Told when such a store is gone, and when it is back; null: no callback.
  std::function<void(const std::string&)> tell;
  // Of --server.
  TlsFiles tls;  // certificate and key: our own
  std::string key_file;

  absl::Status Validate() const;  // exactly one is given
  // InvalidArgument, NotFound: the files; FailedPrecondition: a key that would travel in the clear.
  absl::StatusOr<ServerLogin> Login() const { return LoginTo(server); }
  absl::StatusOr<ServerLogin> LoginTo(const std::string& at) const;
};

class StoreAccess {
 public:
  // mode counts for an embedded store only.
  static absl::StatusOr<std::unique_ptr<StoreAccess>> Open(const StoreAddress& address,
                                                           kvstore::StoreMode mode);
  virtual ~StoreAccess() = default;

  // pool: counts for an embedded store only (MakeEmbeddedClient); null, or outlives the client.
  virtual absl::StatusOr<std::unique_ptr<retrieval::Session>> NewClient(ThreadPool* pool) = 0;
  // context: that calls are about, where there are several servers; empty: any.
  virtual absl::StatusOr<std::unique_ptr<kvstore::ContextClient>> NewContextClient(
      const std::string& context) = 0;
  absl::StatusOr<std::unique_ptr<kvstore::ContextClient>> NewContextClient();
  // Whether contexts may have to come before they are opened (Bring); else what is listed is here.
  virtual bool brings() const { return false; }
  // As ContextSource::Bring: tells `done` once the context is where it is opened.
  virtual std::shared_ptr<void> Bring(const std::string& name, kvstore::ContextWaiter waiter);
  // The tokens of a context's document, verified by the digest of its manifest. content_id: what the
  // context must hold, or the id's first 12 digits or more; empty: whatever it holds.
  // FailedPrecondition: it holds something else; Unimplemented: of a server of an older version.
  virtual absl::StatusOr<std::vector<TokenId>> DocumentTokens(const std::string& context,
                                                              const std::string& content_id) = 0;
  // Of an embedded store: itself, as long as this lives; else null.
  virtual kvstore::Store* store() { return nullptr; }
  // Likewise, what reads it; and where contexts come from that it lacks: before anything else is asked of it. The
  // source outlives this, or what is asked of it.
  virtual kvstore::Engine* engine() { return nullptr; }
  virtual void SetSource(kvstore::ContextSource* source) { (void)source; }
};

}  // namespace carrel::library
