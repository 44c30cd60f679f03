#include "carrel/server.h"

#include <utility>

#include "absl/time/time.h"
#include "common/status.h"
#include "kvstore/access/access.h"
#include "kvstore/engine/engine.h"
#include "kvstore/service/server.h"
#include "kvstore/storage/store.h"
#include "library/quiet_log.h"
#include "library/status.h"

namespace carrel {
namespace library {
namespace {

class ServerHandle final : public Server {
 public:
  ServerHandle(std::unique_ptr<kvstore::Engine> engine, std::unique_ptr<kvstore::Server> server)
      : engine_(std::move(engine)), server_(std::move(server)) {}
  const std::vector<std::string>& addresses() const override { return server_->addresses(); }
  void Stop(double wait_s) override { server_->Drain(absl::Seconds(wait_s < 0 ? 0 : wait_s)); }

 private:
  const std::unique_ptr<kvstore::Engine> engine_;
  const std::unique_ptr<kvstore::Server> server_;
};

absl::StatusOr<std::unique_ptr<Server>> StartServer(const std::string& folder,
                                                    const ServerOptions& options) {
  if (options.listen.empty()) {
    return absl::InvalidArgumentError("listen is empty: nobody could reach the server");
  }
  QuietLog();
  kvstore::EngineConfig engine_config;
  engine_config.search_threads = options.search_threads;
  if (options.memory_bytes < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("memory_bytes=", options.memory_bytes, " is negative"));
  }
  engine_config.memory_budget_bytes = options.memory_bytes;
  kvstore::ServerConfig config;
  config.listen = options.listen;
  config.tls = {options.tls_cert, options.tls_key, options.tls_client_ca};
  config.insecure = options.insecure;
  if (!options.keys.empty()) {
    ASSIGN_OR_RETURN(config.access, kvstore::Access::Create(options.keys));
  }
  ASSIGN_OR_RETURN(
      std::unique_ptr<kvstore::Store> store,
      kvstore::Store::Open(folder, options.read_only ? kvstore::StoreMode::kReadOnly
                                                     : kvstore::StoreMode::kReadWrite));
  ASSIGN_OR_RETURN(std::unique_ptr<kvstore::Engine> engine,
                   kvstore::Engine::Create(engine_config, std::move(store)));
  ASSIGN_OR_RETURN(std::unique_ptr<kvstore::Server> server,
                   kvstore::Server::Start(config, engine.get()));
  return std::make_unique<ServerHandle>(std::move(engine), std::move(server));
}

}  // namespace
}  // namespace library

inline namespace api {

Result<std::unique_ptr<Server>> Server::Start(const std::string& folder,
                                              const ServerOptions& options) {
  return library::ToPublic(library::StartServer(folder, options));
}

}  // namespace api
}  // namespace carrel
