#include "kvstore/access/access.h"

#include <spdlog/spdlog.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/secret.h"
#include "common/status.h"

namespace carrel::kvstore {
namespace {

AccessEntry BuiltIn(const char* name, Rights rights) {
  AccessEntry entry;
  entry.name = name;
  entry.rights = rights;
  return entry;
}

}  // namespace

std::shared_ptr<Access> Access::Open(bool everything) {
  std::shared_ptr<Access> access(new Access());
  access->everything_ = everything;
  absl::MutexLock lock(&access->mu_);
  AccessEntry local = BuiltIn("local", Rights::All());
  local.owner = true;
  access->principals_["local"] = std::make_shared<Principal>(std::move(local), nullptr);
  AccessEntry anyone = BuiltIn("anyone", {Right::kList, Right::kOpen});
  anyone.identity.anonymous = true;
  access->principals_["anyone"] = std::make_shared<Principal>(std::move(anyone), nullptr);
  return access;
}

std::shared_ptr<Access> Access::OpenWithToken(const std::string& token) {
  std::shared_ptr<Access> access = Open();
  access->token_sha256_ = AccessKeySha256(token);
  absl::MutexLock lock(&access->mu_);
  access->principals_["token"] =
      std::make_shared<Principal>(BuiltIn("token", Rights::All()), nullptr);
  return access;
}

absl::StatusOr<std::shared_ptr<Access>> Access::Create(const std::string& keys_file,
                                                       absl::Duration interval) {
  std::shared_ptr<Access> access(new Access());
  access->keys_file_ = keys_file;
  // First the watch, so that no change is missed. What went wrong Reload logs and counts.
  access->watch_ =
      std::make_unique<FileWatch>(std::vector<std::string>{keys_file}, interval,
                                  [self = access.get()] { self->Reload().IgnoreError(); });
  const absl::Status status = access->Reload();
  if (!status.ok()) return status;
  return access;
}

absl::Status Access::Reload() {
  if (keys_file_.empty()) return absl::OkStatus();
  const absl::StatusOr<KeysFile> file = ReadKeysFile(keys_file_);
  if (!file.ok()) {
    ++failed_reloads_;
    spdlog::error("keys: not used, the rules stay as they were: {}",
                  std::string(file.status().message()));
    return file.status();
  }
  Apply(*file);
  ++reloads_;
  spdlog::info("keys: read file={} keys={} tenants={}", keys_file_, file->entries.size(),
               file->tenants.size());
  return absl::OkStatus();
}

void Access::Apply(const KeysFile& file) {
  absl::MutexLock lock(&mu_);
  tenant_names_.clear();
  for (const Tenant& tenant : file.tenants) {
    tenant_names_.insert(tenant.name);
    std::shared_ptr<TenantState>& state = tenants_[tenant.name];
    if (state == nullptr) state = std::make_shared<TenantState>();
    state->Set(tenant);
  }
  std::map<std::string, std::shared_ptr<Principal>> before;
  before.swap(principals_);
  keys_.clear();
  certificates_.clear();
  uids_.clear();
  anonymous_ = nullptr;
  for (const AccessEntry& entry : file.entries) {
    const auto tenant = entry.tenant.empty() ? nullptr : tenants_.at(entry.tenant);
    std::shared_ptr<Principal>& principal = principals_[entry.name];
    if (const auto known = before.find(entry.name); known != before.end()) {
      principal = known->second;
      principal->Update(entry, tenant);
      before.erase(known);
    } else {
      principal = std::make_shared<Principal>(entry, tenant);
    }
    for (const std::string& hash : entry.identity.key_sha256) keys_.emplace_back(hash, principal);
    if (!entry.identity.certificate.empty()) certificates_[entry.identity.certificate] = principal;
    if (entry.identity.uid.has_value()) uids_[*entry.identity.uid] = principal;
    if (entry.identity.anonymous) anonymous_ = principal;
  }
  for (const auto& [name, principal] : before) principal->Withdraw();
}

std::shared_ptr<Principal> Access::WithoutKeys(const Caller& caller) {
  absl::MutexLock lock(&mu_);
  if (everything_ || caller.local) return principals_.at("local");
  if (!token_sha256_.empty() && EqualSecrets(token_sha256_, AccessKeySha256(caller.key))) {
    return principals_.at("token");
  }
  if (caller.certificate_names.empty()) return principals_.at("anyone");
  AccessEntry entry = BuiltIn("", {Right::kList, Right::kOpen});
  entry.name = absl::StrCat("certificate ", caller.certificate_names[0]);
  return std::make_shared<Principal>(std::move(entry), nullptr);
}

absl::StatusOr<std::shared_ptr<Principal>> Access::Find(const Caller& caller) {
  if (!caller.key.empty()) {
    const std::string hash = AccessKeySha256(caller.key);
    absl::MutexLock lock(&mu_);
    std::shared_ptr<Principal> found;
    for (const auto& [sha256, principal] : keys_) {  // all of them, wherever the right one stands
      if (EqualSecrets(sha256, hash)) found = principal;
    }
    if (found != nullptr) return found;
    return absl::UnauthenticatedError("the key that was presented is not valid here");
  }
  absl::MutexLock lock(&mu_);
  for (const std::string& name : caller.certificate_names) {
    if (const auto it = certificates_.find(name); it != certificates_.end()) return it->second;
  }
  if (caller.uid.has_value()) {
    if (const auto it = uids_.find(*caller.uid); it != uids_.end()) return it->second;
  }
  if (anonymous_ != nullptr) return anonymous_;
  return absl::UnauthenticatedError(
      "a key is needed here, and none was presented (--key-file FILE, or CARREL_KEY_FILE)");
}

absl::StatusOr<std::shared_ptr<Principal>> Access::Admit(const Caller& caller) {
  if (has_keys()) return Find(caller);
  return WithoutKeys(caller);
}

bool Access::IsStill(const Caller& caller, const Principal* principal) {
  if (!has_keys()) return true;
  const absl::StatusOr<std::shared_ptr<Principal>> now = Find(caller);
  return now.ok() && now->get() == principal;
}

std::shared_ptr<Principal> Access::Named(const std::string& name) const {
  absl::MutexLock lock(&mu_);
  const auto found = principals_.find(name);
  return found == principals_.end() ? nullptr : found->second;
}

std::vector<std::pair<TenantUse, std::string>> Access::tenant_uses() const {
  absl::MutexLock lock(&mu_);
  std::vector<std::pair<TenantUse, std::string>> uses;
  for (const std::string& name : tenant_names_) {
    const std::shared_ptr<TenantState>& state = tenants_.at(name);
    uses.emplace_back(state->use(), state->tenant().prefix);
  }
  return uses;
}

}  // namespace carrel::kvstore
