// What: the flags that say which store a command means.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/service/context_client.h"
#include "library/store_access.h"

namespace CLI {
class App;
}

namespace carrel::tools {

// A store, and what manages its contexts.
struct ConnectedStore {
  std::unique_ptr<library::StoreAccess> store;
  std::unique_ptr<kvstore::ContextClient> client;
};

struct StoreFlags : library::StoreAddress {
  void Declare(CLI::App& command);
  // The same, and --server may be given several times.
  void DeclareSeveral(CLI::App& command);
  // --server alone, and what it takes.
  void DeclareServer(CLI::App& command);

  // InvalidArgument: not one store is given.
  absl::StatusOr<ConnectedStore> Connect(kvstore::StoreMode mode) const;

  std::vector<std::string> given_servers;  // into server and other_servers

 private:
  void DeclareLogin(CLI::App& command);
};

}  // namespace carrel::tools
