#include "audit/audit.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "audit/efforts.h"
#include "carrel/v1/context.pb.h"
#include "common/progress.h"
#include "common/status.h"
#include "common/thread_pool.h"
#include "kvstore/format/keys.h"
#include "kvstore/format/sampled_queries.h"
#include "kvstore/index/index_spec.h"
#include "kvstore/index/index_type.h"
#include "kvstore/index/rows/blob.h"
#include "kvstore/index/rows/rows.h"
#include "kvstore/index/rows/stored_queries.h"
#include "kvstore/storage/store.h"

namespace carrel::audit {
namespace {

using kvstore::IndexKind;
using kvstore::IndexParams;
using kvstore::SampledQueries;
using kvstore::StoredContext;

absl::Status ValidateConfig(const AuditConfig& config) {
  if (config.top_k < 1 || config.top_k > kMaxTopK) {
    return absl::InvalidArgumentError(
        absl::StrCat("top_k=", config.top_k, " is outside [1, ", kMaxTopK, "]"));
  }
  if (config.sample.has_value() && *config.sample < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("sample=", *config.sample, " is below 1 query per layer and head"));
  }
  for (const auto& [name, value] :
       {std::pair<const char*, int64_t>{"sink", config.sink}, {"local", config.local}}) {
    if (value >= 0) continue;
    return absl::InvalidArgumentError(absl::StrCat(name, "=", value, " is negative"));
  }
  for (const int32_t effort : config.efforts) {
    if (effort >= 1 && effort <= kvstore::kMaxEffort) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("effort=", effort, " is outside [1, ", kvstore::kMaxEffort, "]"));
  }
  if (config.want_recall.has_value() && !(*config.want_recall > 0 && *config.want_recall <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("want_recall=", *config.want_recall, " is outside (0, 1]"));
  }
  return absl::OkStatus();
}

absl::Status ReadShape(const v1::Manifest& m, AuditReport& report) {
  if (m.kv_dtype() != "bf16" || m.key_position() != "after_rope") {
    return absl::FailedPreconditionError(
        absl::StrCat("kv_dtype=\"", m.kv_dtype(), "\" key_position=\"", m.key_position(),
                     "\": this program reads bf16 and after_rope"));
  }
  const bool fits = m.layers() >= 1 && m.layers() <= kvstore::kMaxLayer && m.kv_heads() >= 1 &&
                    m.q_heads() >= m.kv_heads() && m.q_heads() <= kvstore::kMaxGroup &&
                    m.q_heads() % m.kv_heads() == 0 && m.head_dim() >= 1 && m.head_dim() <= 4096 &&
                    m.tokens() >= 1;
  if (!fits) {
    return absl::DataLossError(absl::StrCat("layers=", m.layers(), " q_heads=", m.q_heads(),
                                            " kv_heads=", m.kv_heads(), " head_dim=", m.head_dim(),
                                            " tokens=", m.tokens(), " do not fit each other"));
  }
  report.shape = {.layers = static_cast<int32_t>(m.layers()),
                  .q_heads = static_cast<int32_t>(m.q_heads()),
                  .kv_heads = static_cast<int32_t>(m.kv_heads()),
                  .head_dim = static_cast<int32_t>(m.head_dim())};
  report.tokens = m.tokens();
  report.context = m.name();
  report.index_kind = m.index().kind();
  return absl::OkStatus();
}

// Under "auto" every head has parameters of its own.
absl::Status ReadIndexParams(const v1::Manifest& m, AuditReport& report) {
  ASSIGN_OR_RETURN(const std::vector<IndexParams> params, kvstore::HeadIndexParamsOf(m));
  report.heads.resize(params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    report.heads[i].layer = Layer(static_cast<int32_t>(i / m.kv_heads()));
    report.heads[i].kv_head = KvHead(static_cast<int32_t>(i % m.kv_heads()));
    report.heads[i].params = params[i];
  }
  report.built_from_queries = m.index().kind() == kvstore::kAutoIndexKind;
  for (const HeadAudit& head : report.heads) {
    report.built_from_queries =
        report.built_from_queries || kvstore::IndexTypeOf(head.params.kind).learns(head.params);
  }
  return absl::OkStatus();
}

absl::StatusOr<SampledQueries> ReadQueries(const StoredContext& context, Layer layer,
                                           KvHead kv_head) {
  absl::StatusOr<SampledQueries> queries = kvstore::ReadSampledQueries(context, layer, kv_head);
  if (!absl::IsNotFound(queries.status())) return queries;
  return absl::FailedPreconditionError(
      "no sampled queries are stored: prefill the document again, with --sampled-queries");
}

