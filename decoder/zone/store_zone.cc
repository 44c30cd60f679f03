// What:    a session's part of a sequence's attention: asks for a layer's zone rows, ahead of time
//          where that is possible, and turns replies into (out, lse). The session is with a store, which
//          searches its index, or looks at every row mapped in this process (ScansHere).
//          Per layer and block of tokens: Prefetch (optional, with predicted queries, while the
//          layer before computes), Start (true queries), Finish.
// Errors:  those of the store; DataLoss a reply that was not asked for.
// Source:  decisions 005 and 026.
//          speculative: candidates asked with q~ are refined with the true q: want = ROWS here,
//          otherwise at the store (among_candidates_of).
//          verified: they are used only where cos(q~, q) reaches the layer's threshold; below it
//          the true query is sent and waited for. The threshold is calibrated on the prompt's own
//          tokens: the least cosine from which on the candidates held verified_hit_rate of the true
//          top_k on average (docs/decisions).
// Math:    dense layers read every row of the zone: the result is exact attention over it.
#include <algorithm>
#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "common/status.h"
#include "decoder/client/row_stream.h"
#include "decoder/zone/candidate_rows.h"
#include "decoder/zone/make_zone.h"
#include "decoder/zone/quality.h"
#include "kernels/attention/sparse_attention/sparse_attention.h"
#include "kernels/of_heads.h"

namespace carrel::decoder {
namespace {

// Of each token the least cosine over its heads, of vectors [n, heads, d].
std::vector<double> LeastCosines(const float* a, const float* b, int64_t n, int64_t heads,
                                 int64_t d) {
  std::vector<double> least(static_cast<size_t>(n), 1.0);
  for (int64_t i = 0; i < n * heads; ++i) {
    double ab = 0, aa = 0, bb = 0;
    for (int64_t c = 0; c < d; ++c) {
      ab += double{a[i * d + c]} * b[i * d + c];
      aa += double{a[i * d + c]} * a[i * d + c];
      bb += double{b[i * d + c]} * b[i * d + c];
    }
    const double cosine = aa > 0 && bb > 0 ? ab / std::sqrt(aa * bb) : 0;
    least[i / heads] = std::min(least[i / heads], cosine);
  }
  return least;
}

class StoreZone final : public ZoneAttention {
 public:
  StoreZone(const OpenedContext& context, const std::vector<int64_t>& cache_slots)
      : ZoneAttention(context),
        row_cache_(shape_, cache_slots),
        pending_(shape_.layers),
        thresholds_(shape_.layers) {}

  absl::Status Prefetch(Layer layer, const float* predicted_q, int64_t n) override {
    if (config_.prefetch == Prefetch::kOff || zone_.rows() == 0) return absl::OkStatus();
    Pending& pending = pending_[layer.value()];
    if (all_rows(layer)) {
      // All rows are the same whatever the query; partial attention needs the true one, so there is
      // nothing to ask ahead.
      if (config_.want != Want::kRows) return absl::OkStatus();
      return StartStream(layer, pending);
    }
    retrieval::Query query = MakeAhead(layer, predicted_q, n);
    if (config_.want == Want::kRows) query.held = row_cache_.Held(layer);
    ASSIGN_OR_RETURN(pending.speculative, client_->Send(std::move(query)));
    pending.predicted_q.assign(predicted_q, predicted_q + n * shape_.q_heads * shape_.head_dim);
    return absl::OkStatus();
  }

  absl::Status Start(Layer layer, const float* q, int64_t n) override {
    LayerStatistics& statistics = statistics_of(layer);
    statistics.tokens += n;
    if (zone_.rows() == 0) return absl::OkStatus();
    Pending& pending = pending_[layer.value()];
    pending.attends =
        config_.want == Want::kAttend && client_->attends() && !pending.speculative.has_value();
    if (pending.attends) return absl::OkStatus();
    if (!all_rows(layer)) return StartSelected(layer, q, n, pending);
    if (config_.want == Want::kRows) {
      if (!pending.stream.has_value()) return StartStream(layer, pending);
      statistics.prefetched += n;
      return absl::OkStatus();
    }
    ASSIGN_OR_RETURN(pending.query, client_->Send(Make(layer, q, n)));
    return absl::OkStatus();
  }

