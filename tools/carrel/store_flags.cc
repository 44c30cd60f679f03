#include "tools/carrel/store_flags.h"

#include <CLI/CLI.hpp>

#include "common/status.h"

namespace carrel::tools {

void StoreFlags::Declare(CLI::App& command) {
  command.add_option("--store", folder, "folder of a store, opened in this process");
  DeclareServer(command);
}

void StoreFlags::DeclareSeveral(CLI::App& command) {
  command.add_option("--store", folder, "folder of a store, opened in this process");
  command
      .add_option("--server", given_servers,
                  "address of a carrel serve: unix:PATH or HOST:PORT; or several")
      ->allow_extra_args(false)
      ->each([this](const std::string& address) {
        if (server.empty()) {
          server = address;
        } else {
          other_servers.push_back(address);
        }
      });
  DeclareLogin(command);
}

void StoreFlags::DeclareServer(CLI::App& command) {
  command.add_option("--server", server, "address of a carrel serve: unix:PATH or HOST:PORT");
  DeclareLogin(command);
}

void StoreFlags::DeclareLogin(CLI::App& command) {
  command.add_option("--tls-ca", tls.ca, "--server: TLS, by these authorities; or $CARREL_TLS_CA")
      ->envname("CARREL_TLS_CA");
  command
      .add_option("--tls-cert", tls.certificate,
                  "client certificate, if the server requires one; $CARREL_TLS_CERT")
      ->envname("CARREL_TLS_CERT");
  command.add_option("--tls-key", tls.key, "key of --tls-cert; $CARREL_TLS_KEY")
      ->envname("CARREL_TLS_KEY");
  command
      .add_option("--key-file", key_file,
                  "file with the key that the server wants; $CARREL_KEY_FILE")
      ->envname("CARREL_KEY_FILE");
}

absl::StatusOr<ConnectedStore> StoreFlags::Connect(kvstore::StoreMode mode) const {
  ConnectedStore connected;
  ASSIGN_OR_RETURN(connected.store, library::StoreAccess::Open(*this, mode));
  ASSIGN_OR_RETURN(connected.client, connected.store->NewContextClient());
  return connected;
}

}  // namespace carrel::tools
