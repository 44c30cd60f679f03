#include "synth/synth.h"

#include <algorithm>
#include <map>
#include <memory>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "carrel/v1/context.pb.h"
#include "common/status.h"
#include "kvstore/format/context_name.h"
#include "kvstore/format/sampled_queries.h"
#include "kvstore/index/summaries/summaries.h"
#include "kvstore/storage/store.h"
#include "prefill/job.h"
#include "prefill/layer_writer.h"
#include "prefill/prefill.h"
#include "prefill/staging.h"
#include "synth/head_generator.h"
#include "synth/random.h"
#include "synth/rotary.h"

namespace carrel::synth {
namespace {

// Exact statistics of attention read this many rows of each KV head in sum.
constexpr int64_t kStatisticsRows = int64_t{1} << 20;
constexpr int64_t kMostStatistics = 64;

absl::Status CheckField(absl::string_view field, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("synth: ", field, "=", value, " is outside [", low, ", ", high, "]"));
}

// The shape asked for, its zeros filled in from the source.
absl::StatusOr<AttentionShape> ResolveShape(AttentionShape shape, const v1::Manifest& source) {
  const auto fill = [](int32_t& field, uint32_t of_source) {
    if (field == 0) field = static_cast<int32_t>(of_source);
  };
  const int32_t group = static_cast<int32_t>(source.q_heads() / std::max(1u, source.kv_heads()));
  if (shape.q_heads == 0) shape.q_heads = shape.kv_heads * group;
  fill(shape.layers, source.layers());
  fill(shape.kv_heads, source.kv_heads());
  fill(shape.q_heads, source.q_heads());
  fill(shape.head_dim, source.head_dim());
  RETURN_IF_ERROR(CheckField("layers", shape.layers, 1, 1024));
  RETURN_IF_ERROR(CheckField("kv_heads", shape.kv_heads, 1, 1024));
  RETURN_IF_ERROR(CheckField("q_heads", shape.q_heads, 1, 65536));
  RETURN_IF_ERROR(CheckField("head_dim", shape.head_dim, 2, 1024));
  if (shape.head_dim % 2 != 0 || shape.q_heads % shape.kv_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat("synth: head_dim=", shape.head_dim,
                                                   " must be even and q_heads=", shape.q_heads,
                                                   " a multiple of kv_heads=", shape.kv_heads));
  }
  return shape;
}

double ThetaOf(const v1::Manifest& manifest) {
  for (const v1::Fingerprint::Field& field : manifest.fingerprint().fields()) {
    double theta = 0;
    if (field.name() == "rope_theta" && absl::SimpleAtod(field.value(), &theta)) return theta;
  }
  return 0;
}

void AddTo(HeadFit& sum, const HeadFit& fit, double share) {
  sum.gap += share * fit.gap;
  sum.entropy += share * fit.entropy;
  sum.keys_for_75_mass += share * fit.keys_for_75_mass;
  sum.peak += share * fit.peak;
  sum.topic_share += share * fit.topic_share;
}

class Job {
 public:
  Job(const SynthConfig& config, const AttentionShape& shape, const kvstore::StoredContext& source,
      kvstore::Store& store, ThreadPool* pool, Progress& progress)
      : config_(config),
        shape_(shape),
        source_(source),
        source_theta_(ThetaOf(source.manifest())),
        rotary_(shape.head_dim, config.rope_theta > 0 ? config.rope_theta : source_theta_),
        store_(store),
        pool_(pool),
        progress_(progress) {}

  absl::StatusOr<SynthReport> Run() {
    const absl::Time start = absl::Now();
    ASSIGN_OR_RETURN(prefill::Staging staging,
                     prefill::Staging::Open(config_.store_folder, config_.name));
    RETURN_IF_ERROR(staging.Empty());             // of an interrupted run
    std::vector<TokenId> tokens(config_.tokens);  // made up, like the rest
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<TokenId>(i % 32768);
    v1::Manifest job = Describe(tokens);
    RETURN_IF_ERROR(prefill::CheckRoom(config_.store_folder,
                                       prefill::StoredBytes(job, shape_.layers),
                                       absl::StrCat("synth of ", config_.tokens, " tokens")));
    const kvstore::ContextId id = kvstore::ContextId::Random();
    job.set_context_id(id.Bytes());
    report_.shape = shape_;
    const absl::Status status = WriteLayers(staging, id);
    if (!status.ok()) {
      (void)staging.Remove();
      return status;
    }
    job.set_prefill_seconds(absl::ToDoubleSeconds(absl::Now() - start));
    RETURN_IF_ERROR(prefill::PublishStaged(job, staging, tokens, store_));
    for (const v1::LayerSizes& sizes : job.layer_sizes()) {
      report_.index_bytes += sizes.index_bytes();
      report_.stored_bytes += sizes.key_bytes() + sizes.value_bytes() + sizes.index_bytes() +
                              sizes.sampled_query_bytes();
    }
    report_.seconds = absl::ToDoubleSeconds(absl::Now() - start);
    return report_;
  }