  absl::Status Finish(Layer layer, const float* q, int64_t n, Partial& partial) override {
    partial.Reset(n, shape_);
    if (zone_.rows() == 0) return absl::OkStatus();
    Pending& pending = pending_[layer.value()];
    LayerStatistics& statistics = statistics_of(layer);
    if (pending.attends) {
      const bool all = reading_prompt_ && prompt_takes_all_;
      statistics.whole_tokens += all ? n : 0;
      statistics.whole_rows += all ? zone_.rows() * shape_.kv_heads * n : 0;
      return Attend(layer, q, n, all, partial, statistics);
    }
    if (pending.stream.has_value()) {
      return FinishRowStream(q, n, pending, partial, statistics);
    }
    if (config_.want == Want::kRows) return FinishCandidates(layer, q, n, pending, partial);
    return FinishPartials(layer, n, pending, partial);
  }

  absl::Status Measure(Layer layer, const float* q, int64_t n, const Partial& zone,
                       const Partial& window) override {
    Pending& pending = pending_[layer.value()];
    ASSIGN_OR_RETURN(const std::vector<double> hits,
                     MeasureRows(layer, q, n, pending, zone, window));
    for (size_t token = 0; token < hits.size() && calibrating(layer); ++token)
      thresholds_[layer.value()].Add(pending.cosines[token], hits[token]);
    if (pending.speculative.has_value()) client_->Forget(*pending.speculative);
    pending.speculative.reset();
    pending.candidates.reset();
    Mean& error = statistics_of(layer).output_error;  // against attention over every row
    if (!config_.measure || zone_.rows() == 0 || window.out.empty()) return absl::OkStatus();
    if (all_rows(layer)) {
      for (int64_t i = 0; i < n; ++i) error.Add(0);
      return absl::OkStatus();
    }
    ASSIGN_OR_RETURN(const Partial dense, AskAttention(MakeDense(layer, q, n)));
    AddOutputErrors(window, zone, dense, n, shape_, error);
    return absl::OkStatus();
  }

  std::string batch_key() const override {
    if (config_.want != Want::kAttend || config_.prefetch != Prefetch::kOff || config_.measure ||
        prompt_takes_all_ || context_.content_id.empty()) {
      return "";
    }
    std::string key =
        absl::StrCat(context_.content_id, " ", zone_.begin, " ", zone_.end, " ", config_.effort,
                     estimate_ ? " estimated" : "", scan_ ? " scanned" : "");
    for (const select::Selection& selection : context_.selections) {
      const auto* const top_k = std::get_if<select::TopK>(&selection);
      if (top_k == nullptr && !select::IsAll(selection)) return "";  // as many as scores say
      if (top_k == nullptr) {
        key += " all";
      } else {
        absl::StrAppend(&key, " ", top_k->rows, ":", absl::StrJoin(top_k->of_head, ","));
      }
    }
    return key;
  }

  void Cancel() override {
    for (Pending& pending : pending_) {
      if (pending.speculative.has_value()) client_->Forget(*pending.speculative);
      if (pending.query.has_value()) client_->Forget(*pending.query);
      if (pending.stream.has_value()) pending.stream->Cancel();
    }
    pending_ = std::vector<Pending>(pending_.size());
  }

 private:
  // What is in flight or at hand for one layer.
  struct Pending {
    std::optional<retrieval::RequestId> speculative;  // candidates asked with q~
    std::vector<float> predicted_q;
    std::optional<CandidateRows> candidates;    // ROWS that speculative or the true query brought
    std::optional<retrieval::RequestId> query;  // asked with the true q
    bool attends = false;                       // instead: the client attends when it is waited for
    std::optional<RowStream> stream;            // every row, under want = ROWS
    bool accepted = false;                      // speculative candidates are what is attended
    std::vector<double> cosines;                // [n], least over q heads
  };

