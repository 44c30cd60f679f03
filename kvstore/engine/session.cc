#include "kvstore/engine/session.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "carrel/v1/context.pb.h"
#include "common/no_memory.h"
#include "common/status.h"
#include "kvstore/engine/candidate_set.h"
#include "kvstore/engine/fetch_reply.h"
#include "kvstore/engine/query_reply.h"
#include "kvstore/engine/request_metrics.h"
#include "kvstore/engine/validate.h"

namespace carrel::kvstore {
namespace {

static_assert(static_cast<int>(RequestKind::kAttend) == static_cast<int>(Want::kAttend));

void AddLatency(RequestLatencies* latencies, RequestKind kind, absl::Duration queued,
                absl::Duration searched) {
  const auto i = static_cast<size_t>(kind);
  latencies->queued[i].Add(absl::ToDoubleMicroseconds(queued));
  latencies->searched[i].Add(absl::ToDoubleMicroseconds(searched));
}

int64_t BytesOf(const QueryRequest& request) {
  int64_t numbers = static_cast<int64_t>(request.head_top_k.size());
  for (const auto& held : request.held) numbers += static_cast<int64_t>(held.size());
  return numbers * 8 + static_cast<int64_t>(request.queries.size()) * 4;
}

int64_t BytesOf(const FetchRequest& request) {
  return static_cast<int64_t>(request.ids.size()) * 8;
}

}  // namespace

Session::Session(std::shared_ptr<OpenContext> context, RowRange zone,
                 std::shared_ptr<const OpenContext::QueryDrift> drift, const EngineConfig& config,
                 WorkQueue* queue, RequestLatencies* latencies, ByteBudget* budget,
                 std::shared_ptr<const void> tenant, std::function<void()> on_close)
    : context_(std::move(context)),
      zone_(zone),
      query_drift_(std::move(drift)),
      config_(config),
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

void Session::Remember(uint64_t request_id, std::shared_ptr<CandidateSet> candidates) {
  remembered_.erase(std::remove_if(remembered_.begin(), remembered_.end(),
                                   [&](const auto& old) { return old.first == request_id; }),
                    remembered_.end());
  remembered_.emplace_back(request_id, std::move(candidates));
  int64_t bytes = 0;
  for (const auto& [id, set] : remembered_) bytes += set->bytes;
  while (static_cast<int64_t>(remembered_.size()) > config_.max_candidate_sets ||
         (bytes > config_.max_result_bytes && remembered_.size() > 1)) {
    bytes -= remembered_.front().second->bytes;
    remembered_.pop_front();
  }
}

absl::Status Session::Submit(uint64_t request_id, QueryRequest request, Done done) {
  if (request.max_rows == 0) request.max_rows = config_.max_top_k;
  RETURN_IF_ERROR(ValidateQuery(request, *context_, config_));
  std::shared_ptr<CandidateSet> among, found;
  if (request.among_candidates_of != 0) {
    ASSIGN_OR_RETURN(among, FindCandidates(request));
  }
  const int64_t bytes = QueryReply::ResultBytes(request, *context_, zone_);
  const Want want = request.want;
  if (request.speculative && request.want == Want::kIds) {
    ASSIGN_OR_RETURN(ByteBudget::Charge charge, account_->Take("query: candidates", bytes));
    found = std::make_shared<CandidateSet>(request.layer, request.tokens, bytes, std::move(charge));
  }
  ASSIGN_OR_RETURN(Slot slot, Admit("query", request_id, BytesOf(request), bytes));
  auto reply = std::make_shared<std::unique_ptr<QueryReply>>(
      std::make_unique<QueryReply>(std::move(request), std::move(slot), among, found));
  const absl::Time accepted = absl::Now();
  // Runs once: std::function must be copyable, hence the shared pointer.
  const auto kind = static_cast<RequestKind>(want);
  auto run = [queue = queue_, latencies = latencies_, context = context_, kind, reply, accepted,
              done = std::move(done), found] {
    std::unique_ptr<QueryReply> mine = std::move(*reply);
    const absl::Time start = absl::Now();
    const absl::Status status =
        CatchNoMemory("query", [&] { return mine->Run(queue, start - accepted); });
    if (status.ok()) {
      AddLatency(latencies, kind, start - accepted, absl::Now() - start);
      CountAnswer(kind, context->manifest().index().kind(), start - accepted, absl::Now() - start,
                  mine->statistics().rows);
    }
    if (found != nullptr) found->Set(status, mine->TakeCandidates());
    if (status.ok()) return done(std::move(mine));
    mine.reset();
    done(status);
  };
  RETURN_IF_ERROR(Annotate(queue_->Submit(tenant_.get(), this,
                                          [among, run = std::move(run)]() mutable {
                                            if (among == nullptr) return run();
                                            among->WhenReady(std::move(run));
                                          }),
                           "query"));
  if (found != nullptr) Remember(request_id, std::move(found));
  return absl::OkStatus();
}

absl::Status Session::Submit(uint64_t request_id, FetchRequest request, Done done) {
  RETURN_IF_ERROR(ValidateFetch(request, *context_, config_));
  ASSIGN_OR_RETURN(Slot slot, Admit("fetch rows", request_id, BytesOf(request), 0));
  auto reply = std::make_shared<std::unique_ptr<FetchReply>>(
      std::make_unique<FetchReply>(std::move(request), std::move(slot)));
  return Annotate(
      queue_->Submit(
          tenant_.get(), this,
          [reply, latencies = latencies_, accepted = absl::Now(), done = std::move(done)] {
            std::unique_ptr<FetchReply> mine = std::move(*reply);
            const absl::Time start = absl::Now();
            const absl::Status status = CatchNoMemory("fetch rows", [&] { return mine->Run(); });
            if (status.ok()) {
              AddLatency(latencies, RequestKind::kFetch, start - accepted, absl::Now() - start);
              CountAnswer(RequestKind::kFetch, "", start - accepted, absl::Now() - start, 0);
            }
            if (status.ok()) return done(std::move(mine));
            mine.reset();
            done(status);
          }),
      "fetch rows");
}

}  // namespace carrel::kvstore
