// What:  the estimation term: how far partial attention over a zone is from exact attention, with
//        and without what summaries say of the rows that are not selected, on sampled queries that
//        the summaries did not learn from. Each line is one JSON object: mean over queries and q
//        heads of ||out - exact|| / ||exact||, and of |lse - exact|.
// Usage: estimate_bench [NAME]   run from the repository's root; without NAME prefills registry-8k
//        into out/bench once. NAME: a context in out/bench/store.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/time/clock.h"
#include "carrel/v1/context.pb.h"
#include "common/file.h"
#include "common/progress.h"
#include "common/status.h"
#include "kernels/attention/merge_states/merge_states.h"
#include "kernels/attention/sparse_attention/sparse_attention.h"
#include "kvstore/index/index.h"
#include "kvstore/index/rows/stored_queries.h"
#include "kvstore/index/summaries/summaries.h"
#include "kvstore/storage/store.h"
#include "model/checkpoint.h"
#include "prefill/prefill.h"

namespace carrel {
namespace {

using kvstore::Kind;
using kvstore::Rows;
using kvstore::SampledQueries;

constexpr char kModel[] = "models/demo";
constexpr char kStore[] = "out/bench/store";
constexpr char kDefaultName[] = "flat";  // as decode_bench calls it
constexpr int64_t kSink = 4, kLocal = 64;
constexpr int64_t kSummaryRows[] = {40, 16};
constexpr int64_t kTopK[] = {64, 128, 512};

absl::Status PrefillIfAbsent(const std::string& name) {
  std::filesystem::create_directories(kStore);
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Store> store,
                   kvstore::Store::Open(kStore, kvstore::StoreMode::kReadWrite));
  if (store->GetManifest(name).ok() || name != kDefaultName) return absl::OkStatus();
  ThreadPool pool(1);
  ASSIGN_OR_RETURN(const model::Checkpoint checkpoint, model::LoadCheckpoint(kModel, &pool));
  prefill::PrefillConfig config;
  config.store_folder = kStore;
  config.name = name;
  ASSIGN_OR_RETURN(const std::string text, ReadFile(std::string(kModel) + "/docs/registry-8k.txt"));
  ASSIGN_OR_RETURN(const std::vector<TokenId> tokens, checkpoint.EncodeDocument(text));
  Progress progress(Progress::ModeFor(stderr));
  return prefill::RunPrefill(config, checkpoint, tokens, *store, &pool, progress).status();
}

// Every second sample, from `first` on, at `from` or later.
SampledQueries Half(const SampledQueries& all, int64_t first, Position from) {
  SampledQueries half{.group = all.group, .head_dim = all.head_dim};
  const int64_t floats = all.group * all.head_dim;
  for (int64_t i = first; i < all.samples(); i += 2) {
    if (all.positions[i] < from) continue;
    half.positions.push_back(all.positions[i]);
    half.queries.insert(half.queries.end(), all.Query(i, 0), all.Query(i, 0) + floats);
  }
  return half;
}

struct State {
  std::vector<float> out, lse;
};

// Attention of a group over rows, with the scores given or computed.
State Attend(const Rows& keys, const Rows& values, const float* q, int64_t group, float scale,
             const std::vector<Position>& ids) {
  const int64_t d = keys.head_dim();
  std::vector<const void*> k, v;
  for (Position id : ids) {
    k.push_back(keys.Address(id));
    v.push_back(values.Address(id));
  }
  State state{std::vector<float>(static_cast<size_t>(group * d)),
              std::vector<float>(static_cast<size_t>(group))};
  std::vector<float> scores(static_cast<size_t>(group) * ids.size() + 1);
  kernels::SparseAttention({.q = q,
                            .group = group,
                            .k = k.data(),
                            .v = v.data(),
                            .rows = static_cast<int64_t>(ids.size()),
                            .head_dim = d,
                            .scale = scale,
                            .scores = scores.data(),
                            .out = state.out.data(),
                            .lse = state.lse.data()});
  return state;
}

struct Error {
  double out = 0, lse = 0;
  int64_t count = 0;
  void Add(const State& state, const State& exact, int64_t group) {
    const auto d = exact.out.size() / static_cast<size_t>(group);
    for (int64_t h = 0; h < group; ++h) {
      double away = 0, norm = 0;
      for (size_t c = 0; c < d; ++c) {
        const double x = exact.out[h * d + c];
        away += (state.out[h * d + c] - x) * (state.out[h * d + c] - x);
        norm += x * x;
      }
      out += std::sqrt(away / norm);
      lse += std::abs(double{state.lse[h]} - exact.lse[h]);
      ++count;
    }
  }
  void Add(const Error& other) {
    out += other.out;
    lse += other.lse;
    count += other.count;
  }
};

struct Totals {
  std::map<std::string, Error> errors;  // by selection and term
  double estimate_us = 0, search_us = 0, build_s = 0;
  int64_t estimates = 0, summary_bytes = 0, keys = 0;
  void Add(const Totals& other) {
    for (const auto& [name, error] : other.errors) errors[name].Add(error);
    estimate_us += other.estimate_us;
    search_us += other.search_us;
    build_s += other.build_s;
    estimates += other.estimates;
    summary_bytes += other.summary_bytes;
    keys += other.keys;
  }
  nlohmann::json ToJson() const {
    nlohmann::json json;
    for (const auto& [name, error] : errors) {
      const auto count = static_cast<double>(error.count);
      json[name] = {{"out", std::round(1e4 * error.out / count) / 1e4},
                    {"lse", std::round(1e4 * error.lse / count) / 1e4}};
    }
    json["us_per_estimate"] = std::round(10 * estimate_us / static_cast<double>(estimates)) / 10;
    json["us_per_exact_search"] = std::round(10 * search_us / static_cast<double>(estimates)) / 10;
    json["build_us_per_key"] = std::round(1e7 * build_s / static_cast<double>(keys)) / 10;
    json["bytes_per_key"] =
        std::round(100.0 * static_cast<double>(summary_bytes) / static_cast<double>(keys)) / 100;
    return json;
  }
};

// One head under one size of clusters.
absl::Status MeasureHead(const Rows& keys, const Rows& values, const SampledQueries& learned,
                         const SampledQueries& held_out, int64_t summary_rows, Totals& totals) {
  const int64_t d = keys.head_dim(), group = held_out.group;
  const float scale = 1 / std::sqrt(static_cast<float>(d));
  const absl::Time start = absl::Now();
  ASSIGN_OR_RETURN(const std::string blob,
                   kvstore::BuildSummaries(summary_rows, keys, values, &learned));
  totals.build_s += absl::ToDoubleSeconds(absl::Now() - start);
  totals.summary_bytes += static_cast<int64_t>(blob.size());
  totals.keys += keys.count();
  ASSIGN_OR_RETURN(const kvstore::Summaries summaries,
                   kvstore::Summaries::Open(blob, keys.count(), d));
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Index> flat,
                   kvstore::OpenIndex({}, kvstore::Blob(), keys));
  const RowRange zone{kSink, keys.count() - kLocal};
  std::vector<Position> all;
  for (Position j = zone.begin; j < zone.end; ++j) all.push_back(j);
  kvstore::SearchScratch search_scratch;
  kvstore::EstimateScratch scratch;
  for (int64_t i = 0; i < held_out.samples(); ++i) {
    const float* q = held_out.Query(i, 0);
    const State exact = Attend(keys, values, q, group, scale, all);
    for (const int64_t top_k : kTopK) {
      kvstore::SearchRequest request{
          .queries = q, .group = group, .scale = scale, .zone = zone, .top_k = top_k};
      kvstore::SearchResult found;
      const absl::Time before = absl::Now();
      RETURN_IF_ERROR(flat->Search(request, search_scratch, found));
      const absl::Time searched = absl::Now();
      const State partial = Attend(keys, values, q, group, scale, found.ids);
      totals.errors[absl::StrCat("top-k:", top_k, " off")].Add(partial, exact, group);
      State rest{std::vector<float>(exact.out.size()), std::vector<float>(exact.lse.size())};
      retrieval::EstimateRequest params;
      params.queries = q;
      params.group = group;
      params.scale = scale;
      params.zone = zone;
      params.selected = found.ids;
      params.out = rest.out.data();
      params.lse = rest.lse.data();
      for (const bool scores : {false, true}) {
        params.scores = scores ? found.scores.data() : nullptr;
        const absl::Time began = absl::Now();
        RETURN_IF_ERROR(kvstore::EstimateRest(summaries, values, params, scratch));
        if (scores) totals.estimate_us += absl::ToDoubleMicroseconds(absl::Now() - began);
        State merged = partial;
        kernels::MergeStates(merged.out.data(), merged.lse.data(), params.out, params.lse, group,
                             d);
        totals.errors[absl::StrCat("top-k:", top_k, scores ? " on" : " on, scores not used")].Add(
            merged, exact, group);
      }
      totals.search_us += absl::ToDoubleMicroseconds(searched - before);
      ++totals.estimates;
    }
  }
  return absl::OkStatus();
}

