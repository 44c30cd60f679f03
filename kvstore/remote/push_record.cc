#include "kvstore/remote/push_record.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/json.h"
#include "common/secret.h"
#include "common/status.h"
#include "common/steady_time.h"

namespace carrel::kvstore {
namespace {

constexpr int64_t kMostRecordBytes = 4 << 10;
constexpr double kMostInterval = 3600;

std::string RecordText(absl::Duration renew_every) {
  return DumpJson(nlohmann::json{{"renewed_every_s", absl::ToDoubleSeconds(renew_every)}});
}

// How old the sweep's mark is; NotFound: there is none.
absl::StatusOr<absl::Duration> AgeOfMark(const Bucket& bucket, const std::string& key,
                                         std::string* etag) {
  ASSIGN_OR_RETURN(const ObjectInfo info, bucket.client().Head(key));
  *etag = info.etag;
  return info.server_time - info.modified;
}

// Waits until nobody sweeps.
absl::Status AwaitNoSweep(const Bucket& bucket, const std::string& context_id,
                          absl::Duration wait) {
  const std::string key = bucket.SweepKey(context_id);
  for (const absl::Time until = SteadyNow() + wait;;) {
    std::string etag;
    const absl::StatusOr<absl::Duration> age = AgeOfMark(bucket, key, &etag);
    if (absl::IsNotFound(age.status())) return absl::OkStatus();
    RETURN_IF_ERROR(age.status());
    if (*age > kSweepLease) {
      RETURN_IF_ERROR(bucket.client().Remove(key, Condition::IfMatch(etag)));
      continue;
    }
    if (SteadyNow() > until) {
      return absl::UnavailableError(
          absl::StrCat(bucket.client().UriOf(key), ": what is left of context ", context_id,
                       " has been removed for ", absl::FormatDuration(*age), "; try again later"));
    }
    absl::SleepFor(absl::Milliseconds(200));
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<PushRecord>> PushRecord::Place(const Bucket& bucket,
                                                              const std::string& context_id,
                                                              absl::Duration renew_every,
                                                              absl::Duration wait) {
  const std::string key =
      absl::StrCat(bucket.PushFolder(context_id), absl::BytesToHexString(RandomBytes(8)));
  std::unique_ptr<PushRecord> record(new PushRecord(bucket, key, renew_every));
  RETURN_IF_ERROR(record->Renew());
  record->thread_ = std::thread([r = record.get()] { r->Run(); });
  RETURN_IF_ERROR(AwaitNoSweep(bucket, context_id, wait));
  return record;
}

PushRecord::~PushRecord() {
  {
    absl::MutexLock lock(&mu_);
    ended_ = true;
  }
  if (thread_.joinable()) thread_.join();
  if (reached_) (void)bucket_.client().Remove(key_);
}

absl::Status PushRecord::Renew() {
  const absl::Status put = bucket_.client().Put(key_, RecordText(renew_every_)).status();
  absl::MutexLock lock(&mu_);
  reached_ = put.ok();
  RETURN_IF_ERROR(put);
  const absl::Time now = SteadyNow();
  if (renewed_ != absl::Time()) longest_gap_ = std::max(longest_gap_, now - renewed_);
  renewed_ = now;
  return absl::OkStatus();
}

void PushRecord::Run() {
  for (;;) {
    {
      absl::MutexLock lock(&mu_);
      mu_.AwaitWithTimeout(absl::Condition(&ended_), renew_every_);
      if (ended_) return;
    }
    (void)Renew();  // what was missed, Held() tells
  }
}

absl::Status PushRecord::Held() {
  RETURN_IF_ERROR(Renew());
  absl::MutexLock lock(&mu_);
  const absl::Duration most = (kRenewalsMissed - 1) * renew_every_;
  if (longest_gap_ <= most) return absl::OkStatus();
  return absl::AbortedError(absl::StrCat(
      bucket_.client().UriOf(key_), ": it was not renewed for ", absl::FormatDuration(longest_gap_),
      ", at most ", absl::FormatDuration(most),
      " are safe: what was sent may have been swept; the same command sends what is missing"));
}

absl::StatusOr<bool> IsLive(const Bucket& bucket, const ListedObject& record,
                            absl::Duration grace) {
  const absl::Duration age = bucket.client().ServerNow() - record.modified;
  if (age <= grace) return true;
  const absl::StatusOr<std::string> text = bucket.client().Read(record.key, kMostRecordBytes);
  if (absl::IsNotFound(text.status())) return false;
  RETURN_IF_ERROR(text.status());
  double every = absl::ToDoubleSeconds(kRenewEvery);
  if (const absl::StatusOr<nlohmann::json> json = ParseJsonObject(*text, "record", kMessageBounds);
      json.ok()) {
    every = JsonFields("record", *json)
                .NumberOr("renewed_every_s", every, 0, kMostInterval)
                .value_or(every);
  }
  // Times of lists are whole seconds.
  return age <= kRenewalsMissed * absl::Seconds(every) + absl::Seconds(2);
}

absl::StatusOr<std::unique_ptr<SweepMark>> SweepMark::Take(const Bucket& bucket,
                                                           const std::string& context_id,
                                                           absl::Duration grace) {
  const std::string key = bucket.SweepKey(context_id);
  const absl::Time until = SteadyNow() + kSweepLease / 2;
  const std::string own = absl::BytesToHexString(RandomBytes(16));  // so that its tag is its own
  absl::StatusOr<std::string> put = bucket.client().Put(key, own, Condition::Absent());
  if (absl::IsAlreadyExists(put.status())) {
    std::string etag;
    const absl::StatusOr<absl::Duration> age = AgeOfMark(bucket, key, &etag);
    if (absl::IsNotFound(age.status())) return nullptr;
    RETURN_IF_ERROR(age.status());
    if (*age <= kSweepLease) return nullptr;
    // Of somebody who was killed. What others took away meanwhile, the next sweep finds.
    RETURN_IF_ERROR(bucket.client().Remove(key, Condition::IfMatch(etag)));
    put = bucket.client().Put(key, own, Condition::Absent());
    if (absl::IsAlreadyExists(put.status())) return nullptr;
  }
  RETURN_IF_ERROR(put.status());
  std::unique_ptr<SweepMark> mark(new SweepMark(bucket, key, *put, until));
  bool live = false;
  RETURN_IF_ERROR(bucket.client().ForEach(
      bucket.PushFolder(context_id), [&](const ListedObject& record) -> absl::Status {
        ASSIGN_OR_RETURN(const bool is_live, IsLive(bucket, record, grace));
        live |= is_live;
        return absl::OkStatus();
      }));
  if (live) return nullptr;
  return mark;
}

// After the lease it may be another's.
SweepMark::~SweepMark() {
  if (SteadyNow() < until_ + kSweepLease / 4) {
    (void)bucket_.client().Remove(key_, Condition::IfMatch(etag_));
  }
}

absl::Status SweepMark::Holds() const {
  if (SteadyNow() < until_) return absl::OkStatus();
  return absl::AbortedError(absl::StrCat(bucket_.client().UriOf(key_), ": removing took ",
                                         absl::FormatDuration(kSweepLease / 2),
                                         "; the next sweep goes on"));
}

}  // namespace carrel::kvstore