  const select::Selection& selection(Layer layer) const {
    return context_.selections[static_cast<size_t>(layer.value())];
  }
  bool all_rows(Layer layer) const { return select::IsAll(selection(layer)); }
  // Queries. What the layer attends to, for q [n, q_heads, head_dim]; attention over every row; candidates for predicted
  // queries, and how many rows they are.
  retrieval::Query Make(Layer layer, const float* q, int64_t n) const {
    retrieval::Query query;
    query.layer = layer;
    query.tokens = n;
    query.queries.assign(q, q + n * shape_.q_heads * shape_.head_dim);
    query.selection = selection(layer);
    query.want = config_.want;
    query.effort = config_.effort;
    query.estimate = estimate_ && !all_rows(layer);
    query.scan = scan_;
    return query;
  }

  retrieval::Query MakeDense(Layer layer, const float* q, int64_t n) const {
    retrieval::Query query = Make(layer, q, n);
    query.selection = select::All();
    query.want = Want::kAttend;
    query.effort = 0;
    query.estimate = false;
    return query;
  }

  retrieval::Query MakeAhead(Layer layer, const float* predicted_q, int64_t n) const {
    retrieval::Query query = Make(layer, predicted_q, n);
    query.selection = select::TopK{RowsAhead(layer)};
    query.speculative = true;
    query.estimate = false;
    query.want = config_.want == Want::kRows ? Want::kRows : Want::kIds;
    return query;
  }

  int64_t RowsAhead(Layer layer) const {
    const auto rows = static_cast<double>(select::TopKRows(selection(layer)));
    return std::min<int64_t>(
        {std::llround(config_.oversample * rows), zone_.rows(), context_.max_top_k});
  }

  // Asks what the layer attends to, or all rows, of a client that attends(), and waits.
  absl::Status Attend(Layer layer, const float* q, int64_t n, bool all, Partial& partial,
                      LayerStatistics& statistics) const {
    retrieval::AttendReply reply;
    reply.out = partial.out.data();
    reply.lse = partial.lse.data();
    const absl::Time start = absl::Now();
    RETURN_IF_ERROR(client_->Attend(all ? MakeDense(layer, q, n) : Make(layer, q, n), reply));
    statistics.exposed_wait_us += absl::ToDoubleMicroseconds(absl::Now() - start);
    statistics.bytes_received += reply.bytes;
    statistics.candidates += reply.statistics.candidates;
    statistics.visited += reply.statistics.visited;
    statistics.rows_attended += reply.statistics.rows;
    if (!all) statistics.estimated = estimate_ && !all_rows(layer);
    return absl::OkStatus();
  }

  // All parts of a reply; counts wait and bytes where statistics are given.
  absl::StatusOr<std::vector<retrieval::Part>> Receive(retrieval::RequestId id,
                                                       LayerStatistics* statistics) const {
    std::vector<retrieval::Part> parts;
    do {
      const absl::Time start = absl::Now();
      ASSIGN_OR_RETURN(retrieval::Part part, client_->Next(id));
      if (statistics != nullptr) {
        statistics->exposed_wait_us += absl::ToDoubleMicroseconds(absl::Now() - start);
        statistics->bytes_received += part.bytes;
        statistics->candidates += part.statistics.candidates;
        statistics->visited += part.statistics.visited;
      }
      parts.push_back(std::move(part));
    } while (!parts.back().last);
    return parts;
  }

  // Merges a reply of want ATTEND or VALUES; counts, of each token and head, its pieces or V rows.
  absl::Status Merge(const std::vector<retrieval::Part>& parts, Want want, int64_t n,
                     std::vector<int64_t>& seen, Partial& partial) const {
    seen.assign(static_cast<size_t>(n) * shape_.kv_heads, 0);
    for (const retrieval::Part& part : parts) {
      for (const retrieval::Piece& piece : part.pieces) {
        RETURN_IF_ERROR(CheckPiece(piece, n, shape_));
        const bool values = want == Want::kValues;
        RETURN_IF_ERROR(values ? MergeValues(piece, partial) : MergeAttend(piece, partial));
        seen[piece.token * shape_.kv_heads + piece.kv_head.value()] +=
            values ? static_cast<int64_t>(piece.v.size()) : 1;
      }
    }
    return absl::OkStatus();
  }

