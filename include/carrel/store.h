// What:      contexts: in a folder, opened in this process, or at a `carrel serve` (server.h).
// Errors:    NotFound no store, server or context; FailedPrecondition the folder is locked by
//            another process, or a context is in use; Unavailable no server at the address;
//            PermissionDenied, Unauthenticated what the server does not let this client do;
//            DataLoss a context is damaged (says where).
// Ownership: readers and sessions keep the store alive.
// Threads:   any.
// Example:   const auto store = carrel::Store::Open("out/store");                 // examples/02_ask.cc
//            const auto remote = carrel::Store::Connect("unix:/run/carrel.sock");
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "carrel/export.h"
#include "carrel/status.h"

namespace carrel {
inline namespace api {

struct ContextInfo {
  std::string name;
  std::string content_id;  // SHA-256, hexadecimal: names all that the context holds
  int64_t tokens = 0;
  int32_t layers = 0;
  int32_t q_heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  std::string index;         // "flat", "code", "int8", "auto", ..
  int64_t stored_bytes = 0;  // K, V, indexes and summaries
  int64_t created_unix_s = 0;
  bool has_summaries = false;  // for the estimation term
  bool measured = false;       // prefill measured what fidelity needs
};

struct VerifyReport {
  int64_t segments = 0;             // looked at
  int64_t bytes = 0;                // read and found right
  std::vector<std::string> errors;  // none: the context is as it was published; at most 100
};

enum class StoreMode : uint8_t {
  kRead = 0,       // takes no lock
  kReadWrite = 1,  // creates the folder if need be; one process at a time
};

struct Login {
  std::string tls_ca;    // PEM files; empty: no TLS
  std::string tls_cert;  // client certificate, if the server requires one
  std::string tls_key;
  std::string key_file;     // with the key that the server wants; empty: none
  double retry_for_s = 30;  // how long a reader waits for a server that is gone; 0: not at all
};

class CARREL_API Store {
 public:
  static Result<std::shared_ptr<Store>> Open(const std::string& folder,
                                             StoreMode mode = StoreMode::kRead);
  // address: "unix:PATH" or "HOST:PORT". Connects when it is first asked.
  static Result<std::shared_ptr<Store>> Connect(const std::string& address,
                                                const Login& login = {});
  virtual ~Store() = default;

  // By name. Contexts that cannot be read are told in `unreadable`, if there is one.
  virtual Result<std::vector<ContextInfo>> List(std::vector<std::string>* unreadable = nullptr) = 0;
  virtual Result<ContextInfo> Get(const std::string& name) = 0;
  virtual Status Delete(const std::string& name) = 0;
  // Compares digests; deep: also every byte. Takes as long as reading the context does.
  virtual Result<VerifyReport> Verify(const std::string& name, bool deep) = 0;
  // The context as one stream of bytes, verified as it leaves; what `sink` returns, if not OK, ends
  // the export.
  virtual Status Export(const std::string& name,
                        const std::function<Status(std::string_view)>& sink) = 0;
  // Takes in what Export gave. `source` is asked for some bytes (at most a few MiB; none at the end)
  // of the stream from an offset on; what it returns must stay valid until it is called again.
  // name: what the context is to be called here; empty: as it was called there. Interrupted, the
  // same call goes on where it was; the context is visible when it is whole, and not before.
  virtual Result<ContextInfo> Import(
      const std::string& name,
      const std::function<Result<std::string_view>(int64_t offset)>& source) = 0;
  // The tokens that the context was made of, as its content id names them. Unimplemented: of a server
  // of an older version.
  virtual Result<std::vector<int32_t>> DocumentTokens(const std::string& name) = 0;
};

}  // namespace api
}  // namespace carrel
