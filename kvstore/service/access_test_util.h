// What: a server over a small store, with keys and certificates of the test's own. Tests only.
#pragma once

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/certificate_test_util.h"
#include "kvstore/access/admission.h"
#include "kvstore/engine/engine.h"
#include "kvstore/engine/test_context.h"
#include "kvstore/service/server.h"

namespace carrel::kvstore {

enum class Transport { kUnix, kLoopback, kTls, kMutualTls };
std::string TransportName(Transport transport);

class GuardedServer {
 public:
  // Contexts "mine" and "theirs". keys: the entries of a keys file, %NAME% standing for the SHA-256
  // of NAME; null: no keys file.
  GuardedServer(const std::string& folder, Transport transport, const char* keys,
                const std::string& tenants = "");
  ~GuardedServer();

  absl::Status Start();
  void WriteKeys(const std::string& keys, const std::string& tenants = "");
  // Of the server; of clients the authority stays the same.
  void WriteCertificate(const TestAuthority::Pair& pair) {
    TestAuthority::Write(tls_, pair, authority.certificate());
  }

  std::shared_ptr<grpc::Channel> Channel() const;
  // A client certificate of that name (mutual TLS).
  std::shared_ptr<grpc::Channel> ChannelAs(const std::string& name) const;

  grpc::Status List(const std::string& key, std::vector<std::string>* names = nullptr) const;
  grpc::Status Get(const std::string& key, const std::string& context) const;
  grpc::Status Tokens(const std::string& key, const std::string& context) const;
  grpc::Status Statistics(const std::string& key) const;
  grpc::Status Verify(const std::string& key, const std::string& context) const;
  grpc::Status Delete(const std::string& key, const std::string& context) const;
  grpc::Status Export(const std::string& key, const std::string& context) const;
  // Of bytes that are no stream.
  grpc::Status Import(const std::string& key, const std::string& context) const;
  grpc::Status Warm(const std::string& key, const std::string& context) const;
  grpc::Status Locate(const std::string& key, const std::string& context) const;
  // OK, or why it was refused.
  grpc::Status OpenSession(const std::string& key, const std::string& context) const;

  std::vector<std::string> AuditLines() const;

  const TestAuthority authority;
  ServerConfig config;
  // Told of the engine before the server starts; may change the configuration.
  std::function<void(Engine&)> made_engine;
  std::string store_name = "store";  // of the folder that is served
  std::unique_ptr<RandomContext> mine, theirs;
  std::unique_ptr<AuditLog> audit;
  std::unique_ptr<Engine> engine;
  std::unique_ptr<Server> server;

 private:
  std::shared_ptr<grpc::Channel> MakeChannel(const TestAuthority::Pair& own) const;

  const std::string folder_, tls_;
  const Transport transport_;
  std::string socket_;
};

// A call of the services: its name, the right that it needs, and what whoever has that is answered.
struct GuardedCall {
  const char* rpc;
  const char* right;
  grpc::StatusCode allowed;
  std::function<grpc::Status(const std::string& key)> make;
};
// All of them.
std::vector<GuardedCall> EveryCall(const GuardedServer& server);

// Entries of a keys file: a key for each right, one for all, and one that has expired.
inline constexpr char kOnePerRight[] = R"(
  {"name": "L", "sha256": "%list%", "rights": ["list"]},
  {"name": "O", "sha256": "%open%", "rights": ["open"]},
  {"name": "I", "sha256": "%import%", "rights": ["import"]},
  {"name": "D", "sha256": "%delete%", "rights": ["delete"]},
  {"name": "A", "sha256": "%admin%", "rights": ["admin"]},
  {"name": "all", "sha256": "%all%", "rights": ["list", "open", "import", "delete", "admin"]},
  {"name": "old", "sha256": "%old%", "rights": ["list", "open", "import", "delete", "admin"],
   "expires": "2020-01-01T00:00:00Z"})";

}  // namespace carrel::kvstore