// Which stored queries are asked: those with a large enough zone, evenly spread.
absl::StatusOr<QueryPlan> PlanQueries(const SampledQueries& queries, AuditReport& report) {
  const AuditConfig& config = report.config;
  report.stored_queries = queries.samples();
  if (config.sample.value_or(1) > queries.samples()) {
    return absl::InvalidArgumentError(absl::StrCat("sample=", *config.sample, " exceeds the ",
                                                   queries.samples(),
                                                   " queries stored per layer and head"));
  }
  const int64_t least = kLeastZonePerTopK * config.top_k;
  std::vector<int64_t> usable;
  for (int64_t i = 0; i < queries.samples(); ++i) {
    const Position position = queries.positions[static_cast<size_t>(i)];
    const RowRange zone = QueryZone(position, report.tokens, config.sink, config.local);
    if (zone.rows() >= least) usable.push_back(i);
  }
  const auto count = static_cast<int64_t>(usable.size());
  report.small_zones = queries.samples() - count;
  if (count == 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "none of the ", queries.samples(), " stored queries has a zone of ", least, " rows (",
        kLeastZonePerTopK, " top_k): ask for a smaller top_k than ", config.top_k));
  }
  QueryPlan plan{.sink = config.sink, .local = config.local, .top_k = config.top_k};
  const int64_t used = std::min(config.sample.value_or(kDefaultSample), count);
  for (int64_t i = 0; i < used; ++i) {
    plan.samples.push_back(usable[static_cast<size_t>((2 * i + 1) * count / (2 * used))]);
  }
  for (const int64_t sample : plan.samples) {
    report.positions.push_back(queries.positions[static_cast<size_t>(sample)]);
  }
  return plan;
}

class EffortCurve {
 public:
  EffortCurve(HeadMeasure& measure, const kvstore::Index& index)
      : measure_(measure), index_(index) {}

  // Each effort is measured once, however often it is asked for.
  absl::StatusOr<Measured> At(int32_t effort) {
    for (const Measured& known : known_) {
      if (known.effort == effort) return known;
    }
    ASSIGN_OR_RETURN(const Measured measured, measure_.Measure(index_, effort));
    known_.push_back(measured);
    return measured;
  }

 private:
  HeadMeasure& measure_;
  const kvstore::Index& index_;
  std::vector<Measured> known_;
};

absl::Status SeekLeast(const AuditConfig& config, EffortCurve& curve, HeadAudit& head) {
  if (!config.want_recall.has_value()) return absl::OkStatus();
  for (int64_t effort = LeastEffort(head.params.kind, config.top_k); effort <= kvstore::kMaxEffort;
       effort *= 2) {
    ASSIGN_OR_RETURN(const Measured measured, curve.At(static_cast<int32_t>(effort)));
    if (measured.recall >= *config.want_recall) {
      head.least = measured;
      return absl::OkStatus();
    }
    // More effort would change nothing.
    if (measured.scanned || !HasEffort(head.params.kind)) break;
  }
  return absl::OkStatus();
}

std::vector<int32_t> EffortsOf(const AuditConfig& config, const IndexParams& params, int64_t rows) {
  if (config.efforts.empty()) return Ladder(params, config.top_k, rows);
  std::vector<int32_t> efforts = config.efforts;
  std::sort(efforts.begin(), efforts.end());
  efforts.erase(std::unique(efforts.begin(), efforts.end()), efforts.end());
  if (!HasEffort(params.kind)) std::fill(efforts.begin(), efforts.end(), 0);
  return efforts;
}

absl::Status AuditHead(const StoredContext& context, const AuditReport& report, HeadAudit& head) {
  const AuditConfig& config = report.config;
  ASSIGN_OR_RETURN(const kvstore::Rows keys,
                   kvstore::Rows::OpenKeys(context, head.layer, head.kv_head));
  ASSIGN_OR_RETURN(const kvstore::Rows values,
                   kvstore::Rows::OpenValues(context, head.layer, head.kv_head));
  if (keys.count() != report.tokens || values.count() != report.tokens ||
      keys.head_dim() != report.shape.head_dim || values.head_dim() != report.shape.head_dim) {
    return absl::DataLossError(absl::StrCat(keys.count(), " K rows and ", values.count(),
                                            " V rows instead of ", report.tokens));
  }
  ASSIGN_OR_RETURN(const SampledQueries queries, ReadQueries(context, head.layer, head.kv_head));
  AuditReport own{.config = config, .shape = report.shape, .tokens = report.tokens};
  ASSIGN_OR_RETURN(const QueryPlan plan, PlanQueries(queries, own));
  if (own.positions != report.positions) {
    return absl::FailedPreconditionError(
        "the queries were sampled at other positions than those "
        "of layer=0 kv_head=0");
  }
  ASSIGN_OR_RETURN(kvstore::Blob blob,
                   kvstore::Blob::Open(context, head.layer, kvstore::Kind::kIndex, head.kv_head));
  head.index_bytes = blob.size();
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Index> index,
                   kvstore::OpenIndex(head.params, std::move(blob), keys));
  ASSIGN_OR_RETURN(HeadMeasure measure, HeadMeasure::Create(keys, values, queries, plan));
  head.exact = measure.exact();
  EffortCurve curve(measure, *index);
  const int32_t judged = !HasEffort(head.params.kind) ? 0
                         : config.efforts.empty()
                             ? OwnEffort(head.params, config.top_k, report.tokens)
                             : config.efforts.front();
  ASSIGN_OR_RETURN(head.judged, curve.At(judged));
  for (const int32_t effort : EffortsOf(config, head.params, report.tokens)) {
    ASSIGN_OR_RETURN(Measured measured, curve.At(effort));
    head.curve.push_back(measured);
  }
  return SeekLeast(config, curve, head);
}

