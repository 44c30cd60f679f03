// What:   a store being read by many sessions: open contexts, loaded indexes and threads, shared
//         and bounded (EngineConfig).
// Errors: NotFound a context; FailedPrecondition a fingerprint that differs (names every field), a
//         context in use that is to be deleted, a read-only store; ResourceExhausted a limit (names
//         it).
// Threads: any. What says that it blocks may read the disk: call it from Submit's thread.
// Ownership: the engine outlives its sessions and replies.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "common/byte_budget.h"
#include "common/scheduling.h"
#include "kvstore/engine/background_checks.h"
#include "kvstore/engine/engine_config.h"
#include "kvstore/engine/index_cache.h"
#include "kvstore/engine/layer_loader.h"
#include "kvstore/engine/open_context.h"
#include "kvstore/engine/request_metrics.h"
#include "kvstore/engine/resident_budget.h"
#include "kvstore/engine/session.h"
#include "kvstore/engine/verify_context.h"
#include "kvstore/engine/work_queue.h"
#include "kvstore/storage/context_stream.h"

namespace carrel::v1 {
class StatisticsResponse;
class TokensRequest;
class TokensResponse;
}  // namespace carrel::v1

namespace carrel::kvstore {

class Store;

class Engine {
 public:
  static absl::StatusOr<std::unique_ptr<Engine>> Create(const EngineConfig& config,
                                                        std::unique_ptr<Store> store);
  ~Engine();

  absl::StatusOr<std::shared_ptr<Session>> OpenSession(const OpenRequest& request);  // blocks
  // Contexts that cannot be read are told in `unreadable`.
  absl::StatusOr<std::vector<v1::Manifest>> List(std::vector<absl::Status>* unreadable);  // blocks
  absl::StatusOr<v1::Manifest> Get(const std::string& name);                              // blocks
  // A part of a context's document, at most kMostTokens from request.begin on. InvalidArgument:
  // begin, or what is no content id; FailedPrecondition: the context has another.
  static constexpr int64_t kMostTokens = int64_t{1} << 16;
  absl::StatusOr<v1::TokensResponse> Tokens(const v1::TokensRequest& request);  // blocks
  absl::Status Delete(const std::string& name);                                 // blocks
  // Whether a session has it open, or it is being opened or deleted at this moment.
  bool IsOpen(const std::string& name);
  // Of a read-only store: what another process published or deleted since is seen from now on.
  // OpenSession, List and Get do this themselves. Sessions keep what they have open.
  absl::Status Refresh();  // blocks
  // Checks a context (verify_context.h), in a mapping of its own and on a background thread; calls
  // `done` from there. ResourceExhausted: another one is being checked.
  using Verified = absl::StatusOr<std::pair<v1::Manifest, VerifyReport>>;
  absl::Status Verify(const std::string& name, bool deep, std::function<bool()> cancelled,
                      std::function<void(Verified)> done);

  // Runs it on an engine thread; counts against queue_limit.
  // tenant: as OpenRequest's.
  absl::Status Submit(std::function<void()> task, const void* tenant = nullptr) {
    return queue_.Submit(tenant, this, std::move(task));
  }
  // For the rest of what was accepted: never refused.
  void Continue(std::function<void()> task) { queue_.Continue(std::move(task)); }

  // The same on threads of their own, which searches do not wait for: what takes long.
  absl::Status SubmitBackground(std::function<void()> task) {
    return background_.Submit(nullptr, this, Behind(std::move(task)));
  }
  void ContinueBackground(std::function<void()> task) {
    background_.Continue(Behind(std::move(task)));
  }

  ThreadPool& pool() { return queue_.pool(); }  // for loops of callers without threads

  const EngineConfig& config() const { return config_; }
  // For what brings contexts in, and takes them out.
  Store& store() { return *store_; }
  int64_t sessions() const { return sessions_.load(); }
  IndexCache::Counters index_counters() const { return indexes_.counters(); }
  // What clients make this process hold.
  ByteBudget& request_budget() { return requests_; }
  v1::StatisticsResponse Statistics();  // does not wait

 private:
  static std::function<void()> Behind(std::function<void()> task) {
    return [task = std::move(task)] {
      WorkBehind();
      task();
    };
  }

  struct Cached {
    std::shared_ptr<OpenContext> context;  // null: one thread opens or deletes it, others wait
    int64_t last_use = 0;
  };

  Engine(const EngineConfig& config, std::unique_ptr<Store> store);
  BackgroundChecks::Source ChecksSource();
  std::vector<std::shared_ptr<OpenContext>> OpenContexts();
  void LookAtOpenContexts();
  void RemoveOldImports();
  // The one that is open, else one of its own.
  absl::StatusOr<std::shared_ptr<const StoredContext>> FindStored(const std::string& name);
  // The context with one session more; opens it on this thread if it is not open.
  absl::StatusOr<std::shared_ptr<OpenContext>> Enter(const std::string& name);
  absl::StatusOr<std::shared_ptr<OpenContext>> OpenStored(const std::string& name);
  // Waits while it is being opened or deleted.
  Cached* Find(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(contexts_mu_);
  absl::Status MakeRoom() ABSL_EXCLUSIVE_LOCKS_REQUIRED(contexts_mu_);

  const EngineConfig config_;
  const std::unique_ptr<Store> store_;
  ByteBudget requests_;
  IndexCache indexes_;
  ResidentBudget resident_;
  LayerLoader loader_;
  RequestLatencies latencies_;
  std::atomic<int64_t> sessions_{0};

  // Sessions are added only under it; nothing is read from the disk under it.
  absl::Mutex contexts_mu_;
  absl::CondVar contexts_changed_;
  absl::flat_hash_map<std::string, Cached> contexts_ ABSL_GUARDED_BY(contexts_mu_);
  int64_t uses_ ABSL_GUARDED_BY(contexts_mu_) = 0;

  // One thread is left while a context is verified.
  static constexpr int kBackgroundThreads = 2;
  static constexpr int64_t kBackgroundLimit = 64;
  std::chrono::steady_clock::time_point next_removal_;  // owned by the thread of checks_
  std::atomic<bool> verifying_{false};
  std::atomic<bool> stopping_{false};

  WorkQueue background_{kBackgroundThreads, kBackgroundLimit};
  WorkQueue queue_;          // its threads use all of the above
  BackgroundChecks checks_;  // last: its thread, too
};

}  // namespace carrel::kvstore
