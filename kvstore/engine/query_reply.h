// What:   a query being answered: Run computes what needs computing, in parallel over tokens and KV
//         heads; then pieces are taken.
//         top_k, range, mass: ids and scores are computed by Run, rows are copied from the mapping
//         by Next.
//         all, but for ATTEND: Next also computes the scores, so that nothing grows with the zone.
//         ATTEND: (out, lse) by Run.
// Errors: DataLoss; ResourceExhausted an index beyond the budget; of Run also Cancelled, and
//         DeadlineExceeded: what is past its deadline is not computed, or no further.
// Ownership: the memory that a request names for out and lse outlives this.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/time/time.h"
#include "common/thread_pool.h"
#include "kvstore/engine/candidate_set.h"
#include "kvstore/engine/reply.h"
#include "kvstore/engine/select_rows.h"
#include "kvstore/engine/session.h"

namespace carrel::kvstore {

class QueryReply : public Reply {
 public:
  // Memory that Run's result takes at most.
  static int64_t ResultBytes(const QueryRequest& request, const OpenContext& context,
                             RowRange zone);

  // among: select from these (ready when Run is called). found: keep what is selected for
  // TakeCandidates, and give no pieces.
  QueryReply(QueryRequest request, Session::Slot slot, std::shared_ptr<CandidateSet> among,
             std::shared_ptr<CandidateSet> found);

  absl::Status Run(ThreadPool& pool, absl::Duration waited);  // once, first
  std::vector<CandidateIds> TakeCandidates();                 // [tokens, kv_heads]

  Kind kind() const override { return Kind::kQuery; }
  Layer layer() const override { return request_.layer; }
  ReplyFormat format() const override { return {context().shape(), request_.want}; }
  bool done() const override { return found_ != nullptr || next_unit_ == units_.size(); }
  absl::Status Next(int64_t max_bytes, std::vector<Piece>& pieces) override;
  absl::StatusOr<bool> Confirm() override;
  const QueryStatistics& statistics() const override { return statistics_; }
  const std::shared_ptr<CandidateSet>& among() const { return among_; }
  const std::shared_ptr<CandidateSet>& found() const { return found_; }

 private:
  // One token and KV head.
  struct Unit {
    std::vector<Position> ids;
    std::vector<float> scores;    // [group, ids], if wanted
    std::vector<float> zone_lse;  // [group], if wanted
    CandidateIds
        candidates;    // that are kept; of those that travel, just what the zone weighs beside them
    int64_t rows = 0;  // to hand out
  };

  // Of a KV head and some tokens [tokens, group, stride]: of 8 bits, from `offset` on, if it is scanned so.
  struct ScoredHead {
    int64_t first = 0;  // token
    float* scores = nullptr;
    std::unique_ptr<float[]> own;  // or a thread's
    int64_t stride = 0, offset = 0;
    std::optional<kernels::Int8Error> int8;
    std::vector<float> lse;  // [tokens, group], with int8

    void Give(int64_t token, int64_t group, SelectParams& params) const;
  };

  const OpenContext& context() const { return *slot_.session().context(); }
  // Cancelled, DeadlineExceeded: the answer is not waited for.
  absl::Status CheckWanted() const;
  bool attends_all() const;
  // What the true query will want to know of the zone's other rows travels with the candidates.
  bool sends_rest() const {
    return request_.speculative && request_.want == Want::kRows &&
           std::holds_alternative<select::TopK>(request_.selection);
  }
  bool wants_scores() const {
    return request_.want == Want::kIds || request_.want == Want::kValues;
  }
  SelectParams ParamsOf(int64_t token, int32_t kv_head, ThreadPool& pool,
                        const ScoredHead* scored) const;
  const float* QueriesOf(int64_t token, int32_t kv_head) const;
  bool SharesUnits(const ThreadPool& pool) const;

  absl::Status RunOnce(ThreadPool& pool);
  absl::Status OpenHeads();

  // body(i) for all i < count, in parallel, as long as the query is wanted; the first error, if any.
  absl::Status ForEach(ThreadPool& pool, int64_t count,
                       absl::FunctionRef<absl::Status(int64_t)> body);
  // body(token, kv_head) of all.
  absl::Status ForEachUnit(ThreadPool& pool,
                           absl::FunctionRef<absl::Status(int64_t, int32_t)> body);
  // Tokens whose scores one scan of a head's keys gives; 1: each scans for itself.
  int64_t TokensScoredTogether() const;
  // scored.scores: the thread's, until it scores the next head, or scored's own.
  absl::Status ScoreHead(ThreadPool& pool, int64_t first, int64_t tokens, KvHead kv_head,
                         ScoredHead& scored);
  // Of what is asked ahead, too: among the candidates it is taken for what it is.
  bool wants_exact_lse() const {
    return request_.speculative || found_ != nullptr || WantsExactLse(request_.selection);
  }
  absl::Status RunSelect(ThreadPool& pool);
  absl::Status RunUnit(ThreadPool& pool, int64_t token, int32_t kv_head, const ScoredHead* scored,
                       Selected& selected, int64_t& rows);
  absl::Status RunAttendAll(ThreadPool& pool);
  absl::Status AttendSelected(int64_t token, int32_t kv_head, ThreadPool* pool, Selected& selected);
  // state: out [group, head_dim], lse [group].
  absl::Status EstimateRestOf(int64_t token, int32_t kv_head, ThreadPool* pool,
                              const Selected& selected, float* state) const;
  absl::Status FillRows(Piece& piece, int64_t first_row) const;

  const QueryRequest request_;
  const Session::Slot slot_;
  const std::shared_ptr<CandidateSet> among_, found_;
  const RowRange zone_;
  std::vector<std::shared_ptr<const MappedHead>> heads_;  // [kv_heads]
  std::vector<Unit> units_;                               // [tokens, kv_heads]
  // ATTEND: [tokens, q_heads, ...], the request's or here.
  float *out_ = nullptr, *lse_ = nullptr;
  std::vector<float> own_;
  QueryStatistics statistics_;
  int64_t seen_ = 0;  // what Look gave when heads_ were opened, and after what was computed
  size_t next_unit_ = 0, first_unit_ = 0;  // of the next pieces, of those handed out last
  int64_t next_row_ = 0, first_row_ = 0;
};

}  // namespace carrel::kvstore
