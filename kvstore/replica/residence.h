// What:   which of a bucket's contexts lie in this store: brought when they are first asked for, each by one pull
//         however many ask, and let go again, those first that nobody opened for longest.
// Holds:  what somebody asked for stays while he keeps his handle, also before an engine has it open.
// Edge:   nothing is fetched row by row: a context is here wholly or not at all (decision 098). A pull begins when
//         there is room for all of it: what is open, what somebody waits for and what is on its way is not let go
//         for another. A context that left the bucket, or whose name is bound to another one there, goes once
//         nobody has it open; from then on its name is what the bucket says. Without an answer of the bucket what
//         is here stays, and answers.
// Errors: of Bring: NotFound no such name in the bucket; ResourceExhausted the context is larger than the cache
//         (names both), or too many wait; Unavailable the bucket does not answer; those of pull.h and of the
//         store's import; Cancelled this is being destroyed.
// Threads: any. What is told is told by threads of this class, one call at a time for each who waits; it may not
//         wait for this class there.
// Ownership: what the target refers to outlives this.
//
//   Residence residence(config, std::move(names), std::move(files), TargetOf(engine));
//   residence.Bring("report", {.progress = .., .done = [](const absl::Status& status) { .. }});
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/metrics.h"
#include "kvstore/engine/context_source.h"
#include "kvstore/remote/bucket.h"
#include "kvstore/remote/pull.h"
#include "kvstore/storage/context_stream.h"

namespace carrel::kvstore {

class Engine;
class Store;

struct ResidenceConfig {
  int64_t cache_bytes = 0;  // > 0: of the files of contexts here, and on their way
  int pulls = 2;            // at once
  int64_t most_waiting = 4096;
  // How often the bucket's names are looked at: what left it is refused so soon after.
  absl::Duration look_every = absl::Seconds(5);
  // A context that was brought for later (ContextWaiter) is not let go before somebody opens it, or so long.
  absl::Duration keep_unopened = absl::Seconds(30);
  PullOptions pull;
  // Set when the residence is destroyed: what the clients of both buckets look at (S3Client::Create), so that
  // nothing waits for a server that does not answer. Null: it is waited for.
  std::shared_ptr<std::atomic<bool>> stop;
};

// A context that lies here.
struct LyingHere {
  std::string name, content_id;
  int64_t bytes = 0;  // of its files
};

// The store that contexts lie in.
struct ResidenceTarget {
  std::function<absl::StatusOr<std::vector<LyingHere>>()> list;
  // FailedPrecondition: it is open.
  std::function<absl::Status(const std::string& name)> remove;
  std::function<bool(const std::string& name)> is_open;
  std::function<absl::StatusOr<std::unique_ptr<ContextImport>>(const std::string& name)> import;
  std::function<absl::StatusOr<v1::Manifest>(const std::string& name)> describe;
};

struct ResidenceStatistics {
  int64_t contexts = 0, bytes = 0;  // here
  int64_t cache_bytes = 0;
  int64_t pulling = 0, queued = 0,
          waiting = 0;  // contexts on their way, and before it; who waits for them
  int64_t pulls = 0, pull_failures = 0, pulled_bytes = 0, hits = 0, evictions = 0, left_bucket = 0;
  double pull_seconds = 0;
  double seconds_since_look = 0;  // that the bucket answered
  int64_t warming =
      0;  // contexts that are to be here before this is ready (warming.h), and are not
};

std::vector<MetricFamily> ResidenceMetrics(const ResidenceStatistics& statistics);

// An engine's: it outlives the target.
ResidenceTarget TargetOf(Engine& engine);

class Residence final : public ContextSource {
 public:
  // names: a bucket whose client gives up soon, for what somebody waits for at once; files: the same bucket, for
  // pulls. Contexts that the target has count as brought.
  static absl::StatusOr<std::unique_ptr<Residence>> Create(const ResidenceConfig& config,
                                                           std::unique_ptr<Bucket> names,
                                                           std::unique_ptr<Bucket> files,
                                                           ResidenceTarget target);
  ~Residence() override;

  // Tells `done` once the context is here: at once, on this thread, where it is. Returns a handle; when the last
  // of a context's waiters has dropped his, a pull that has not begun is given up.
  std::shared_ptr<void> Bring(const std::string& name, ContextWaiter waiter) override;

