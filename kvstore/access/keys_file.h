// What:   the keys file: who may do what, in JSON (docs/formats.md). Keys stand in it as SHA-256.
// Errors: InvalidArgument names the entry and the field: a field that is unknown, missing, of the
//         wrong type or out of range, a name or identity given twice, a tenant that is not there.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kvstore/access/right.h"

namespace carrel::kvstore {

// 0: unbounded.
struct AccessLimits {
  int64_t sessions = 0;  // at a time
  double requests_per_s = 0;
  double bytes_per_s = 0;  // requests and replies
};

// How a caller is known; exactly one is set of an entry.
struct Identity {
  std::vector<std::string> key_sha256;  // 32 bytes each; several while a key is being changed
  std::string certificate;              // common name, DNS name or URI of a client certificate
  std::optional<uint32_t> uid;          // of the process at the other end of a Unix socket
  bool anonymous = false;               // a caller that presents nothing of the above
};

struct AccessEntry {
  std::string name;  // what logs and messages call it
  Identity identity;
  Rights rights;
  std::vector<std::string> contexts = {"*"};  // globs of names: * any run of bytes, ? any byte
  std::string tenant;                         // empty: none
  AccessLimits limits;
  absl::Time expires = absl::InfiniteFuture();
  bool owner = false;  // of the machine, who sees all; never of a file
};

// Callers that share a prefix of names and a turn. Quotas: 0 unbounded.
struct Tenant {
  std::string name;
  std::string prefix;                       // its contexts' names begin with it
  int64_t max_bytes = 0, max_contexts = 0;  // stored
  int64_t max_sessions = 0;                 // at a time, of all its keys
};

struct KeysFile {
  std::vector<AccessEntry> entries;
  std::vector<Tenant> tenants;
};

absl::StatusOr<KeysFile> ParseKeysFile(absl::string_view text);
// Also InvalidArgument: a file that others than its owner and group may write.
absl::StatusOr<KeysFile> ReadKeysFile(const std::string& path);

bool MatchesGlob(absl::string_view glob, absl::string_view name);

// A new key: "carrel_" and 43 characters that stand for 256 random bits.
std::string NewAccessKey();
std::string AccessKeySha256(absl::string_view key);  // 32 bytes

}  // namespace carrel::kvstore
