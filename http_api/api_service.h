// What:   OpenAI's API over contexts: GET /health (it answers), /ready (what it is to have is here), /metrics, GET /v1/models, POST /v1/completions and
//         /v1/chat/completions, whole or as server-sent events; /v1/contexts (contexts_api.h); a page
//         for people at /. A context is named by "context" in the body, or as "model": "NAME@CONTEXT";
//         its document stands before the prompt or chat. A prompt that names none, but begins with the
//         document of one, is answered from it.
// Source: OpenAI's API reference; completion.h says what is refused.
// Errors: of Start: as http_server.h; FailedPrecondition an address that others reach, without --keys.
// Browsers: no answer says that pages of other origins may read it, and requests of theirs are refused;
//         without keys, also those to a host name other than localhost (which anybody can point here).
// Access: as of every transport (kvstore/access/admission.h), by "Authorization: Bearer KEY": rights of the one table,
//         contexts that a key does not see are not found, rates, sessions (answers at a time), quotas, the audit log;
//         a key that is withdrawn ends what runs, waits or streams for it within two seconds. Without a keys file
//         TCP gives list and open to anybody, and all rights to the bearer of the token; a Unix socket all to its owner.
// Threads: any.   Ownership: keeps model and store.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/metrics.h"
#include "http_api/http_server.h"
#include "library/loaded_model.h"
#include "library/store_access.h"
#include "serving/engine.h"

namespace carrel::kvstore {
class Access;
class AuditLog;
}  // namespace carrel::kvstore

namespace carrel::serving {
class JobFollower;
}

namespace carrel::http_api {

struct ApiConfig {
  HttpServerConfig http;
  serving::EngineConfig engine = {.documents = serving::DocumentsConfig()};
  int64_t max_document_bytes = int64_t{16} << 20;
  std::string model_name;                   // as clients call it
  std::shared_ptr<kvstore::Access> access;  // not null
  kvstore::AuditLog* audit = nullptr;       // null: none; outlives the service
  // Documents that clients bring become jobs of a bucket, of which the store has the contexts; null: the store makes
  // them.
  std::shared_ptr<serving::JobFollower> jobs;
  std::string token_file;  // where its owner finds the token, for messages; empty: nowhere
  bool insecure = false;   // others may reach it all the same
  // Whether what this server is to have is here: what GET /ready says; null: it is.
  std::function<bool()> ready;
  // What GET /metrics tells beside what this service counts; null: nothing.
  std::function<std::vector<MetricFamily>()> more_metrics;
};

class ApiService {
 public:
  static absl::StatusOr<std::unique_ptr<ApiService>> Start(
      const ApiConfig& config, std::shared_ptr<library::LoadedModel> model,
      std::shared_ptr<library::StoreAccess> store);
  virtual ~ApiService() = default;  // cuts what runs
  virtual const std::vector<std::string>& addresses() const = 0;
  // For what takes contexts out of the store to make room: whether answers read it, or wait to; and, if not, that
  // nothing of it stays open. FailedPrecondition: they do by now.
  virtual bool Reads(const std::string& context) const = 0;
  virtual absl::Status LetGo(const std::string& context) = 0;
};

}  // namespace carrel::http_api