  std::vector<SourceContext> Contexts() const override;
  // Of one that is here what the store says; else what the bucket does.
  absl::StatusOr<v1::Manifest> Describe(const std::string& name) override;

  // Whether it is here now.
  bool IsHere(const std::string& name) const;
  // Names of the bucket, as they were looked at last; also those that are not here.
  std::vector<BoundName> Names() const;
  ResidenceStatistics Statistics() const;
  // Brings nothing more, and tells all who wait Cancelled: before a server is drained, so that nobody waits for a
  // bucket then. What is here stays.
  void End();
  // Looks at the bucket's names now; for tests and who knows that they changed.
  absl::Status Look();
  // For Statistics.
  void SetWarming(int64_t contexts) { warming_ = contexts; }

 private:
  // Of who waits, or was told: a context stays while one of its holds is kept.
  struct Handle {
    std::shared_ptr<void> hold;
  };
  struct Local {
    std::string content_id;
    int64_t bytes = 0;
    int64_t last_use = 0;
    absl::Time keep_until = absl::InfinitePast();           // for who opens it later
    std::shared_ptr<void> hold = std::make_shared<int>(0);  // and of each handle
    bool left = false;                                      // the bucket has it no more
    bool going = false;  // it is being removed: who asks for it now waits for it to come again
    bool held() const { return hold.use_count() > 1; }
  };
  struct Waiting {
    ContextWaiter waiter;
    std::weak_ptr<Handle> handle;
  };
  struct Pull {
    std::string name;
    ContextComes comes;
    absl::Time told = absl::InfinitePast();
    bool telling = false;  // on a thread that does not hold the lock
    std::list<Waiting> waiting;
  };

  Residence(const ResidenceConfig& config, std::unique_ptr<Bucket> names,
            std::unique_ptr<Bucket> files, ResidenceTarget target);
  void RunPulls();
  void RunLooks();
  void RunTells();
  // brought: of one that came; null: it is here after all.
  absl::Status Fetch(const std::shared_ptr<Pull>& pull, std::optional<Local>* brought);
  // It is here: who waits holds it. brought: as of Fetch.
  void Arrived(const Pull& pull, std::optional<Local> brought) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status WaitForRoom(const std::shared_ptr<Pull>& pull, int64_t bytes);
  // The context that may go first; null: none.
  const std::string* FirstToGo() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Whether one is here, which is not being removed: waits for the end of that.
  bool StaysHere(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status RemoveLocal(const std::string& name);
  // The rest of that, of one that is marked as going.
  absl::Status RemoveGoing(const std::string& name);
  // Tells its waiters how far it is, if that is due.
  void Tell(const std::shared_ptr<Pull>& pull);
  bool Wanted(const Pull& pull) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const ResidenceConfig config_;
  const std::unique_ptr<Bucket> names_, files_;
  const ResidenceTarget target_;

  mutable absl::Mutex mu_;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  std::map<std::string, Local> local_ ABSL_GUARDED_BY(mu_);
  int64_t uses_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t local_bytes_ ABSL_GUARDED_BY(mu_) = 0;  // and of pulls that have their room
  std::map<std::string, std::shared_ptr<Pull>> pulls_ ABSL_GUARDED_BY(mu_);
  std::deque<std::shared_ptr<Pull>> queue_ ABSL_GUARDED_BY(mu_);
  int64_t waiting_ ABSL_GUARDED_BY(mu_) = 0;
  // As the bucket said last.
  std::map<std::string, BoundName> bound_ ABSL_GUARDED_BY(mu_);
  absl::Time looked_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  int64_t changed_ ABSL_GUARDED_BY(mu_) = 0;  // grows whenever room may have come
  ResidenceStatistics counted_ ABSL_GUARDED_BY(mu_);
  std::atomic<int64_t> warming_{0};

  absl::Mutex looking_;
  std::vector<std::thread> threads_;
};

// Marks the folder that a replica keeps contexts of a bucket in, in which `store` is open: what lies there may
// be removed at any time, and only there. FOLDER/replica-of: the bucket's URI, and a line break.
// FailedPrecondition the folder is of another bucket (names both), or holds contexts that no bucket vouches for;
// those of the file system.
absl::Status ClaimCacheFolder(const std::string& folder, const std::string& uri,
                              const Store& store);

}  // namespace carrel::kvstore
