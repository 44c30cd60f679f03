#include "kvstore/engine/session.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "carrel/v1/context.pb.h"
#include "common/status.h"
#include "common/thrown.h"
#include "kvstore/engine/candidate_set.h"
#include "kvstore/engine/fetch_reply.h"
#include "kvstore/engine/query_reply.h"
#include "kvstore/engine/request_metrics.h"
#include "kvstore/engine/validate.h"

namespace carrel::kvstore {
namespace {

static_assert(static_cast<int>(RequestKind::kAttend) == static_cast<int>(Want::kAttend));

// Who looks for candidates, if any are looked for: they are set once, come what may.
class Finder {
 public:
  explicit Finder(std::shared_ptr<CandidateSet> found) : found_(std::move(found)) {}
  ~Finder() {
    if (found_ != nullptr) found_->Set(absl::CancelledError("query: cancelled"), {});
  }
  // Of the query that was run.
  void Set(const absl::Status& status, QueryReply& reply) {
    if (found_ == nullptr) return;
    std::exchange(found_, nullptr)->Set(status, reply.TakeCandidates());
  }

 private:
  std::shared_ptr<CandidateSet> found_;
};

}  // namespace

Session::Session(std::shared_ptr<OpenContext> context, RowRange zone,
                 std::shared_ptr<const OpenContext::QueryDrift> drift, const EngineConfig& config,
                 WorkQueue* queue, RequestLatencies* latencies, ByteBudget* budget,
                 std::shared_ptr<const void> tenant, std::function<void()> on_close)
    : context_(std::move(context)),
      zone_(zone),
      query_drift_(std::move(drift)),
      config_(config),
      index_series_(IndexSeries(context_->manifest().index().kind())),
      queue_(queue),
      latencies_(latencies),
      account_(std::make_shared<ByteBudget::Account>(budget)),
      tenant_(std::move(tenant)),
      on_close_(std::move(on_close)) {}

Session::~Session() { on_close_(); }

absl::StatusOr<Session::Slot> Session::Admit(const char* what, uint64_t request_id,
                                             int64_t request_bytes, int64_t result_bytes) {
  if (request_id == 0) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": request_id is 0"));
  }
  absl::MutexLock lock(&mu_);
  if (in_flight_.contains(request_id)) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": request_id=", request_id, " is in flight already"));
  }
  if (static_cast<int64_t>(in_flight_.size()) >= config_.max_in_flight) {
    CountRefusal("in_flight");
    return absl::ResourceExhaustedError(
        absl::StrCat(what, ": ", in_flight_.size(),
                     " requests are in flight (max_in_flight=", config_.max_in_flight, ")"));
  }
  if (result_bytes > config_.max_result_bytes - result_bytes_) {
    CountRefusal("result_bytes");
    return absl::ResourceExhaustedError(
        absl::StrCat(what, ": a result of ", result_bytes, " bytes beside ", result_bytes_,
                     " in flight exceeds max_result_bytes=", config_.max_result_bytes));
  }
  ASSIGN_OR_RETURN(ByteBudget::Charge charge, account_->Take(what, request_bytes + result_bytes));
  in_flight_.emplace(request_id, InFlight{result_bytes, std::move(charge)});
  result_bytes_ += result_bytes;
  return Slot(shared_from_this(), request_id);
}

void Session::Release(uint64_t request_id) {
  absl::MutexLock lock(&mu_);
  const auto it = in_flight_.find(request_id);
  result_bytes_ -= it->second.result_bytes;
  in_flight_.erase(it);
}

absl::StatusOr<std::shared_ptr<CandidateSet>> Session::FindCandidates(const QueryRequest& r) {
  const uint64_t id = r.among_candidates_of;
  const std::string where =
      absl::StrCat(" (context=", context_->name(), " layer=", r.layer.value(), ")");
  for (const auto& [request_id, candidates] : remembered_) {
    if (request_id != id) continue;
    if (candidates->layer != r.layer || candidates->tokens != r.tokens) {
      return absl::InvalidArgumentError(absl::StrCat(
          "query: among_candidates_of=", id, " asked layer=", candidates->layer.value(), " for ",
          candidates->tokens, " tokens, this query is for ", r.tokens, where));
    }
    return candidates;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("query: among_candidates_of=", id, " is not among the latest ",
                   config_.max_candidate_sets, " speculative queries for IDS", where));
}

void Session::Unremember(uint64_t request_id) {
  remembered_.erase(std::remove_if(remembered_.begin(), remembered_.end(),
                                   [&](const auto& old) { return old.first == request_id; }),
                    remembered_.end());
}

void Session::Remember(uint64_t request_id, std::shared_ptr<CandidateSet> candidates) {
  Unremember(request_id);
  remembered_.emplace_back(request_id, std::move(candidates));
  int64_t bytes = 0;
  for (const auto& [id, set] : remembered_) bytes += set->bytes;
  while (static_cast<int64_t>(remembered_.size()) > config_.max_candidate_sets ||
         (bytes > config_.max_result_bytes && remembered_.size() > 1)) {
    bytes -= remembered_.front().second->bytes;
    remembered_.pop_front();
  }
}