  absl::Status MergeAttend(const retrieval::Piece& piece, Partial& partial) const {
    const int64_t d = shape_.head_dim, group = shape_.group();
    if (static_cast<int64_t>(piece.out.size()) != group * d ||
        static_cast<int64_t>(piece.lse.size()) != group) {
      return absl::DataLossError(absl::StrCat("reply: out of ", piece.out.size(), " and lse of ",
                                              piece.lse.size(), " numbers, expected ", group * d,
                                              " and ", group));
    }
    partial.Merge(shape_, piece.token, piece.kv_head, piece.out.data(), piece.lse.data());
    return absl::OkStatus();
  }

  absl::Status MergeValues(const retrieval::Piece& piece, Partial& partial) const {
    const int64_t d = shape_.head_dim, group = shape_.group();
    const auto rows = static_cast<int64_t>(piece.v.size());
    if (static_cast<int64_t>(piece.scores.size()) != group * rows) {
      return absl::DataLossError(absl::StrCat("reply: ", piece.scores.size(), " scores of ", group,
                                              " q heads for ", rows, " V rows"));
    }
    std::vector<float> out(static_cast<size_t>(group * (d + 1))), scores = piece.scores;
    auto params = kernels::OfHeads<kernels::SparseAttentionParams>(shape_);
    params.v = piece.v.data();
    params.rows = rows;
    params.scores = scores.data();
    params.out = out.data();
    params.lse = out.data() + group * d;
    kernels::SparseAttention(params);
    partial.Merge(shape_, piece.token, piece.kv_head, out.data());
    return absl::OkStatus();
  }

  // Asks, and counts nothing.
  absl::StatusOr<std::vector<retrieval::Part>> Ask(retrieval::Query query) const {
    ASSIGN_OR_RETURN(const retrieval::RequestId id, client_->Send(std::move(query)));
    return Receive(id, nullptr);
  }

  // The attention that a query is answered with.
  absl::StatusOr<Partial> AskAttention(retrieval::Query query) const {
    const int64_t n = query.tokens;
    ASSIGN_OR_RETURN(const std::vector<retrieval::Part> parts, Ask(std::move(query)));
    Partial attention;
    attention.Reset(n, shape_);
    std::vector<int64_t> seen;
    RETURN_IF_ERROR(Merge(parts, Want::kAttend, n, seen, attention));
    return attention;
  }

  // The ids of what it selects, without the estimation term.
  absl::StatusOr<CandidateRows> AskIds(retrieval::Query query, bool measure_mass) const {
    const int64_t n = query.tokens;
    query.want = Want::kIds;
    query.measure_mass = measure_mass;
    query.estimate = false;
    ASSIGN_OR_RETURN(std::vector<retrieval::Part> parts, Ask(std::move(query)));
    return CandidateRows::Of(std::move(parts), shape_, zone_, n);
  }

  bool calibrating(Layer layer) const {
    return config_.prefetch == Prefetch::kVerified && reading_prompt_ && !all_rows(layer) &&
           thresholds_[layer.value()].samples() < Threshold::kEnough;
  }
  absl::Status StartStream(Layer layer, Pending& pending) const {
    pending.stream.emplace(client_, shape_, layer, zone_, context_.max_fetch_rows);
    return pending.stream->Start();
  }

  absl::Status StartSelected(Layer layer, const float* q, int64_t n, Pending& pending) {
    LayerStatistics& statistics = statistics_of(layer);
    pending.accepted = false;
    if (pending.speculative.has_value()) {
      pending.cosines =
          LeastCosines(pending.predicted_q.data(), q, n, shape_.q_heads, shape_.head_dim);
      for (double cosine : pending.cosines) statistics.cosine.Add(cosine);
      const double worst = *std::min_element(pending.cosines.begin(), pending.cosines.end());
      pending.accepted = config_.prefetch == Prefetch::kSpeculative ||
                         (!calibrating(layer) &&
                          worst >= thresholds_[layer.value()].value(config_.verified_hit_rate));
      (pending.accepted ? statistics.prefetched : statistics.verified_again) += n;
      if (pending.accepted && config_.want == Want::kRows) return absl::OkStatus();
    }
    retrieval::Query query = Make(layer, q, n);
    if (pending.accepted) query.among_candidates_of = *pending.speculative;
    if (config_.want == Want::kRows) query.held = row_cache_.Held(layer);
    ASSIGN_OR_RETURN(pending.query, client_->Send(std::move(query)));
    return absl::OkStatus();
  }

