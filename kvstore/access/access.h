// What:   who a caller is, by the keys file, which is read again when it changes. Whatever brings
//         callers (gRPC, HTTP) asks here and knows no rule of its own.
// Rules without a keys file: who comes over a Unix socket, whose file mode admitted him, may do
//         everything ("local"), and so may who presents the server's token ("token"), where it has one; anybody
//         else, and a client certificate, `list open`. An unknown key counts as none: clients of OpenAI's
//         API present one whatever the server.
// Errors:  Unauthenticated says what is missing, not what there is. Of Create: those of the file.
// Threads: any; one of its own watches the file.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "common/file_watch.h"
#include "kvstore/access/keys_file.h"
#include "kvstore/access/principal.h"

namespace carrel::kvstore {

// What a transport knows of a caller.
struct Caller {
  std::string peer;                            // address, for logs
  bool local = false;                          // over a Unix socket
  std::optional<uint32_t> uid;                 // of a local peer, if the transport knows it
  std::string key;                             // presented; empty: none
  std::vector<std::string> certificate_names;  // of a certificate that was verified
};

class Access {
 public:
  // Without a keys file. everything: all may do all, for a server that only its own process reaches.
  static std::shared_ptr<Access> Open(bool everything = false);
  // Without a keys file, with a token (NewAccessKey()).
  static std::shared_ptr<Access> OpenWithToken(const std::string& token);
  // Reads the file again every `interval` if it has changed; one that cannot be used is logged and
  // counted, and the rules stay as they were.
  static absl::StatusOr<std::shared_ptr<Access>> Create(const std::string& keys_file,
                                                        absl::Duration interval = absl::Seconds(1));

  absl::StatusOr<std::shared_ptr<Principal>> Admit(const Caller& caller);
  // Whether the caller, by what he presented then, is still who he was admitted as: an entry may have
  // lost one of its keys, or a user id may be another's now. Ask once per generation.
  bool IsStill(const Caller& caller, const Principal* principal);
  // Of the keys file as it is now; null: there is none of the name.
  std::shared_ptr<Principal> Named(const std::string& name) const;
  // Of the rules: counts the readings of the keys file.
  int64_t generation() const { return reloads_.load(); }

  // Now, whether or not the file looks changed.
  absl::Status Reload();

  bool has_keys() const { return !keys_file_.empty(); }
  int64_t failed_reloads() const { return failed_reloads_.load(); }  // of the keys file
  // By name, of those of the keys file as it is now; prefix: of their contexts' names.
  std::vector<std::pair<TenantUse, std::string>> tenant_uses() const;

 private:
  Access() = default;
  void Apply(const KeysFile& file);
  absl::StatusOr<std::shared_ptr<Principal>> Find(const Caller& caller);
  std::shared_ptr<Principal> WithoutKeys(const Caller& caller);

  std::string keys_file_;
  std::string token_sha256_;  // empty: none
  bool everything_ = false;
  std::atomic<int64_t> reloads_{0}, failed_reloads_{0};

  mutable absl::Mutex mu_;
  std::map<std::string, std::shared_ptr<Principal>> principals_ ABSL_GUARDED_BY(mu_);  // by name
  // Those that the file ever named, and names.
  std::map<std::string, std::shared_ptr<TenantState>> tenants_ ABSL_GUARDED_BY(mu_);
  std::set<std::string> tenant_names_ ABSL_GUARDED_BY(mu_);
  std::vector<std::pair<std::string, std::shared_ptr<Principal>>> keys_
      ABSL_GUARDED_BY(mu_);  // SHA-256
  absl::flat_hash_map<std::string, std::shared_ptr<Principal>> certificates_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<uint32_t, std::shared_ptr<Principal>> uids_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<Principal> anonymous_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<FileWatch> watch_;  // last: its thread uses all of the above
};

}  // namespace carrel::kvstore
