#include "bench/retrieval/measure.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "common/status.h"

namespace carrel::bench {
namespace {

constexpr double kExactRecall = 0.99;  // of exhaustive search: rounding may swap the last rows

double Seconds(absl::Time since) { return absl::ToDoubleSeconds(absl::Now() - since); }

double Percentile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  const auto at = static_cast<size_t>(share * static_cast<double>(values.size() - 1) + 0.5);
  std::nth_element(values.begin(), values.begin() + static_cast<int64_t>(at), values.end());
  return values[at];
}

// Pushes bytes through the cache, as the heads that are not measured would.
class CachePusher {
 public:
  explicit CachePusher(const Case& c) {
    const int64_t cache = std::max<int64_t>(sysconf(_SC_LEVEL3_CACHE_SIZE), int64_t{16} << 20);
    const double others = std::max(0.0, c.times() - 1) * static_cast<double>(c.heads.size());
    const double bytes = others * static_cast<double>(c.tokens) * c.shape.head_dim * 2;
    bytes_.resize(static_cast<size_t>(std::min(bytes, 2.0 * static_cast<double>(cache))));
  }
  void Push() {
    uint64_t sum = 0;
    for (size_t i = 0; i < bytes_.size(); i += 64) sum += bytes_[i]++;
    sink_ = sum;
  }

 private:
  std::vector<uint8_t> bytes_;
  volatile uint64_t sink_ = 0;
};

class Measurement {
 public:
  Measurement(const Case& c, const MethodKind& kind, const MeasureConfig& config, ThreadPool& pool)
      : case_(c), kind_(kind), config_(config), pool_(pool), pusher_(c) {}

  absl::StatusOr<Measured> Run() {
    RETURN_IF_ERROR(Build());
    RETURN_IF_ERROR(CheckExact());
    for (const int64_t top_k : config_.top_ks) {
      if (top_k > case_.zone.rows() / 2) continue;
      for (const int32_t effort : kind_.efforts(top_k)) {
        Result result = basis_;
        result.top_k = top_k;
        result.effort = effort;
        RETURN_IF_ERROR(JudgeAll(result));  // before any timing
        RETURN_IF_ERROR(Time(result));
        measured_.results.push_back(std::move(result));
      }
    }
    return std::move(measured_);
  }

 private:
  Question Ask(const HeadCase& head, int64_t query, int64_t top_k, int32_t effort) const {
    return {.queries = head.queries[query].data(),
            .group = case_.shape.group(),
            .scale = case_.scale,
            .lse = head.truths[query].lse.data(),
            .zone = case_.zone,
            .top_k = top_k,
            .effort = effort};
  }
  int64_t heads() const { return static_cast<int64_t>(case_.heads.size()); }
  // Heads answer side by side: with fewer of them than threads, the others would have had some too.
  double Spread() const {
    return std::min(1.0, static_cast<double>(heads()) / static_cast<double>(config_.threads));
  }

  absl::Status Build() {
    methods_.resize(heads());
    std::vector<absl::Status> statuses(heads());
    const absl::Time start = absl::Now();
    pool_.ParallelFor(heads(), [&](int64_t i) {
      auto built = kind_.build(case_.heads[i].keys, case_.heads[i].train);
      statuses[i] = built.status();
      if (built.ok()) methods_[i] = *std::move(built);
    });
    const double seconds = Seconds(start);
    for (const absl::Status& status : statuses) RETURN_IF_ERROR(status);
    double bytes = 0;
    for (const auto& method : methods_) {
      bytes += static_cast<double>(method->bytes());
      if (method->blob() != nullptr) measured_.blobs.push_back(*method->blob());
    }
    basis_.context = case_.name;
    basis_.tokens = case_.tokens;
    basis_.synthetic = case_.synthetic;
    basis_.kind = kind_.name;
    basis_.peer = kind_.peer;
    basis_.effort_name = kind_.effort_name;
    basis_.bytes_per_key = bytes / static_cast<double>(heads() * case_.tokens);
    basis_.build_s = seconds * case_.times() * Spread();
    basis_.layers_measured = case_.layers_measured();
    basis_.as_layers = case_.as_layers;
    basis_.heads_measured = heads();
    basis_.threads = config_.threads;
    basis_.queries = static_cast<int64_t>(case_.heads[0].queries.size());
    return absl::OkStatus();
  }