 private:
  v1::Manifest Describe(const std::vector<TokenId>& tokens) const {
    const v1::Manifest& source = source_.manifest();
    const double theta = config_.rope_theta > 0 ? config_.rope_theta : source_theta_;
    v1::Manifest job = prefill::NewManifest(config_.name, tokens, shape_, config_.segment_tokens);
    job.set_key_position("after_rope");
    prefill::AddFingerprint("kv_dtype", "bf16", job);
    prefill::AddFingerprint("rope_theta", absl::StrCat(theta), job);
    prefill::AddFingerprint("synthetic",
                            absl::StrCat("like=", source.name(), " of ", source.token_ids_sha256(),
                                         " seed=", config_.seed),
                            job);
    prefill::SetIndexPlan(config_.index, config_.auto_index, config_.summary_rows, job);
    job.set_sampled_queries(std::min(config_.sampled_queries, config_.tokens));
    return job;
  }

  absl::Status WriteLayers(const prefill::Staging& staging, kvstore::ContextId id) {
    const int64_t statistics =
        std::clamp<int64_t>(2 * kStatisticsRows / config_.tokens, 1, kMostStatistics);
    prefill::LayerWriter writer(&staging, id, shape_, config_.segment_tokens, config_.index,
                                config_.auto_index, config_.summary_rows, pool_,
                                {.statistics_samples = statistics});
    const int64_t layer_bytes =
        config_.tokens * shape_.kv_heads * shape_.head_dim * 2 * int64_t{sizeof(uint16_t)};
    for (Layer layer(0); layer.value() < shape_.layers; layer = layer.next()) {
      const double done = static_cast<double>(layer.value()) / shape_.layers;
      progress_.Update(done, absl::StrFormat("layer %d/%d", layer.value() + 1, shape_.layers));
      const absl::Time start = absl::Now();
      ASSIGN_OR_RETURN(prefill::LayerRows rows, DrawLayer(layer));
      report_.draw_seconds += absl::ToDoubleSeconds(absl::Now() - start);
      RETURN_IF_ERROR(writer.Submit(std::move(rows)));
      if (layer_bytes > kWaitBytes) RETURN_IF_ERROR(writer.Finish());
    }
    progress_.Update(1, "waiting for the last index");
    return writer.Finish();
  }

  absl::StatusOr<prefill::LayerRows> DrawLayer(Layer layer) {
    const v1::Manifest& source = source_.manifest();
    const Layer from(
        static_cast<int32_t>(int64_t{layer.value()} * source.layers() / shape_.layers));
    RETURN_IF_ERROR(Measure(from));
    std::vector<std::unique_ptr<HeadGenerator>> heads;
    for (int32_t h = 0; h < shape_.kv_heads; ++h) {
      const uint64_t seed = Mix(config_.seed, static_cast<uint64_t>(layer.value()), h);
      heads.push_back(std::make_unique<HeadGenerator>(
          models_.at({from.value(), h % static_cast<int32_t>(source.kv_heads())}), shape_.head_dim,
          config_.tokens, seed));
    }
    prefill::LayerRows rows;
    rows.layer = layer;
    DrawRows(heads, rows);
    DrawQueries(heads, rows, LayerFit{.layer = layer.value(), .source_layer = from.value()});
    return rows;
  }

  void DrawRows(const std::vector<std::unique_ptr<HeadGenerator>>& heads,
                prefill::LayerRows& rows) const {
    const int64_t d = shape_.head_dim, tokens = config_.tokens;
    rows.k.resize(heads.size());
    rows.v.resize(heads.size());
    for (size_t h = 0; h < heads.size(); ++h) {
      rows.k[h].resize(tokens * d);
      rows.v[h].resize(tokens * d);
    }
    pool_->ParallelFor((tokens + kBlockRows - 1) / kBlockRows, [&](int64_t block) {
      const Position first = block * kBlockRows;
      const int64_t n = std::min(kBlockRows, tokens - first);
      constexpr int64_t kAfresh = 64;  // rows that Advance may go without At
      std::vector<float> cos(n * d / 2), sin(n * d / 2);
      for (int64_t i = 0; i < n; ++i) {
        float* c = &cos[i * d / 2];
        float* s = &sin[i * d / 2];
        if (i % kAfresh == 0) {
          rotary_.At(first + i, c, s);
        } else {
          std::copy_n(c - d / 2, d / 2, c);
          std::copy_n(s - d / 2, d / 2, s);
          rotary_.Advance(c, s);
        }
      }
      for (size_t h = 0; h < heads.size(); ++h) {
        heads[h]->DrawRows(first, n, cos.data(), sin.data(), &rows.k[h][first * d],
                           &rows.v[h][first * d]);
      }
    });
  }

