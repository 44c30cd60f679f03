#include "audit/measure.h"

#include <time.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "common/status.h"
#include "kernels/attention/merge_states/merge_states.h"
#include "kernels/attention/sparse_attention/sparse_attention.h"

namespace carrel::audit {
namespace {

using kvstore::Index;
using kvstore::SearchRequest;
using kvstore::SearchResult;

// Rows attended at a time: bounds memory, whatever the zone.
constexpr int64_t kAttendBlockRows = 65536;

// Of this thread. A search is on one thread and its rows are in memory, so on a machine that does
// nothing else this is what a clock on the wall would show; on another it is still the same.
double CpuUs() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) / 1e3;
}

absl::Status TimedSearch(const Index& index, const SearchRequest& request,
                         kvstore::SearchScratch& scratch, SearchResult& result, double& us) {
  const double start = CpuUs();
  RETURN_IF_ERROR(index.Search(request, scratch, result));
  us = CpuUs() - start;
  return absl::OkStatus();
}

double Median(std::vector<double> values) {
  const size_t half = values.size() / 2;
  std::nth_element(values.begin(), values.begin() + half, values.end());
  const double upper = values[half];
  if (values.size() % 2 == 1) return upper;
  return (upper + *std::max_element(values.begin(), values.begin() + half)) / 2;
}

// Ascending; Internal unless they are distinct rows of the zone.
absl::StatusOr<std::vector<Position>> SortedRows(std::vector<Position> ids, RowRange zone) {
  std::sort(ids.begin(), ids.end());
  if (std::adjacent_find(ids.begin(), ids.end()) != ids.end()) {
    return absl::InternalError("the index returned a row twice");
  }
  if (!ids.empty() && (ids.front() < zone.begin || ids.back() >= zone.end)) {
    return absl::InternalError(absl::StrCat("the index returned rows ", ids.front(), " .. ",
                                            ids.back(), " outside the zone [", zone.begin, ", ",
                                            zone.end, ")"));
  }
  return ids;
}

}  // namespace

RowRange QueryZone(Position position, int64_t tokens, int64_t sink, int64_t local) {
  const Position end = std::min(position, tokens - local);
  return {sink, std::max(sink, end)};
}

HeadMeasure::HeadMeasure(const kvstore::Rows& keys, const kvstore::Rows& values,
                         const kvstore::SampledQueries& queries, const QueryPlan& plan)
    : keys_(keys),
      values_(values),
      queries_(&queries),
      plan_(plan),
      scale_(1.0f / std::sqrt(static_cast<float>(keys.head_dim()))) {}

absl::StatusOr<HeadMeasure> HeadMeasure::Create(const kvstore::Rows& keys,
                                                const kvstore::Rows& values,
                                                const kvstore::SampledQueries& queries,
                                                const QueryPlan& plan) {
  CARREL_CHECK(!plan.samples.empty() && plan.samples.back() < queries.samples());
  CARREL_CHECK(queries.head_dim == keys.head_dim() && keys.count() == values.count());
  HeadMeasure measure(keys, values, queries, plan);
  RETURN_IF_ERROR(measure.AnswerExactly());
  return measure;
}

SearchRequest HeadMeasure::RequestOf(size_t query) const {
  const int64_t sample = plan_.samples[query];
  SearchRequest request;
  request.queries = queries_->Query(sample, 0);
  request.group = queries_->group;
  request.scale = scale_;
  request.zone = QueryZone(queries_->positions[static_cast<size_t>(sample)], keys_.count(),
                           plan_.sink, plan_.local);
  request.top_k = std::min(plan_.top_k, request.zone.rows());
  return request;
}

absl::Status HeadMeasure::AnswerExactly() {
  ASSIGN_OR_RETURN(const std::unique_ptr<Index> flat,
                   kvstore::OpenIndex({.kind = kvstore::IndexKind::kFlat}, {}, keys_));
  const size_t count = plan_.samples.size();
  std::vector<double> times(count);
  answers_.resize(count);
  SearchResult result;
  // Once for nothing, so that no timed search is the first to read and verify the rows.
  RETURN_IF_ERROR(flat->Search(RequestOf(count - 1), scratch_, result));
  for (size_t i = 0; i < count; ++i) {
    const SearchRequest request = RequestOf(i);
    Answer& answer = answers_[i];
    answer.zone = request.zone;
    RETURN_IF_ERROR(TimedSearch(*flat, request, scratch_, result, times[i]));
    ASSIGN_OR_RETURN(answer.best, SortedRows(result.ids, request.zone));
    exact_.visited += static_cast<double>(result.visited);
    State state;
    RETURN_IF_ERROR(AttendZone(i, request.zone, state));
    answer.zone_out = state.out;
    answer.lse = state.lse;
    RETURN_IF_ERROR(AttendRows(i, answer.best, state));
    answer.best_out = state.out;
    AddMass(state, answer, exact_.mass, exact_.mass_least);
    exact_.output_error += MeanError(answer.best_out, answer.zone_out);
  }
  const auto n = static_cast<double>(count);
  exact_.visited /= n;
  exact_.mass /= n;
  exact_.mass_least /= n;
  exact_.output_error /= n;
  exact_.search_us = Median(std::move(times));
  return absl::OkStatus();
}