  absl::Status FinishRowStream(const float* q, int64_t n, Pending& pending, Partial& partial,
                               LayerStatistics& statistics) const {
    absl::Status status = pending.stream->Drain(
        [&](KvHead head, Position, int64_t rows, const void* k, const void* v) {
          statistics.candidates += rows * n;
          std::vector<const void*> k_rows(rows), v_rows(rows);
          for (int64_t j = 0; j < rows; ++j) {
            k_rows[j] = static_cast<const char*>(k) + j * shape_.head_dim * 2;
            v_rows[j] = static_cast<const char*>(v) + j * shape_.head_dim * 2;
          }
          pool_->ParallelFor(
              n, [&](int64_t token) { partial.Attend(shape_, token, head, q, k_rows, v_rows); });
        },
        &statistics.exposed_wait_us, &statistics.bytes_received);
    pending.stream.reset();
    statistics.rows_attended += zone_.rows() * shape_.kv_heads * n;
    return status;
  }

  absl::Status FinishCandidates(Layer layer, const float* q, int64_t n, Pending& pending,
                                Partial& partial) {
    LayerStatistics& statistics = statistics_of(layer);
    const retrieval::RequestId id = pending.accepted ? *pending.speculative : *pending.query;
    ASSIGN_OR_RETURN(std::vector<retrieval::Part> parts, Receive(id, &statistics));
    ASSIGN_OR_RETURN(CandidateRows candidates,
                     CandidateRows::Of(std::move(parts), shape_, zone_, n, &row_cache_, layer));
    const auto* const top_k = std::get_if<select::TopK>(&selection(layer));
    const auto budget_of = [&](KvHead head) {
      return top_k == nullptr ? INT64_MAX : top_k->Of(head);
    };
    statistics.rows_attended += candidates.Attend(q, budget_of, pool_, partial);
    if (row_cache_.keeps(layer)) candidates.KeepIn(row_cache_, layer, statistics.bank);
    if (pending.accepted) {
      pending.candidates.emplace(std::move(candidates));
    } else if (pending.speculative.has_value() && (config_.measure || calibrating(layer))) {
      // What was asked ahead is not attended, but tells how good it would have been.
      ASSIGN_OR_RETURN(std::vector<retrieval::Part> ahead, Receive(*pending.speculative, nullptr));
      ASSIGN_OR_RETURN(pending.candidates, CandidateRows::Of(std::move(ahead), shape_, zone_, n));
    }
    pending.query.reset();
    return absl::OkStatus();
  }

  absl::Status FinishPartials(Layer layer, int64_t n, Pending& pending, Partial& partial) {
    LayerStatistics& statistics = statistics_of(layer);
    ASSIGN_OR_RETURN(const std::vector<retrieval::Part> parts,
                     Receive(*pending.query, &statistics));
    pending.query.reset();
    const bool all = all_rows(layer);
    for (const retrieval::Part& part : parts) statistics.rows_attended += part.statistics.rows;
    statistics.estimated = estimate_ && !all;
    std::vector<int64_t> seen;
    RETURN_IF_ERROR(Merge(parts, config_.want, n, seen, partial));
    for (size_t i = 0; i < seen.size(); ++i) {
      const bool complete = config_.want == Want::kAttend ? seen[i] == 1
                            : all                         ? seen[i] == zone_.rows()
                                                          : seen[i] >= 1;
      if (complete) continue;
      return absl::DataLossError(absl::StrCat("reply: layer ", layer.value(), " token ",
                                              i / shape_.kv_heads, " kv_head ", i % shape_.kv_heads,
                                              " is incomplete (", seen[i], ")"));
    }
    return absl::OkStatus();
  }