  absl::Status CheckExact() {
    if (kind_.exact_effort < 0) return absl::OkStatus();
    const int64_t top_k = std::min(config_.top_ks.front(), case_.zone.rows() / 2);
    const HeadCase& head = case_.heads[0];
    std::vector<Position> ids;
    RETURN_IF_ERROR(methods_[0]->Find(Ask(head, 0, top_k, kind_.exact_effort), ids));
    ASSIGN_OR_RETURN(const Quality quality, Judge(case_, head, 0, top_k, ids));
    if (quality.recall >= kExactRecall) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("check: ", kind_.name, " at effort ",
                                            kind_.exact_effort, " has recall ", quality.recall,
                                            ", must be exact"));
  }

  absl::Status JudgeAll(Result& result) {
    std::vector<absl::Status> statuses(heads());
    std::vector<Quality> sums(heads());
    pool_.ParallelFor(heads(), [&](int64_t i) {
      const HeadCase& head = case_.heads[i];
      std::vector<Position> ids;
      for (size_t query = 0; query < head.queries.size() && statuses[i].ok(); ++query) {
        statuses[i] = methods_[i]->Find(Ask(head, query, result.top_k, result.effort), ids);
        if (!statuses[i].ok()) return;
        const auto quality = Judge(case_, head, query, result.top_k, ids);
        statuses[i] = quality.status();
        if (!quality.ok()) return;
        const double share = 1 / static_cast<double>(head.queries.size());
        sums[i].recall += share * quality->recall;
        sums[i].mass += share * quality->mass;
        sums[i].output_error += share * quality->output_error;
        sums[i].output_error_exact += share * quality->output_error_exact;
        sums[i].output_error_rows += share * quality->output_error_rows;
        sums[i].rows += share * quality->rows;
      }
    });
    const double share = 1 / static_cast<double>(heads());
    for (int64_t i = 0; i < heads(); ++i) {
      if (!statuses[i].ok()) return Annotate(statuses[i], kind_.name);
      result.quality.recall += share * sums[i].recall;
      result.quality.mass += share * sums[i].mass;
      result.quality.output_error += share * sums[i].output_error;
      result.quality.output_error_exact += share * sums[i].output_error_exact;
      result.quality.output_error_rows += share * sums[i].output_error_rows;
      result.quality.rows += share * sums[i].rows;
    }
    return absl::OkStatus();
  }

  absl::Status Time(Result& result) {
    std::vector<double> tokens, searches;
    std::vector<double> per_head(heads());
    std::atomic<bool> failed{false};
    const int64_t queries = static_cast<int64_t>(case_.heads[0].queries.size());
    const absl::Time start = absl::Now();
    for (int64_t sample = 0; sample < std::max(queries, config_.samples); ++sample) {
      if (sample >= queries && Seconds(start) > config_.seconds) break;
      pusher_.Push();
      const absl::Time before = absl::Now();
      pool_.ParallelFor(heads(), [&](int64_t i) {
        thread_local std::vector<Position> ids;
        const absl::Time head_start = absl::Now();
        const HeadCase& head = case_.heads[i];
        const auto query = sample % static_cast<int64_t>(head.queries.size());
        if (!methods_[i]->Find(Ask(head, query, result.top_k, result.effort), ids).ok())
          failed = true;
        per_head[i] = Seconds(head_start);
      });
      tokens.push_back(1e3 * Seconds(before) * case_.times() * Spread());
      for (const double seconds : per_head) searches.push_back(1e6 * seconds);
    }
    if (failed) return absl::InternalError(absl::StrCat(kind_.name, ": a timed search failed"));
    result.ms_per_token = Percentile(tokens, 0.5);
    result.ms_per_token_p10 = Percentile(tokens, 0.1);
    result.ms_per_token_p90 = Percentile(tokens, 0.9);
    result.search_us = Percentile(searches, 0.5);
    result.samples = static_cast<int64_t>(tokens.size());
    return absl::OkStatus();
  }