absl::Status Run(const std::string& name) {
  RETURN_IF_ERROR(PrefillIfAbsent(name));
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Store> store,
                   kvstore::Store::Open(kStore, kvstore::StoreMode::kReadOnly));
  ASSIGN_OR_RETURN(const std::shared_ptr<const kvstore::StoredContext> context,
                   store->OpenContext(name));
  const v1::Manifest& manifest = context->manifest();
  for (const int64_t summary_rows : kSummaryRows) {
    Totals all;
    for (Layer layer(0); layer.value() < static_cast<int32_t>(manifest.layers());
         layer = layer.next()) {
      Totals totals;
      for (int32_t h = 0; h < static_cast<int32_t>(manifest.kv_heads()); ++h) {
        ASSIGN_OR_RETURN(const Rows keys, Rows::OpenKeys(*context, layer, KvHead(h)));
        ASSIGN_OR_RETURN(const Rows values, Rows::OpenValues(*context, layer, KvHead(h)));
        ASSIGN_OR_RETURN(const SampledQueries queries,
                         kvstore::ReadSampledQueries(*context, layer, KvHead(h)));
        // Late queries see nearly all keys, as a question does.
        RETURN_IF_ERROR(MeasureHead(keys, values, Half(queries, 0, 0),
                                    Half(queries, 1, keys.count() * 3 / 4), summary_rows, totals));
      }
      nlohmann::json json = totals.ToJson();
      json["summaries"] = summary_rows;
      json["layer"] = layer.value();
      std::printf("%s\n", json.dump().c_str());
      std::fflush(stdout);
      all.Add(totals);
    }
    nlohmann::json json = all.ToJson();
    json["summaries"] = summary_rows;
    json["layer"] = "all";
    std::printf("%s\n", json.dump().c_str());
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace carrel

int main(int argc, char** argv) {
  const absl::Status status = carrel::Run(argc > 1 ? argv[1] : carrel::kDefaultName);
  if (!status.ok()) std::fprintf(stderr, "estimate_bench: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
