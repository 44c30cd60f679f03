#include "common/byte_budget.h"

#include <algorithm>

#include "common/status.h"

namespace carrel {
namespace {

// Below so many sessions the share of each for small requests does not grow.
constexpr int64_t kFewSessions = 16;
// A part takes such a share of what is left for parts.
constexpr int64_t kPartsOfTheRest = 32;

}  // namespace

ByteBudget::Charge& ByteBudget::Charge::operator=(Charge&& other) noexcept {
  Return();
  budget_ = std::exchange(other.budget_, nullptr);
  account_ = std::move(other.account_);
  bytes_ = std::exchange(other.bytes_, 0);
  return *this;
}

void ByteBudget::Charge::Return() {
  if (budget_ == nullptr) return;
  if (account_ == nullptr) {
    budget_->part_bytes_.fetch_sub(bytes_, std::memory_order_relaxed);
  } else {
    absl::MutexLock lock(&budget_->mu_);
    budget_->used_bytes_ -= bytes_;
    account_->held_bytes_ -= bytes_;
  }
  budget_ = nullptr;
  account_ = nullptr;
}

ByteBudget::Account::Account(ByteBudget* budget) : budget_(budget) {
  absl::MutexLock lock(&budget_->mu_);
  ++budget_->accounts_;
}

ByteBudget::Account::~Account() {
  absl::MutexLock lock(&budget_->mu_);
  --budget_->accounts_;
}

absl::StatusOr<ByteBudget::Charge> ByteBudget::Account::Take(absl::string_view what,
                                                             int64_t bytes) {
  ByteBudget& budget = *budget_;
  absl::MutexLock lock(&budget.mu_);
  const int64_t requests = budget.limit_bytes_ - budget.parts_share();
  const int64_t shared = requests - budget.floors_share();
  const int64_t of_others = budget.used_bytes_ - held_bytes_;
  const int64_t floor = budget.floors_share() / std::max(kFewSessions, budget.accounts_);
  const int64_t most = std::max(floor, (shared - of_others) / 2);
  if (bytes < 0 || bytes > most - held_bytes_ || bytes > requests - budget.used_bytes_) {
    budget.refused_.fetch_add(1, std::memory_order_relaxed);
    return absl::ResourceExhaustedError(
        absl::StrCat(what, ": ", bytes, " bytes beside ", held_bytes_,
                     " that the session holds exceed ", most, ", what it may hold beside ",
                     of_others, " of others (request_budget_bytes=", budget.limit_bytes_, ")"));
  }
  budget.used_bytes_ += bytes;
  held_bytes_ += bytes;
  return Charge(budget_, shared_from_this(), bytes);
}

int64_t ByteBudget::PartBytes(int64_t most) const {
  const int64_t left = parts_share() - part_bytes_.load(std::memory_order_relaxed);
  return std::clamp(left / kPartsOfTheRest, std::min(kLeastPartBytes, most), most);
}

ByteBudget::Charge ByteBudget::TakePart(int64_t bytes) {
  part_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  return Charge(this, nullptr, bytes);
}

int64_t ByteBudget::used_bytes() const {
  absl::MutexLock lock(&mu_);
  return used_bytes_;
}

}  // namespace carrel
