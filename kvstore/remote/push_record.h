// What:   a mark in the bucket that somebody sends a context's files, renewed as long as he does, so that
//         nobody sweeps them; and the mark that somebody sweeps.
// Source: two flags, each set before the other is looked at: who pushes writes his record, then looks for a
//         sweep; who sweeps writes his mark, then looks for records. One of the two sees the other, since a
//         bucket's lists and reads show every write that was answered before.
// Bytes:  pushes/ID/PUSHER: a JSON object, renewed_every_s. sweeps/ID: random digits. How old they are is told
//         by the server's clock alone.
// Errors: as s3_client.h; Unavailable the context is being swept, for longer than we wait.
// Ownership: the bucket outlives both.
// Threads: one of its own renews; the object: any.
#pragma once

#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kvstore/remote/bucket.h"

namespace carrel::kvstore {

// A sweeper begins no deletion after half of it; whoever finds an older mark takes it away.
inline constexpr absl::Duration kSweepLease = absl::Minutes(10);
inline constexpr absl::Duration kRenewEvery = absl::Seconds(30);
// A record is over when it was not renewed for so many times its own interval.
inline constexpr int kRenewalsMissed = 4;

class PushRecord {
 public:
  // Waits while the context is swept, so long at most.
  static absl::StatusOr<std::unique_ptr<PushRecord>> Place(const Bucket& bucket,
                                                           const std::string& context_id,
                                                           absl::Duration renew_every = kRenewEvery,
                                                           absl::Duration wait = absl::Minutes(2));
  // Takes the record away, if the server answers; else it is over by itself.
  ~PushRecord();

  // Whether it held without a gap. If not, what was sent before may be gone: Aborted.
  absl::Status Held();

 private:
  PushRecord(const Bucket& bucket, std::string key, absl::Duration renew_every)
      : bucket_(bucket), key_(std::move(key)), renew_every_(renew_every) {}
  absl::Status Renew();
  void Run();

  const Bucket& bucket_;
  const std::string key_;
  const absl::Duration renew_every_;
  absl::Mutex mu_;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  bool reached_ ABSL_GUARDED_BY(mu_) = false;  // the server, last
  absl::Time renewed_ ABSL_GUARDED_BY(mu_);
  absl::Duration longest_gap_ ABSL_GUARDED_BY(mu_);
  std::thread thread_;
};

// The right to remove what is of a context; at most one has it, while nobody pushes there.
class SweepMark {
 public:
  // Null: somebody pushes, or sweeps. grace: a record that was renewed within it counts, too.
  static absl::StatusOr<std::unique_ptr<SweepMark>> Take(const Bucket& bucket,
                                                         const std::string& context_id,
                                                         absl::Duration grace);
  ~SweepMark();
  // Whether there is time for one more deletion. Aborted: no.
  absl::Status Holds() const;

 private:
  SweepMark(const Bucket& bucket, std::string key, std::string etag, absl::Time until)
      : bucket_(bucket), key_(std::move(key)), etag_(std::move(etag)), until_(until) {}
  const Bucket& bucket_;
  const std::string key_, etag_;
  const absl::Time until_;  // of SteadyNow()
};

// Whether the record, as it was listed, is of somebody who pushes.
absl::StatusOr<bool> IsLive(const Bucket& bucket, const ListedObject& record, absl::Duration grace);

}  // namespace carrel::kvstore
