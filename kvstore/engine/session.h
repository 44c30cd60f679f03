// What:   one decoder's use of a context: its zone, its requests in flight, the candidates that it
//         asked for ahead. The engine's threads answer what is submitted; who would wait for an answer
//         anyway can accept a request and answer it on his own thread, or Attend at once.
// Errors: of Submit, Accept and Attend: InvalidArgument the request; ResourceExhausted a limit (names it).
//         Afterwards `done` gets what went wrong, or Attend gives it. A request that fails leaves the session usable.
// Ownership: queue and latencies are the engine's, which outlives its sessions.
// Threads: one thread submits, accepts and attends; Cancel from any. done runs on an engine thread or where an
//          accepted request is answered, and not at all if Submit or Accept fails.
//
// Invariants
//   1. done is called exactly once for each request that was submitted, also when the session is
//      cancelled, and for each that was accepted and is answered.
//   2. A request is in flight from Submit until its Reply is destroyed or done was given an error.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "common/byte_budget.h"
#include "common/thread_pool.h"
#include "kvstore/engine/engine_config.h"
#include "kvstore/engine/open_context.h"
#include "kvstore/engine/reply.h"
#include "kvstore/engine/request.h"
#include "kvstore/engine/request_metrics.h"
#include "kvstore/engine/work_queue.h"

namespace carrel::kvstore {

class CandidateSet;
class QueryReply;

class Session : public std::enable_shared_from_this<Session> {
 public:
  using Done = std::function<void(absl::StatusOr<std::unique_ptr<Reply>>)>;

  // Made by Engine::OpenSession; on_close is called by the destructor.
  // drift: null if it was not asked for.
  Session(std::shared_ptr<OpenContext> context, RowRange zone,
          std::shared_ptr<const OpenContext::QueryDrift> drift, const EngineConfig& config,
          WorkQueue* queue, RequestLatencies* latencies, ByteBudget* budget,
          std::shared_ptr<const void> tenant, std::function<void()> on_close);
  ~Session();

  absl::Status Submit(uint64_t request_id, QueryRequest request, Done done);
  absl::Status Submit(uint64_t request_id, FetchRequest request, Done done);

  // Answers a request that was accepted: once, on any thread, in loops over that thread and the
  // pool. Destroyed uncalled it takes the request back; queries that wait for its candidates fail.
  using Task = std::function<void(ThreadPool&)>;
  absl::StatusOr<Task> Accept(uint64_t request_id, QueryRequest request, Done done);
  absl::StatusOr<Task> Accept(uint64_t request_id, FetchRequest request, Done done);
  // Calls it, which answers that request, on an engine thread in this session's turn.
  absl::Status Enqueue(const char* what, uint64_t request_id, Task task);
  // Accepts a query with want ATTEND that names no candidates, and answers it at once: out and lse are
  // written where it says.
  absl::StatusOr<QueryStatistics> Attend(uint64_t request_id, QueryRequest request,
                                         ThreadPool& pool);
  // What waits is dropped and what runs stops soon: done gets Cancelled.
  void Cancel() { cancelled_.store(true); }

  const std::shared_ptr<OpenContext>& context() const { return context_; }
  RowRange zone() const { return zone_; }
  const OpenContext::QueryDrift* query_drift() const { return query_drift_.get(); }
  const std::atomic<bool>& cancelled() const { return cancelled_; }

  // Keeps a request in flight.
  class Slot {
   public:
    Slot(std::shared_ptr<Session> session, uint64_t request_id)
        : session_(std::move(session)), request_id_(request_id) {}
    ~Slot() {
      if (session_ != nullptr) session_->Release(request_id_);
    }
    Slot(Slot&&) noexcept = default;
    Slot& operator=(Slot&&) = delete;
    const Session& session() const { return *session_; }

   private:
    std::shared_ptr<Session> session_;
    uint64_t request_id_;
  };

 private:
  // Memory that the request takes, and its result at most.
  absl::StatusOr<Slot> Admit(const char* what, uint64_t request_id, int64_t request_bytes,
                             int64_t result_bytes);
  void Release(uint64_t request_id);
  absl::StatusOr<std::unique_ptr<QueryReply>> Begin(uint64_t request_id, QueryRequest request);
  // Runs what began, and counts it.
  absl::Status Answer(QueryReply& reply, absl::Time accepted, ThreadPool& pool) const;
  absl::StatusOr<std::shared_ptr<CandidateSet>> FindCandidates(const QueryRequest& request);
  void Remember(uint64_t request_id, std::shared_ptr<CandidateSet> candidates);
  void Unremember(uint64_t request_id);

  const std::shared_ptr<OpenContext> context_;
  const RowRange zone_;
  const std::shared_ptr<const OpenContext::QueryDrift> query_drift_;
  const EngineConfig config_;
  const int index_series_;
  WorkQueue* const queue_;
  RequestLatencies* const latencies_;
  const std::shared_ptr<ByteBudget::Account> account_;
  const std::shared_ptr<const void> tenant_;  // whose turn requests take
  const std::function<void()> on_close_;
  std::atomic<bool> cancelled_{false};

  absl::Mutex mu_;
  struct InFlight {
    int64_t result_bytes = 0;
    ByteBudget::Charge charge;
  };
  absl::flat_hash_map<uint64_t, InFlight> in_flight_ ABSL_GUARDED_BY(mu_);  // by request
  int64_t result_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  // Owned by the submitting thread; the latest last.
  std::deque<std::pair<uint64_t, std::shared_ptr<CandidateSet>>> remembered_;
};

}  // namespace carrel::kvstore