  void DrawQueries(const std::vector<std::unique_ptr<HeadGenerator>>& heads,
                   prefill::LayerRows& rows, LayerFit fit) {
    rows.sample_positions = prefill::SamplePositions(config_.tokens, config_.sampled_queries);
    rows.queries.resize(heads.size());
    std::vector<HeadFit> fits(heads.size());
    const auto source_group =
        static_cast<int64_t>(source_.manifest().q_heads() / source_.manifest().kv_heads());
    const int64_t group = shape_.group(), d = shape_.head_dim;
    pool_->ParallelFor(static_cast<int64_t>(heads.size()), [&](int64_t h) {
      fits[h] = heads[h]->Calibrate(rows.k[h].data(), rotary_);
      for (const Position position : rows.sample_positions) {
        // A larger group than the source's takes more draws of the same heads.
        for (int64_t at = 0; at < group; at += source_group) {
          const std::vector<float> queries =
              heads[h]->DrawQueries(rows.k[h].data(), rotary_, position, static_cast<uint64_t>(at));
          rows.queries[h].insert(rows.queries[h].end(), queries.begin(),
                                 queries.begin() + std::min(source_group, group - at) * d);
        }
      }
    });
    const double share = 1 / static_cast<double>(heads.size());
    for (size_t h = 0; h < heads.size(); ++h) {
      AddTo(fit.made, fits[h], share);
      AddTo(fit.source,
            models_.at({fit.source_layer, static_cast<int32_t>(h % source_.manifest().kv_heads())})
                .fit,
            share);
    }
    report_.layers.push_back(fit);
  }

  // Every KV head of a layer of the source, once.
  absl::Status Measure(Layer layer) {
    const auto kv_heads = static_cast<int32_t>(source_.manifest().kv_heads());
    if (models_.contains({layer.value(), 0})) return absl::OkStatus();
    std::vector<absl::StatusOr<HeadModel>> measured(kv_heads, absl::UnknownError("not measured"));
    pool_->ParallelFor(kv_heads, [&](int64_t h) {
      measured[h] = MeasureHead(source_, layer, KvHead(static_cast<int32_t>(h)), source_theta_);
    });
    for (int32_t h = 0; h < kv_heads; ++h) {
      RETURN_IF_ERROR(measured[h].status());
      models_.emplace(std::make_pair(layer.value(), h), *std::move(measured[h]));
    }
    return absl::OkStatus();
  }

  const SynthConfig& config_;
  const AttentionShape shape_;
  const kvstore::StoredContext& source_;
  const double source_theta_;
  const Rotary rotary_;
  kvstore::Store& store_;
  ThreadPool* const pool_;
  Progress& progress_;
  std::map<std::pair<int32_t, int32_t>, HeadModel> models_;  // (layer, KV head) of the source
  SynthReport report_;
};

}  // namespace

absl::StatusOr<SynthReport> RunSynth(const SynthConfig& config,
                                     const kvstore::StoredContext& source, kvstore::Store& store,
                                     ThreadPool* pool, Progress& progress) {
  RETURN_IF_ERROR(kvstore::ValidateContextName(config.name));
  RETURN_IF_ERROR(kvstore::CheckIndexBuild(config.index));
  if (config.auto_index.has_value()) {
    RETURN_IF_ERROR(kvstore::ValidateAutoIndexConfig(*config.auto_index));
  }
  RETURN_IF_ERROR(kvstore::ValidateSummaryRows(config.summary_rows));
  RETURN_IF_ERROR(prefill::ValidateSegmentTokens(config.segment_tokens));
  RETURN_IF_ERROR(CheckField("tokens", config.tokens, 2 * (kSink + kLocal), int64_t{1} << 24));
  RETURN_IF_ERROR(CheckField("sampled_queries", config.sampled_queries, 1, 65536));
  if (source.manifest().key_position() != "after_rope") {
    return absl::FailedPreconditionError(
        absl::StrCat("context ", source.manifest().name(), " has key_position=",
                     source.manifest().key_position(), "; synth takes after keys after RoPE"));
  }
  ASSIGN_OR_RETURN(const AttentionShape shape, ResolveShape(config.shape, source.manifest()));
  RETURN_IF_ERROR(prefill::CheckNameIsFree(store, config.store_folder, config.name));
  return Job(config, shape, source, store, pool, progress).Run();
}

}  // namespace carrel::synth
