// What:   somebody whom the access rules know, and what is left of what he may do. It follows the
//         keys file: a session's principal has the rights that the file gives now.
// Errors: Unauthenticated: the key was withdrawn or has expired; PermissionDenied names the right
//         that is missing, never a context; ResourceExhausted names the limit.
// Threads: any.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "kvstore/access/keys_file.h"

namespace carrel::kvstore {

// A bound on something per second, with one second's worth to spend at once; rate 0: none. A clock that
// goes back costs what has been saved, no more.
class RateLimit {
 public:
  void SetRate(double per_s) {
    absl::MutexLock lock(&mu_);
    if (per_s_ == 0) saved_ = per_s;
    per_s_ = per_s;
    saved_ = std::min(saved_, per_s_);
  }

  // What is spent is spent, even if there was less: returns how long to wait until it is paid back
  // (zero: go on).
  absl::Duration Spend(double amount, absl::Time now) {
    absl::MutexLock lock(&mu_);
    if (per_s_ == 0) return absl::ZeroDuration();
    const double passed_s = std::max(0.0, absl::ToDoubleSeconds(now - last_));
    last_ = now;
    saved_ = std::min(per_s_, saved_ + passed_s * per_s_) - amount;
    return saved_ >= 0 ? absl::ZeroDuration() : absl::Seconds(-saved_ / per_s_);
  }

 private:
  absl::Mutex mu_;
  double per_s_ ABSL_GUARDED_BY(mu_) = 0;
  double saved_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Time last_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
};

// What a tenant has and did, over all its keys.
struct TenantUse {
  std::string name;
  int64_t sessions = 0, imports = 0;              // now
  int64_t requests = 0, bytes = 0, refusals = 0;  // since the start
  int64_t stored_contexts = 0, stored_bytes = 0;  // filled in by who knows the store
};

// What all keys of a tenant share; it lives on when the keys file is read again.
class TenantState {
 public:
  void Set(const Tenant& tenant);
  Tenant tenant() const;
  absl::Status TakeSession();
  void ReturnSession();
  int64_t sessions() const;
  // Beside what is stored and what else is on its way in. CheckImports: whether all of it still fits.
  absl::Status TakeImport(int64_t stored_contexts, int64_t stored_bytes, int64_t bytes);
  absl::Status CheckImports(int64_t stored_contexts, int64_t stored_bytes) const;
  void ReturnImport(int64_t bytes);
  // What its interrupted imports may hold beside all that; the most there is without a quota.
  int64_t RoomForRemains(int64_t stored_bytes) const;
  void Count(int64_t requests, int64_t bytes, int64_t refusals);
  TenantUse use() const;

 private:
  absl::Status CheckQuota(int64_t contexts, int64_t bytes, int64_t more_contexts,
                          int64_t more_bytes) const ABSL_SHARED_LOCKS_REQUIRED(mu_);

  mutable absl::Mutex mu_;
  Tenant tenant_ ABSL_GUARDED_BY(mu_);
  int64_t sessions_ ABSL_GUARDED_BY(mu_) = 0;
  TenantUse use_ ABSL_GUARDED_BY(mu_);
  int64_t imports_ ABSL_GUARDED_BY(mu_) = 0, import_bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

class Principal : public std::enable_shared_from_this<Principal> {
 public:
  struct Counts {
    int64_t sessions = 0;  // now
    int64_t delayed = 0;   // requests, since the start
  };

  Principal(AccessEntry entry, std::shared_ptr<TenantState> tenant);

  // A new reading of its entry, or that there is none any more.
  void Update(AccessEntry entry, std::shared_ptr<TenantState> tenant);
  void Withdraw();

  std::string name() const;
  std::string tenant_name() const;  // empty: none
  std::string prefix() const;       // of his tenant's contexts' names; empty: none
  // May he do this at all (before anybody looks at a context).
  absl::Status Check(Right right, absl::Time now = absl::Now()) const;
  Rights rights(absl::Time now = absl::Now()) const;  // those that Check gives him
  // Whether contexts of this name exist for him.
  bool Sees(absl::string_view context) const;
  // Whether a context of this name counts against his tenant's quotas.
  bool OfTenant(absl::string_view context) const;
  // Every name there is: he may be told about damage in the store.
  bool SeesAll() const;

  // Counted until the result is destroyed.
  absl::StatusOr<std::shared_ptr<void>> TakeSession();
  void CountRefusal();  // of the tenant's
  // How long to wait before the next request is read.
  absl::Duration Spend(int64_t requests, int64_t bytes, absl::Time now = absl::Now());
  // A place in the tenant's quotas for a context of this size that is on its way in, beside those of
  // `stored_bytes` in all that are there; null without a tenant. Given back when the last copy goes.
  absl::StatusOr<std::shared_ptr<TenantState>> TakeImport(int64_t stored_contexts,
                                                          int64_t stored_bytes, int64_t bytes);

  // Whose turn his requests take: the tenant's, or his own. Valid while the result lives.
  std::shared_ptr<const void> turn() const;
  Counts counts() const;

 private:
  mutable absl::Mutex mu_;
  AccessEntry entry_ ABSL_GUARDED_BY(mu_);
  std::shared_ptr<TenantState> tenant_ ABSL_GUARDED_BY(mu_);
  std::string prefix_ ABSL_GUARDED_BY(mu_);  // the tenant's
  bool withdrawn_ ABSL_GUARDED_BY(mu_) = false;
  Counts counts_ ABSL_GUARDED_BY(mu_);
  const std::shared_ptr<const int> own_turn_ = std::make_shared<const int>(0);
  RateLimit requests_, bytes_;
};

}  // namespace carrel::kvstore
