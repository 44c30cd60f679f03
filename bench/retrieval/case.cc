#include "bench/retrieval/case.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "absl/container/flat_hash_set.h"
#include "carrel/v1/context.pb.h"
#include "common/dtype.h"
#include "common/status.h"
#include "kernels/attention/sparse_attention/sparse_attention.h"
#include "kernels/score/dot_score/dot_score.h"
#include "kernels/score/group_score/group_score.h"
#include "kernels/select/topk/topk.h"
#include "kvstore/index/rows/stored_queries.h"

namespace carrel::bench {
namespace {

// Attention of the group over rows whose scores are known.
void Attend(const HeadCase& head, int64_t group, const std::vector<Position>& ids,
            std::vector<float>& scores, std::vector<float>& out) {
  std::vector<const void*> v(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) v[i] = head.values.Address(ids[i]);
  out.resize(group * head.keys.head_dim());
  std::vector<float> lse(group);
  kernels::SparseAttentionParams params;
  params.group = group;
  params.v = v.data();
  params.rows = static_cast<int64_t>(ids.size());
  params.head_dim = head.keys.head_dim();
  params.scores = scores.data();
  params.out = out.data();
  params.lse = lse.data();
  kernels::SparseAttention(params);
}

std::vector<float> ScoresOf(const Truth& truth, RowRange zone, int64_t group,
                            const std::vector<Position>& ids) {
  std::vector<float> scores(group * ids.size());
  for (int64_t h = 0; h < group; ++h) {
    for (size_t i = 0; i < ids.size(); ++i) {
      scores[h * ids.size() + i] = truth.scores[h * zone.rows() + ids[i] - zone.begin];
    }
  }
  return scores;
}

double RelativeError(const std::vector<float>& out, const std::vector<float>& ref) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    error += std::pow(double{out[i]} - ref[i], 2);
    norm += std::pow(double{ref[i]}, 2);
  }
  return norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
}

Truth FindTruth(const Case& c, const HeadCase& head, const std::vector<float>& query,
                int64_t max_top_k) {
  const int64_t group = c.shape.group(), rows = c.zone.rows();
  Truth truth;
  truth.scores.resize(group * rows);
  head.keys.ForEachPiece(c.zone, [&](Position at, const void* keys, int64_t n) {
    kernels::DotScore(query.data(), group, c.shape.head_dim, keys, n, c.scale,
                      &truth.scores[at - c.zone.begin], rows);
  });
  truth.lse.resize(group);
  for (int64_t h = 0; h < group; ++h) {
    truth.lse[h] = kernels::LogSumExp(&truth.scores[h * rows], rows);
  }
  std::vector<float> group_scores(rows);
  kernels::GroupScore(truth.scores.data(), group, rows, rows, truth.lse.data(),
                      group_scores.data());
  truth.ids.resize(std::min(max_top_k, rows));
  std::vector<uint64_t> scratch;
  kernels::TopK(group_scores.data(), rows, static_cast<int64_t>(truth.ids.size()), truth.ids.data(),
                scratch);
  for (Position& id : truth.ids) id += c.zone.begin;
  std::vector<Position> all(rows);
  for (int64_t j = 0; j < rows; ++j) all[j] = c.zone.begin + j;
  std::vector<float> scores = truth.scores;
  Attend(head, group, all, scores, truth.dense);
  return truth;
}