  const Case& case_;
  const MethodKind& kind_;
  const MeasureConfig& config_;
  ThreadPool& pool_;
  CachePusher pusher_;
  std::vector<std::unique_ptr<Method>> methods_;
  Result basis_;
  Measured measured_;
};

}  // namespace

absl::StatusOr<Measured> Measure(const Case& c, const MethodKind& kind, const MeasureConfig& config,
                                 ThreadPool& pool) {
  return Measurement(c, kind, config, pool).Run();
}

void PrintJson(const Result& r) {
  nlohmann::json json = {{"context", r.context},
                         {"tokens", r.tokens},
                         {"synthetic", r.synthetic},
                         {"kind", r.kind},
                         {"peer", r.peer},
                         {"k", r.top_k},
                         {"effort", r.effort},
                         {"effort_is", r.effort_name},
                         {"recall", r.quality.recall},
                         {"mass", r.quality.mass},
                         {"output_error", r.quality.output_error},
                         {"output_error_of_exact_rows", r.quality.output_error_exact},
                         {"output_error_to_exact_rows", r.quality.output_error_rows},
                         {"rows", r.quality.rows},
                         {"ms_per_token", r.ms_per_token},
                         {"ms_per_token_p10", r.ms_per_token_p10},
                         {"ms_per_token_p90", r.ms_per_token_p90},
                         {"search_us", r.search_us},
                         {"bytes_per_key", r.bytes_per_key},
                         {"build_s", r.build_s},
                         {"layers_measured", r.layers_measured},
                         {"scaled_to_layers", r.as_layers},
                         {"heads_measured", r.heads_measured},
                         {"queries", r.queries},
                         {"samples", r.samples},
                         {"threads", r.threads}};
  if (r.cold_ms >= 0) {
    json["cold_ms"] = r.cold_ms;
    json["cold_resident"] = r.cold_resident;
  }
  if (r.quality.recall < 0) {  // not measured
    for (const char* field : {"recall", "mass", "output_error_of_exact_rows",
                              "output_error_to_exact_rows", "rows", "build_s"}) {
      json[field] = nullptr;
    }
  }
  if (!r.note.empty()) json["note"] = r.note;
  std::printf("%s\n", json.dump().c_str());
  std::fflush(stdout);
}

void PrintTable(const std::vector<Result>& results) {
  std::string context;
  for (const Result& r : results) {
    if (r.context != context) {
      context = r.context;
      std::fprintf(
          stderr,
          "\n%s: %d tokens%s; %d heads of %d layers measured, times scaled to all heads of "
          "%d layers, %d threads\n"
          "kind               k effort   recall    mass  out err  (exact)  ms/token  cold ms "
          "   B/key   build s\n",
          context.c_str(), static_cast<int>(r.tokens), r.synthetic ? " (synthetic)" : "",
          static_cast<int>(r.heads_measured), r.layers_measured, r.as_layers, r.threads);
    }
    if (!r.note.empty() && r.ms_per_token == 0) {
      std::fprintf(stderr, "%-14s %s\n", r.kind.c_str(), r.note.c_str());
      continue;
    }
    if (r.quality.recall < 0) {
      std::fprintf(stderr,
                   "%-14s %5d %6d                  %8.4f          %9.2f           %8.1f  %s\n",
                   r.kind.c_str(), static_cast<int>(r.top_k), r.effort, r.quality.output_error,
                   r.ms_per_token, r.bytes_per_key, r.note.c_str());
      continue;
    }
    const std::string cold = r.cold_ms >= 0 ? absl::StrFormat("%.1f", r.cold_ms) : "-";
    std::fprintf(stderr, "%-14s %5d %6d  %7.4f %7.4f %8.4f %8.4f %9.2f %8s %8.1f %9.1f%s\n",
                 (r.peer ? "* " + r.kind : r.kind).c_str(), static_cast<int>(r.top_k), r.effort,
                 r.quality.recall, r.quality.mass, r.quality.output_error,
                 r.quality.output_error_exact, r.ms_per_token, cold.c_str(), r.bytes_per_key,
                 r.build_s, r.note.empty() ? "" : ("  " + r.note).c_str());
  }
  std::fprintf(stderr,
               "* peer. out err: of attention over the rows found, against attention over the "
               "whole zone; (exact): of as many exact rows.\n");
}

}  // namespace carrel::bench
