#include "kvstore/access/principal.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kvstore/access/kept_name.h"

namespace carrel::kvstore {

void TenantState::Set(const Tenant& tenant) {
  absl::MutexLock lock(&mu_);
  tenant_ = tenant;
}

Tenant TenantState::tenant() const {
  absl::MutexLock lock(&mu_);
  return tenant_;
}

int64_t TenantState::sessions() const {
  absl::MutexLock lock(&mu_);
  return sessions_;
}

absl::Status TenantState::TakeSession() {
  absl::MutexLock lock(&mu_);
  if (tenant_.max_sessions > 0 && sessions_ >= tenant_.max_sessions) {
    return absl::ResourceExhaustedError(
        absl::StrCat("tenant ", tenant_.name, ": ", sessions_,
                     " sessions are open (sessions=", tenant_.max_sessions, ")"));
  }
  ++sessions_;
  return absl::OkStatus();
}

void TenantState::ReturnSession() {
  absl::MutexLock lock(&mu_);
  --sessions_;
}

absl::Status TenantState::CheckQuota(int64_t contexts, int64_t bytes, int64_t more_contexts,
                                     int64_t more_bytes) const {
  if (tenant_.max_contexts > 0 && more_contexts > tenant_.max_contexts - contexts) {
    return absl::ResourceExhaustedError(absl::StrCat("tenant ", tenant_.name, ": ", more_contexts,
                                                     " contexts on their way in beside ", contexts,
                                                     " exceed contexts=", tenant_.max_contexts));
  }
  if (tenant_.max_bytes > 0 && more_bytes > tenant_.max_bytes - bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "tenant ", tenant_.name, ": ", more_bytes, " bytes on their way in beside the ", bytes,
        " that it has stored exceed bytes=", tenant_.max_bytes));
  }
  return absl::OkStatus();
}

absl::Status TenantState::TakeImport(int64_t stored_contexts, int64_t stored_bytes, int64_t bytes) {
  absl::MutexLock lock(&mu_);
  RETURN_IF_ERROR(CheckQuota(stored_contexts, stored_bytes, imports_ + 1, import_bytes_ + bytes));
  ++imports_;
  import_bytes_ += bytes;
  return absl::OkStatus();
}

absl::Status TenantState::CheckImports(int64_t stored_contexts, int64_t stored_bytes) const {
  absl::MutexLock lock(&mu_);
  return CheckQuota(stored_contexts, stored_bytes, imports_, import_bytes_);
}

int64_t TenantState::RoomForRemains(int64_t stored_bytes) const {
  absl::MutexLock lock(&mu_);
  if (tenant_.max_bytes == 0) return std::numeric_limits<int64_t>::max();
  return std::max<int64_t>(0, tenant_.max_bytes - stored_bytes - import_bytes_);
}

void TenantState::Count(int64_t requests, int64_t bytes, int64_t refusals) {
  absl::MutexLock lock(&mu_);
  use_.requests += requests;
  use_.bytes += bytes;
  use_.refusals += refusals;
}

TenantUse TenantState::use() const {
  absl::MutexLock lock(&mu_);
  TenantUse use = use_;
  use.name = tenant_.name;
  use.sessions = sessions_;
  use.imports = imports_;
  return use;
}

void TenantState::ReturnImport(int64_t bytes) {
  absl::MutexLock lock(&mu_);
  --imports_;
  import_bytes_ -= bytes;
}

Principal::Principal(AccessEntry entry, std::shared_ptr<TenantState> tenant) {
  Update(std::move(entry), std::move(tenant));
}

void Principal::Update(AccessEntry entry, std::shared_ptr<TenantState> tenant) {
  requests_.SetRate(entry.limits.requests_per_s);
  bytes_.SetRate(entry.limits.bytes_per_s);
  absl::MutexLock lock(&mu_);
  entry_ = std::move(entry);
  prefix_ = tenant == nullptr ? "" : tenant->tenant().prefix;
  tenant_ = std::move(tenant);
  withdrawn_ = false;
}

void Principal::Withdraw() {
  absl::MutexLock lock(&mu_);
  withdrawn_ = true;
}

std::string Principal::name() const {
  absl::MutexLock lock(&mu_);
  return entry_.name;
}

std::string Principal::tenant_name() const {
  absl::MutexLock lock(&mu_);
  return entry_.tenant;
}