// By plain loops in double: a few scores of a truth.
absl::Status CheckTruth(const Case& c, const HeadCase& head, int64_t query) {
  const Truth& truth = head.truths[query];
  const int64_t d = c.shape.head_dim;
  std::vector<float> row(d);
  for (int64_t i = 0; i < 32; ++i) {
    const Position at = c.zone.begin + i * c.zone.rows() / 32;
    WidenToFloat(DType::kBf16, head.keys.Address(at), d, row.data());
    for (int64_t h = 0; h < c.shape.group(); ++h) {
      double sum = 0, norm = 0;
      for (int64_t j = 0; j < d; ++j) {
        sum += double{head.queries[query][h * d + j]} * row[j];
        norm += std::fabs(double{head.queries[query][h * d + j]} * row[j]);
      }
      const double found = truth.scores[h * c.zone.rows() + at - c.zone.begin];
      if (std::fabs(found - c.scale * sum) > 1e-4 * c.scale * norm + 1e-6) {
        return absl::InternalError(absl::StrCat("check: score of row ", at, " is ", found,
                                                ", by plain loops ", c.scale * sum));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

int32_t Case::layers_measured() const {
  std::set<int32_t> layers;
  for (const HeadCase& head : heads) layers.insert(head.layer.value());
  return static_cast<int32_t>(layers.size());
}

std::vector<std::pair<Layer, KvHead>> SpreadHeads(const AttentionShape& shape, int64_t count) {
  const int64_t all = int64_t{shape.layers} * shape.kv_heads;
  const int64_t used = std::clamp<int64_t>(count, 1, all);
  std::vector<std::pair<Layer, KvHead>> heads;
  for (int64_t i = 0; i < used; ++i) {
    // Evenly over the layers first, over the heads of a layer then.
    const int64_t layer = (2 * i + 1) * shape.layers / (2 * used);
    int64_t before = 0;
    for (const auto& [other, head] : heads) before += other.value() == layer;
    const int64_t kv_head = used <= shape.layers ? i % shape.kv_heads : before;
    heads.emplace_back(Layer(static_cast<int32_t>(layer)), KvHead(static_cast<int32_t>(kv_head)));
  }
  return heads;
}

absl::StatusOr<HeadCase> OpenHead(const kvstore::StoredContext& context, Layer layer,
                                  KvHead kv_head, int64_t queries) {
  HeadCase head;
  head.layer = layer;
  head.kv_head = kv_head;
  ASSIGN_OR_RETURN(head.keys, kvstore::Rows::OpenKeys(context, layer, kv_head));
  ASSIGN_OR_RETURN(head.values, kvstore::Rows::OpenValues(context, layer, kv_head));
  ASSIGN_OR_RETURN(const kvstore::SampledQueries all,
                   kvstore::ReadSampledQueries(context, layer, kv_head));
  head.train.group = all.group;
  head.train.head_dim = all.head_dim;
  const int64_t size = all.group * all.head_dim;
  std::vector<int64_t> held_out;
  for (int64_t s = 0; s < all.samples(); ++s) {
    if (s % 2 == 1) {
      if (2 * all.positions[s] >= head.keys.count()) held_out.push_back(s);
      continue;
    }
    head.train.positions.push_back(all.positions[s]);
    head.train.queries.insert(head.train.queries.end(), all.Query(s, 0), all.Query(s, 0) + size);
  }
  const auto asked = std::min<int64_t>(queries, static_cast<int64_t>(held_out.size()));
  for (int64_t i = 0; i < asked; ++i) {
    const int64_t s = held_out[(2 * i + 1) * static_cast<int64_t>(held_out.size()) / (2 * asked)];
    head.queries.emplace_back(all.Query(s, 0), all.Query(s, 0) + size);
  }
  if (head.queries.empty()) {
    return absl::InvalidArgumentError("the context has too few sampled queries");
  }
  return head;
}

absl::StatusOr<int64_t> TokensOf(const kvstore::Store& store, const std::string& name) {
  ASSIGN_OR_RETURN(const v1::Manifest manifest, store.GetManifest(name));
  return manifest.tokens();
}

absl::StatusOr<Case> OpenCase(const kvstore::Store& store, const std::string& name,
                              const CaseConfig& config, ThreadPool& pool) {
  Case c;
  c.name = name;
  ASSIGN_OR_RETURN(c.context, store.OpenContext(name));
  const v1::Manifest& manifest = c.context->manifest();
  c.tokens = manifest.tokens();
  c.shape = {.layers = static_cast<int32_t>(manifest.layers()),
             .q_heads = static_cast<int32_t>(manifest.q_heads()),
             .kv_heads = static_cast<int32_t>(manifest.kv_heads()),
             .head_dim = static_cast<int32_t>(manifest.head_dim())};
  c.as_layers = config.as_layers > 0 ? config.as_layers : c.shape.layers;
  c.zone = {kSink, c.tokens - kLocal};
  if (c.zone.rows() < 1024) {
    return absl::InvalidArgumentError(
        absl::StrCat("context ", name, " has only ", c.tokens, " tokens"));
  }
  c.scale = 1 / std::sqrt(static_cast<float>(c.shape.head_dim));
  for (const auto& field : manifest.fingerprint().fields())
    c.synthetic |= field.name() == "synthetic";
  for (const auto& [layer, kv_head] : SpreadHeads(c.shape, config.heads)) {
    ASSIGN_OR_RETURN(HeadCase head, OpenHead(*c.context, layer, kv_head, config.queries));
    c.heads.push_back(std::move(head));
  }
  std::vector<absl::Status> statuses(c.heads.size());
  pool.ParallelFor(static_cast<int64_t>(c.heads.size()), [&](int64_t i) {
    HeadCase& head = c.heads[i];
    statuses[i] = head.keys.Verify({0, c.tokens});
    if (statuses[i].ok()) statuses[i] = head.values.Verify({0, c.tokens});
    if (!statuses[i].ok()) return;
    for (const std::vector<float>& query : head.queries) {
      head.truths.push_back(FindTruth(c, head, query, config.max_top_k));
    }
    statuses[i] = CheckTruth(c, head, 0);
  });
  for (const absl::Status& status : statuses) RETURN_IF_ERROR(status);
  return c;
}

absl::StatusOr<Quality> Judge(const Case& c, const HeadCase& head, int64_t query, int64_t top_k,
                              const std::vector<Position>& ids) {
  const auto refuse = [&](const auto&... parts) {
    return absl::InvalidArgumentError(absl::StrCat("check: layer ", head.layer.value(), " kv_head ",
                                                   head.kv_head.value(), ": ", parts...));
  };
  if (static_cast<int64_t>(ids.size()) > top_k)
    return refuse(ids.size(), " rows, asked for ", top_k);
  absl::flat_hash_set<Position> seen;
  for (const Position id : ids) {
    if (id < c.zone.begin || id >= c.zone.end) return refuse("row ", id, " is outside the zone");
    if (!seen.insert(id).second) return refuse("row ", id, " comes twice");
  }
  const int64_t group = c.shape.group();
  const Truth& truth = head.truths[query];
  Quality quality;
  const int64_t wanted = std::min<int64_t>(top_k, static_cast<int64_t>(truth.ids.size()));
  for (int64_t i = 0; i < wanted; ++i) quality.recall += seen.contains(truth.ids[i]);
  quality.recall /= static_cast<double>(wanted);
  quality.rows = static_cast<double>(ids.size());
  std::vector<float> scores = ScoresOf(truth, c.zone, group, ids);
  for (int64_t h = 0; h < group; ++h) {
    for (size_t i = 0; i < ids.size(); ++i) {
      quality.mass +=
          std::exp(double{scores[h * ids.size() + i]} - truth.lse[h]) / static_cast<double>(group);
    }
  }
  std::vector<float> out, exact;
  Attend(head, group, ids, scores, out);
  const std::vector<Position> best(truth.ids.begin(),
                                   truth.ids.begin() + std::min<int64_t>(wanted, ids.size()));
  std::vector<float> best_scores = ScoresOf(truth, c.zone, group, best);
  Attend(head, group, best, best_scores, exact);
  quality.output_error = RelativeError(out, truth.dense);
  quality.output_error_exact = RelativeError(exact, truth.dense);
  quality.output_error_rows = RelativeError(out, exact);
  return quality;
}

}  // namespace carrel::bench