  // The share of the true top_k that the candidates asked ahead gave, of each of n tokens; empty if none were
  // asked, or neither measuring nor calibrating wants to know. Measures mass, too.
  absl::StatusOr<std::vector<double>> MeasureRows(Layer layer, const float* q, int64_t n,
                                                  const Pending& pending, const Partial& zone,
                                                  const Partial& window) {
    LayerStatistics& statistics = statistics_of(layer);
    const bool measures = config_.measure && zone_.rows() > 0;
    const bool hits_wanted = pending.speculative.has_value() && (measures || calibrating(layer));
    std::vector<double> hits;
    if (all_rows(layer)) {
      if (!measures) return hits;
      statistics.mass.Add(1);
      statistics.attended_mass.Add(1);
      return hits;
    }
    if (!measures && !hits_wanted) return hits;
    ASSIGN_OR_RETURN(const CandidateRows truth, AskIds(Make(layer, q, n), measures));
    if (hits_wanted) {
      ASSIGN_OR_RETURN(hits, Hits(layer, q, n, pending, truth));
    }
    if (!measures) return hits;
    ASSIGN_OR_RETURN(const std::vector<float> zone_lse, truth.ZoneLse());
    std::vector<float> rows_lse = zone.lse;
    if (estimate_) {  // zone.lse counts rows that were not attended, too
      retrieval::Query query = Make(layer, q, n);
      query.estimate = false;
      query.among_candidates_of = pending.speculative.value_or(0);
      ASSIGN_OR_RETURN(Partial rows, AskAttention(std::move(query)));
      rows_lse = std::move(rows.lse);
    }
    AddMass(zone_lse, rows_lse, window.lse, statistics);
    return hits;
  }

  absl::StatusOr<std::vector<double>> Hits(Layer layer, const float* q, int64_t n,
                                           const Pending& pending, const CandidateRows& truth) {
    const auto shares = [&](const CandidateRows& found, Mean& mean) {
      std::vector<double> of_tokens;
      for (int64_t token = 0; token < n; ++token) {
        Mean hits;
        for (KvHead head(0); head.value() < shape_.kv_heads; head = head.next())
          hits.Add(ShareFound(truth.ids(token, head), found.ids(token, head)));
        if (config_.measure) mean.Add(hits.value());
        of_tokens.push_back(hits.value());
      }
      return of_tokens;
    };
    LayerStatistics& statistics = statistics_of(layer);
    if (pending.candidates.has_value()) return shares(*pending.candidates, statistics.hit_rate);
    // The candidates are at the store: which are they, and which of them does the true query choose?
    retrieval::Query among = Make(layer, q, n);
    among.among_candidates_of = *pending.speculative;
    if (config_.measure) {
      retrieval::Query all = among;
      const int64_t ahead = RowsAhead(layer);
      if (ahead != select::TopKRows(all.selection)) all.selection = select::TopK{ahead};
      ASSIGN_OR_RETURN(const CandidateRows asked, AskIds(std::move(all), false));
      shares(asked, statistics.hit_rate);
    }
    ASSIGN_OR_RETURN(const CandidateRows chosen, AskIds(std::move(among), false));
    return shares(chosen, statistics.kept_rate);
  }

  // Whether rows that are not selected count through their clusters' summaries; every row is looked at; tokens of a
  // prompt attend to every row.
  const bool estimate_ = Estimates(config_, context_.has_summaries);
  const bool scan_ = ScansHere(config_, context_.device);
  const bool prompt_takes_all_ = PromptTakesAll(config_, context_.device);
  retrieval::Session* const client_ = context_.client;
  RowCache row_cache_;
  std::vector<Pending> pending_;       // [layers]
  std::vector<Threshold> thresholds_;  // [layers]; calibrated while a prompt is read
};

}  // namespace

absl::StatusOr<std::unique_ptr<ZoneAttention>> MakeStoreZone(const OpenedContext& context) {
  ASSIGN_OR_RETURN(
      const std::vector<int64_t> slots,
      RowCache::Slots(context.config, context.shape, context.selections, context.zone.rows()));
  return std::make_unique<StoreZone>(context, slots);
}

}  // namespace carrel::decoder