absl::Status Principal::Check(Right right, absl::Time now) const {
  absl::MutexLock lock(&mu_);
  if (withdrawn_) {
    return absl::UnauthenticatedError(absl::StrCat("key ", entry_.name, " was withdrawn"));
  }
  if (now >= entry_.expires) {
    return absl::UnauthenticatedError(
        absl::StrCat("key ", entry_.name, " expired at ",
                     absl::FormatTime(entry_.expires, absl::UTCTimeZone())));
  }
  if (entry_.rights.Has(right)) return absl::OkStatus();
  const std::string who = entry_.identity.anonymous ? "no key was presented, and who presents none"
                                                    : absl::StrCat("key ", entry_.name);
  return absl::PermissionDeniedError(absl::StrCat(who, " lacks the right ", RightName(right),
                                                  " (has: ", RightNames(entry_.rights), ")"));
}

Rights Principal::rights(absl::Time now) const {
  absl::MutexLock lock(&mu_);
  return withdrawn_ || now >= entry_.expires ? Rights() : entry_.rights;
}

bool Principal::Sees(absl::string_view context) const {
  absl::MutexLock lock(&mu_);
  if (!absl::StartsWith(context, prefix_)) return false;
  // The machine's owner, and what is done on his behalf, sees all; an administrator what is nobody's.
  const bool administers = entry_.rights.Has(Right::kAdmin) && IsNobodysKept(context);
  if (!entry_.owner && !administers && KeptByAnother(context, entry_.name)) return false;
  return std::any_of(entry_.contexts.begin(), entry_.contexts.end(),
                     [&](const std::string& glob) { return MatchesGlob(glob, context); });
}

bool Principal::OfTenant(absl::string_view context) const {
  absl::MutexLock lock(&mu_);
  return tenant_ != nullptr && absl::StartsWith(context, prefix_);
}

std::string Principal::prefix() const {
  absl::MutexLock lock(&mu_);
  return prefix_;
}

bool Principal::SeesAll() const {
  absl::MutexLock lock(&mu_);
  return prefix_.empty() &&
         std::find(entry_.contexts.begin(), entry_.contexts.end(), "*") != entry_.contexts.end();
}

absl::StatusOr<std::shared_ptr<void>> Principal::TakeSession() {
  std::shared_ptr<TenantState> tenant;
  {
    absl::MutexLock lock(&mu_);
    const int64_t most = entry_.limits.sessions;
    if (most > 0 && counts_.sessions >= most) {
      return absl::ResourceExhaustedError(absl::StrCat("key ", entry_.name, ": ", counts_.sessions,
                                                       " sessions are open (sessions=", most, ")"));
    }
    if (tenant_ != nullptr) RETURN_IF_ERROR(tenant_->TakeSession());
    ++counts_.sessions;
    tenant = tenant_;
  }
  // The object that the pointer stands for is the place itself: the last copy gives it back.
  return std::shared_ptr<void>(static_cast<void*>(this),
                               [self = shared_from_this(), tenant](void*) {
                                 if (tenant != nullptr) tenant->ReturnSession();
                                 absl::MutexLock lock(&self->mu_);
                                 --self->counts_.sessions;
                               });
}

void Principal::CountRefusal() {
  absl::MutexLock lock(&mu_);
  if (tenant_ != nullptr) tenant_->Count(0, 0, 1);
}

absl::Duration Principal::Spend(int64_t requests, int64_t bytes, absl::Time now) {
  const absl::Duration wait = std::max(requests_.Spend(static_cast<double>(requests), now),
                                       bytes_.Spend(static_cast<double>(bytes), now));
  absl::MutexLock lock(&mu_);
  if (tenant_ != nullptr) tenant_->Count(requests, bytes, 0);
  if (requests > 0 && wait > absl::ZeroDuration()) ++counts_.delayed;
  return wait;
}

absl::StatusOr<std::shared_ptr<TenantState>> Principal::TakeImport(int64_t stored_contexts,
                                                                   int64_t stored_bytes,
                                                                   int64_t bytes) {
  std::shared_ptr<TenantState> tenant;
  {
    absl::MutexLock lock(&mu_);
    tenant = tenant_;
  }
  if (tenant == nullptr) return tenant;
  RETURN_IF_ERROR(tenant->TakeImport(stored_contexts, stored_bytes, bytes));
  TenantState* const of = tenant.get();
  return std::shared_ptr<TenantState>(
      of, [tenant = std::move(tenant), bytes](TenantState*) { tenant->ReturnImport(bytes); });
}

std::shared_ptr<const void> Principal::turn() const {
  absl::MutexLock lock(&mu_);
  if (tenant_ != nullptr) return tenant_;
  return own_turn_;
}

Principal::Counts Principal::counts() const {
  absl::MutexLock lock(&mu_);
  return counts_;
}

}  // namespace carrel::kvstore
