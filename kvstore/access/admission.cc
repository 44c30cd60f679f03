#include "kvstore/access/admission.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/metrics.h"

namespace carrel::kvstore {
namespace {

constexpr char kNoKey[] = "key";

Counter& Denials(const char* reason) {
  return CounterOf(
      "carrel_denials_total",
      "Calls and sessions that were not allowed: no valid key, no right, a context that the key "
      "does not see, a limit of the key or its tenant",
      {{"reason", reason}});
}

// Names as long as the store takes them, and what stands for the rest of longer ones.
std::string Shown(const std::string& name) {
  constexpr size_t kMost = 128;
  if (name.size() <= kMost) return name;
  return absl::StrCat(name.substr(0, kMost), "... (", name.size(), " bytes)");
}

}  // namespace

absl::StatusOr<Visit> Admission::Admit(Caller caller, absl::string_view rpc) {
  Visit visit;
  visit.access_ = access_.get();
  visit.peer_ = caller.peer;
  const int64_t generation = access_->generation();
  visit.audit_ = audit_;
  visit.rpc_ = std::string(rpc);
  absl::StatusOr<std::shared_ptr<Principal>> principal = access_->Admit(caller);
  if (!principal.ok()) return visit.Denied(principal.status(), kNoKey);
  visit.principal_ = *std::move(principal);
  visit.presented_ = std::make_shared<Visit::Presented>(std::move(caller), generation);
  return visit;
}

Admission::Admission(std::shared_ptr<Access> access, AuditLog* audit)
    : access_(std::move(access)), audit_(audit) {
  for (const char* reason : {kNoKey, "right", "context", "limit", "withdrawn"})
    Denials(reason);  // shown as 0
}

absl::Status Visit::Denied(absl::Status status, const char* reason) const {
  Denials(reason).Add();
  if (principal_ != nullptr) principal_->CountRefusal();
  Log("denied", status);
  return status;
}

absl::Status Visit::Allow(absl::string_view rpc, const std::string& context) {
  rpc_ = std::string(rpc);
  context_ = context;
  lookup_name_ = context;
  const absl::StatusOr<Right> right = RightOf(rpc_);  // rpc may have been a view of it
  const absl::Status allowed = right.ok() ? principal_->Check(*right) : right.status();
  if (absl::IsUnauthenticated(allowed)) return Denied(allowed, kNoKey);
  if (!allowed.ok()) return Denied(allowed, "right");
  if (context.empty() || principal_->Sees(context)) return absl::OkStatus();
  Denials("context").Add();
  // As long as the name itself, and no name that a store takes: they hold no control characters.
  lookup_name_[0] = '\1';
  return absl::OkStatus();
}

absl::Status Visit::AllowNew(const std::string& name) {
  context_ = lookup_name_ = name;
  if (name.empty() ? principal_->SeesAll() : principal_->Sees(name)) return absl::OkStatus();
  return Denied(absl::PermissionDeniedError(
                    name.empty() ? absl::StrCat("key ", principal_->name(),
                                                " sees some names only: import under one of them")
                                 : absl::StrCat("key ", principal_->name(), " may not add context ",
                                                Shown(name))),
                "context");
}

absl::Status Visit::StillAllowed() const {
  const absl::StatusOr<Right> right = RightOf(rpc_);
  absl::Status now = right.ok() ? principal_->Check(*right) : right.status();
  const int64_t generation = access_->generation();
  if (now.ok() && presented_->generation.load() != generation) {
    if (access_->IsStill(presented_->caller, principal_.get())) {
      presented_->generation.store(generation);
    } else {
      now = absl::PermissionDeniedError(absl::StrCat(
          "key ", principal_->name(), ": what was presented for it stands for it no more"));
    }
  }
  // What he never saw is not withdrawn: he is told of it as of what is not there.
  const bool of_context = !context_.empty() && lookup_name_ == context_;
  if (now.ok() && of_context && !principal_->Sees(context_)) {
    now = absl::PermissionDeniedError(
        absl::StrCat("key ", principal_->name(), ": the context was withdrawn from it"));
  }
  if (now.ok()) return now;
  return Denied(absl::PermissionDeniedError(now.message()), "withdrawn");
}

absl::Status Visit::Told(const absl::Status& status) const {
  if (absl::IsNotFound(status) && !context_.empty()) {
    return absl::NotFoundError(absl::StrCat("context ", Shown(context_), " is not in the store"));
  }
  if (status.ok() || lookup_name_ == context_) return status;
  return absl::Status(status.code(),
                      absl::StrReplaceAll(status.message(), {{lookup_name_, context_}}));
}

void Visit::Log(absl::string_view event, const absl::Status& result,
                const ContextFacts& facts) const {
  if (audit_ == nullptr) return;
  AuditEvent line;
  line.event = lookup_name_ == context_ ? std::string(event) : "denied";
  if (principal_ != nullptr) {
    line.key = principal_->name();
    line.tenant = principal_->tenant_name();
  }
  line.peer = peer_;
  line.rpc = rpc_;
  line.context = Shown(facts.name.empty() ? context_ : facts.name);
  line.content_id = facts.content_id;
  line.tokens = facts.tokens;
  line.bytes = facts.bytes;
  line.result = result;
  audit_->Write(line);
}

absl::Status Visit::SpendCall(int64_t bytes) {
  if (principal_->Spend(1, bytes) == absl::ZeroDuration()) return absl::OkStatus();
  return Denied(absl::ResourceExhaustedError(absl::StrCat(
                    "key ", principal_->name(), ": more requests or bytes per second than it has")),
                "limit");
}

absl::StatusOr<std::shared_ptr<void>> Visit::TakeSession() {
  absl::StatusOr<std::shared_ptr<void>> place = principal_->TakeSession();
  if (!place.ok()) return Denied(place.status(), "limit");
  return place;
}

absl::StatusOr<std::shared_ptr<TenantState>> Visit::TakeImport(int64_t stored_contexts,
                                                               int64_t stored_bytes,
                                                               int64_t bytes) {
  absl::StatusOr<std::shared_ptr<TenantState>> place =
      principal_->TakeImport(stored_contexts, stored_bytes, bytes);
  if (!place.ok()) return Denied(place.status(), "limit");
  return place;
}

}  // namespace carrel::kvstore