absl::StatusOr<std::unique_ptr<QueryReply>> Session::Begin(uint64_t request_id,
                                                           QueryRequest request) {
  if (int64_t* max_rows = select::MaxRows(request.selection); max_rows && *max_rows == 0)
    *max_rows = config_.max_top_k;
  RETURN_IF_ERROR(ValidateQuery(request, *context_, config_));
  std::shared_ptr<CandidateSet> among, found;
  if (request.among_candidates_of != 0) {
    ASSIGN_OR_RETURN(among, FindCandidates(request));
  }
  const int64_t bytes = QueryReply::ResultBytes(request, *context_, zone_);
  if (request.speculative && request.want == Want::kIds) {
    ASSIGN_OR_RETURN(ByteBudget::Charge charge, account_->Take("query: candidates", bytes));
    found = std::make_shared<CandidateSet>(request.layer, request.tokens, bytes, std::move(charge));
  }
  ASSIGN_OR_RETURN(Slot slot, Admit("query", request_id, request.bytes(), bytes));
  auto reply = std::make_unique<QueryReply>(std::move(request), std::move(slot), std::move(among),
                                            std::move(found));
  if (reply->found() != nullptr) Remember(request_id, reply->found());
  return reply;
}

absl::Status Session::Answer(QueryReply& reply, absl::Time accepted, ThreadPool& pool) const {
  const absl::Time start = absl::Now();
  RETURN_IF_ERROR(CatchThrown("query", [&] { return reply.Run(pool, start - accepted); }));
  CountAnswer(*latencies_, static_cast<RequestKind>(reply.format().want), index_series_,
              start - accepted, absl::Now() - start, reply.statistics().rows);
  return absl::OkStatus();
}

absl::StatusOr<QueryStatistics> Session::Attend(uint64_t request_id, QueryRequest request,
                                                ThreadPool& pool) {
  if (request.want != Want::kAttend || request.among_candidates_of != 0 || request.out == nullptr) {
    return absl::InvalidArgumentError(
        "query: what is attended at once wants ATTEND, of no candidates, into memory of the "
        "caller");
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<QueryReply> reply, Begin(request_id, std::move(request)));
  RETURN_IF_ERROR(Answer(*reply, absl::Now(), pool));
  return reply->statistics();
}

absl::StatusOr<Session::Task> Session::Accept(uint64_t request_id, QueryRequest request,
                                              Done done) {
  ASSIGN_OR_RETURN(std::unique_ptr<QueryReply> begun, Begin(request_id, std::move(request)));
  const std::shared_ptr<CandidateSet> among = begun->among();
  auto found = std::make_shared<Finder>(begun->found());
  // Runs once: std::function must be copyable, hence the shared pointer. The reply keeps this session.
  Task run = [this, reply = std::make_shared<std::unique_ptr<QueryReply>>(std::move(begun)),
              accepted = absl::Now(), done = std::move(done), found](ThreadPool& pool) {
    std::unique_ptr<QueryReply> mine = std::move(*reply);
    const absl::Status status = Answer(*mine, accepted, pool);
    found->Set(status, *mine);
    if (status.ok()) return done(std::move(mine));
    mine.reset();
    done(status);
  };
  if (among == nullptr) return run;
  // Candidates that are still being looked for bring it with them, on the engine's thread.
  return [among, queue = queue_, run = std::move(run)](ThreadPool& pool) {
    if (among->ready()) return run(pool);
    among->WhenReady([queue, run] { run(queue->pool()); });
  };
}

absl::StatusOr<Session::Task> Session::Accept(uint64_t request_id, FetchRequest request,
                                              Done done) {
  RETURN_IF_ERROR(ValidateFetch(request, *context_, config_));
  ASSIGN_OR_RETURN(Slot slot, Admit("fetch rows", request_id, request.bytes(), 0));
  auto reply = std::make_shared<std::unique_ptr<FetchReply>>(
      std::make_unique<FetchReply>(std::move(request), std::move(slot)));
  return
      [reply, latencies = latencies_, accepted = absl::Now(), done = std::move(done)](ThreadPool&) {
        std::unique_ptr<FetchReply> mine = std::move(*reply);
        const absl::Time start = absl::Now();
        const absl::Status status = CatchThrown("fetch rows", [&] { return mine->Run(); });
        if (status.ok()) {
          CountAnswer(*latencies, RequestKind::kFetch, IndexSeries(""), start - accepted,
                      absl::Now() - start, 0);
        }
        if (status.ok()) return done(std::move(mine));
        mine.reset();
        done(status);
      };
}

absl::Status Session::Enqueue(const char* what, uint64_t request_id, Task task) {
  absl::Status status = queue_->Submit(
      tenant_.get(), this, [queue = queue_, task = std::move(task)] { task(queue->pool()); });
  if (status.ok()) return status;
  Unremember(request_id);  // nobody looks for its candidates
  return Annotate(status, what);
}

absl::Status Session::Submit(uint64_t request_id, QueryRequest request, Done done) {
  ASSIGN_OR_RETURN(Task task, Accept(request_id, std::move(request), std::move(done)));
  return Enqueue("query", request_id, std::move(task));
}

absl::Status Session::Submit(uint64_t request_id, FetchRequest request, Done done) {
  ASSIGN_OR_RETURN(Task task, Accept(request_id, std::move(request), std::move(done)));
  return Enqueue("fetch rows", request_id, std::move(task));
}

}  // namespace carrel::kvstore