// What every head has in common names a step. Of a ladder, steps that no head tells from the next,
// because all are at a bound or read everything already, are dropped; efforts asked for stay.
void NameSteps(AuditReport& report) {
  const bool ladder = report.config.efforts.empty() || report.index_kind == "flat";
  const size_t count = report.heads.front().curve.size();
  std::vector<size_t> kept;
  for (size_t s = 0; s < count; ++s) {
    const auto all = [&](auto holds) {
      return std::all_of(report.heads.begin(), report.heads.end(), holds);
    };
    if (ladder && s + 1 < count && all([s](const HeadAudit& head) {
          return head.curve[s].effort == head.curve[s + 1].effort;
        })) {
      continue;
    }
    kept.push_back(s);
    if (ladder && all([s](const HeadAudit& head) { return head.curve[s].scanned; })) break;
  }
  for (const size_t s : kept) {
    int32_t least = INT32_MAX, most = 0;
    for (const HeadAudit& head : report.heads) {
      if (!HasEffort(head.params.kind)) continue;
      least = std::min(least, head.curve[s].effort);
      most = std::max(most, head.curve[s].effort);
    }
    Step step;
    if (least == most) step.effort = most;
    if (most > 0 && ladder) {
      step.factor = std::ldexp(1.0, static_cast<int>(s) - kLadderHalvings);
    }
    report.steps.push_back(step);
  }
  for (HeadAudit& head : report.heads) {
    std::vector<Measured> curve;
    for (const size_t s : kept) curve.push_back(head.curve[s]);
    head.curve = std::move(curve);
  }
}

std::string Place(const HeadAudit& head) {
  return absl::StrCat("layer=", head.layer.value(), " kv_head=", head.kv_head.value());
}

absl::Status AuditHeads(const StoredContext& context, ThreadPool* pool, Progress& progress,
                        AuditReport& report) {
  absl::Mutex mu;
  absl::Status first_error;
  int64_t done = 0;
  const auto total = static_cast<int64_t>(report.heads.size());
  pool->ParallelFor(total, [&](int64_t i) {
    {
      absl::MutexLock lock(&mu);
      if (!first_error.ok()) return;
    }
    HeadAudit& head = report.heads[static_cast<size_t>(i)];
    const absl::Status status = AuditHead(context, report, head);
    absl::MutexLock lock(&mu);
    if (!status.ok() && first_error.ok()) first_error = Annotate(status, Place(head));
    ++done;
    progress.Update(static_cast<double>(done) / static_cast<double>(total),
                    absl::StrCat("head ", done, "/", total));
  });
  return first_error;
}

void ReadTerms(const v1::Manifest& manifest, AuditReport& report) {
  if (static_cast<size_t>(manifest.head_fidelity_size()) != report.heads.size()) return;
  for (int i = 0; i < manifest.head_fidelity_size(); ++i) {
    const v1::HeadFidelity& from = manifest.head_fidelity(i);
    int at = -1;
    while (at + 1 < from.rows_size() && from.rows(at + 1) <= report.config.top_k) ++at;
    if (at < 0 || at >= from.error_size() || at >= from.error_without_size() ||
        !(from.output() > 0)) {
      continue;
    }
    report.heads[static_cast<size_t>(i)].term = {from.estimate(), from.spread_share(),
                                                 from.rows(at),
                                                 std::sqrt(from.error(at) / from.output()),
                                                 std::sqrt(from.error_without(at) / from.output())};
  }
}

absl::Status RunOn(const StoredContext& context, ThreadPool* pool, Progress& progress,
                   AuditReport& report) {
  RETURN_IF_ERROR(ReadShape(context.manifest(), report));
  RETURN_IF_ERROR(ReadIndexParams(context.manifest(), report));
  // The first head's queries say early whether the audit can be done at all.
  ASSIGN_OR_RETURN(const SampledQueries queries, ReadQueries(context, Layer(0), KvHead(0)));
  RETURN_IF_ERROR(PlanQueries(queries, report).status());
  RETURN_IF_ERROR(AuditHeads(context, pool, progress, report));
  ReadTerms(context.manifest(), report);
  NameSteps(report);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<AuditReport> RunAudit(const StoredContext& context, const AuditConfig& config,
                                     ThreadPool* pool, Progress& progress) {
  RETURN_IF_ERROR(Annotate(ValidateConfig(config), "audit"));
  const auto start = std::chrono::steady_clock::now();
  AuditReport report;
  report.config = config;
  report.threads = pool->threads() + 1;
  RETURN_IF_ERROR(Annotate(RunOn(context, pool, progress, report),
                           absl::StrCat("audit of context ", context.manifest().name())));
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  report.seconds = elapsed.count();
  return report;
}

}  // namespace carrel::audit
