// What:   the door of a server, whatever the transport (gRPC, HTTP): who called, whether he may make this
//         call about this context, his limits, and the audit log's lines about it. The transport tells what
//         it knows of a caller (Caller), and names the call as the table of right.h does.
// Errors: of Admit and Visit: those of Access and Principal.
// Ownership: the audit log outlives the door and its visits.
// Threads: any. A Visit by one at a time, but for StillAllowed.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "kvstore/access/access.h"
#include "kvstore/access/audit_log.h"

namespace carrel::kvstore {

// What the audit log says of a context.
struct ContextFacts {
  std::string content_id;
  int64_t tokens = 0;
  int64_t bytes = 0;  // stored; of a session that ended, those of its requests and replies
  std::string name;   // where the call named none, or another: of the one that it came to
};

// One call of a known caller.
class Visit {
 public:
  Visit() = default;  // to be assigned to
  // Whether he may make this call ("Service.Method"), about this context if it is about one. A
  // context that he does not see is no error here: lookup_name() then is one that no store holds,
  // so that looking it up takes as long and fails as for a context that is not there.
  absl::Status Allow(absl::string_view rpc, const std::string& context);
  // Whether he may add a context of this name; nothing is told about whether it exists.
  absl::Status AllowNew(const std::string& name);
  const std::string& lookup_name() const { return lookup_name_; }
  // What the lookup said, about the name that was asked for. Every NotFound has the same words.
  absl::Status Told(const absl::Status& status) const;

  // Of a call that takes long, after Allow: PermissionDenied once the caller's key (certificate,
  // user) was withdrawn or has expired, or lost the call's right or its context (if he saw it); then it is to end.
  // Counted and logged each time. Cost: some 0.2 us while the keys file is the same.
  absl::Status StillAllowed() const;

  // A line of the audit log, about the call that was allowed.
  void Log(absl::string_view event, const absl::Status& result,
           const ContextFacts& facts = {}) const;

  // A call that is no session, whose request has so many bytes: ResourceExhausted beyond the key's rate.
  absl::Status SpendCall(int64_t bytes = 0);
  // Of a body or a reply, after the fact: what comes next waits for it.
  void SpendBytes(int64_t bytes) { (void)principal_->Spend(0, bytes); }
  absl::StatusOr<std::shared_ptr<void>> TakeSession();
  absl::StatusOr<std::shared_ptr<TenantState>> TakeImport(int64_t stored_contexts,
                                                          int64_t stored_bytes, int64_t bytes);

  const std::string& rpc() const { return rpc_; }
  bool of_keys() const { return access_->has_keys(); }  // else nothing can be withdrawn
  Principal& principal() const { return *principal_; }
  const std::shared_ptr<Principal>& shared_principal() const { return principal_; }
  std::shared_ptr<const void> turn() const { return principal_->turn(); }

 private:
  friend class Admission;
  // Counts and logs it.
  absl::Status Denied(absl::Status status, const char* reason) const;

  // What the caller presented, and the reading of the rules that last knew him by it.
  struct Presented {
    Presented(Caller who, int64_t now) : caller(std::move(who)), generation(now) {}
    const Caller caller;
    std::atomic<int64_t> generation;
  };

  Access* access_ = nullptr;
  std::shared_ptr<Presented> presented_;
  std::shared_ptr<Principal> principal_;
  std::string peer_;
  AuditLog* audit_ = nullptr;  // may be null
  std::string rpc_, context_, lookup_name_;
};

class Admission {
 public:
  // audit: null, or outlives this.
  Admission(std::shared_ptr<Access> access, AuditLog* audit);

  // rpc: for the audit log.
  absl::StatusOr<Visit> Admit(Caller caller, absl::string_view rpc);
  Access& access() { return *access_; }

 private:
  const std::shared_ptr<Access> access_;
  AuditLog* const audit_;
};

}  // namespace carrel::kvstore