absl::StatusOr<Measured> HeadMeasure::Measure(const Index& index, int32_t effort) {
  const size_t count = plan_.samples.size();
  std::vector<double> times(count);
  Measured measured{.effort = effort, .recall_least = 1, .scanned = true};
  SearchResult result;
  State state;
  // Once for nothing: the first search of an index reads and verifies it.
  SearchRequest warm = RequestOf(count - 1);
  warm.effort = effort;
  RETURN_IF_ERROR(index.Search(warm, scratch_, result));
  for (size_t i = 0; i < count; ++i) {
    const Answer& answer = answers_[i];
    SearchRequest request = RequestOf(i);
    request.effort = effort;
    RETURN_IF_ERROR(TimedSearch(index, request, scratch_, result, times[i]));
    ASSIGN_OR_RETURN(const std::vector<Position> found, SortedRows(result.ids, request.zone));
    std::vector<Position> common;
    std::set_intersection(found.begin(), found.end(), answer.best.begin(), answer.best.end(),
                          std::back_inserter(common));
    const double recall =
        static_cast<double>(common.size()) / static_cast<double>(answer.best.size());
    measured.recall += recall;
    measured.recall_least = std::min(measured.recall_least, recall);
    RETURN_IF_ERROR(AttendRows(i, found, state));
    AddMass(state, answer, measured.mass, measured.mass_least);
    measured.output_error += MeanError(state.out, answer.zone_out);
    measured.output_error_exact += MeanError(state.out, answer.best_out);
    measured.visited += static_cast<double>(result.visited);
    measured.scanned = measured.scanned && result.zone_scored;
  }
  const auto n = static_cast<double>(count);
  measured.recall /= n;
  measured.mass /= n;
  measured.mass_least /= n;
  measured.output_error /= n;
  measured.output_error_exact /= n;
  measured.visited /= n;
  measured.visited_share = measured.visited / exact_.visited;
  measured.search_us = Median(std::move(times));
  return measured;
}

// Block by block, merged by log-sum-exp.
absl::Status HeadMeasure::AttendZone(size_t query, RowRange zone, State& state) {
  std::vector<Position> rows;
  State block;
  for (Position at = zone.begin; at < zone.end; at += kAttendBlockRows) {
    rows.clear();
    for (Position j = at; j < std::min(zone.end, at + kAttendBlockRows); ++j) rows.push_back(j);
    RETURN_IF_ERROR(AttendRows(query, rows, at == zone.begin ? state : block));
    if (at == zone.begin) continue;
    kernels::MergeStates(state.out.data(), state.lse.data(), block.out.data(), block.lse.data(),
                         queries_->group, queries_->head_dim);
  }
  return absl::OkStatus();
}

absl::Status HeadMeasure::AttendRows(size_t query, absl::Span<const Position> rows, State& state) {
  const size_t n = rows.size();
  k_.resize(n);
  v_.resize(n);
  for (size_t i = 0; i < n; ++i) {
    RETURN_IF_ERROR(keys_.VerifyRow(rows[i]));
    RETURN_IF_ERROR(values_.VerifyRow(rows[i]));
    k_[i] = keys_.Address(rows[i]);
    v_[i] = values_.Address(rows[i]);
  }
  const auto group = static_cast<size_t>(queries_->group);
  scores_.resize(group * std::max<size_t>(n, 1));
  state.out.resize(group * static_cast<size_t>(queries_->head_dim));
  state.lse.resize(group);
  kernels::SparseAttentionParams attention;
  attention.q = queries_->Query(plan_.samples[query], 0);
  attention.group = queries_->group;
  attention.k = k_.data();
  attention.v = v_.data();
  attention.rows = static_cast<int64_t>(n);
  attention.head_dim = queries_->head_dim;
  attention.scale = scale_;
  attention.scores = scores_.data();
  attention.out = state.out.data();
  attention.lse = state.lse.data();
  kernels::SparseAttention(attention);
  return absl::OkStatus();
}

double HeadMeasure::MeanError(absl::Span<const float> out,
                              absl::Span<const float> reference) const {
  const auto d = static_cast<size_t>(queries_->head_dim);
  double sum = 0;
  for (size_t at = 0; at < out.size(); at += d) {
    double error = 0, norm = 0;
    for (size_t c = at; c < at + d; ++c) {
      const double difference = double{out[c]} - double{reference[c]};
      error += difference * difference;
      norm += double{reference[c]} * double{reference[c]};
    }
    sum += std::sqrt(norm > 0 ? error / norm : error);
  }
  return sum / static_cast<double>(queries_->group);
}

// A set's share of the softmax is its sum of exponentials over the zone's.
void HeadMeasure::AddMass(const State& state, const Answer& answer, double& mean,
                          double& least) const {
  double sum = 0, smallest = 1;
  for (size_t h = 0; h < state.lse.size(); ++h) {
    const double mass = std::exp(double{state.lse[h]} - double{answer.lse[h]});
    sum += mass;
    smallest = std::min(smallest, mass);
  }
  mean += sum / static_cast<double>(queries_->group);
  least += smallest;
}

}  // namespace carrel::audit
