#include "prefill/prefill.h"

#include <sys/resource.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "carrel/v1/context.pb.h"
#include "common/resource_status.h"
#include "common/status.h"
#include "kvstore/format/context_name.h"
#include "kvstore/index/building/accelerator.h"
#include "kvstore/index/index_spec.h"
#include "kvstore/index/index_type.h"
#include "kvstore/index/summaries/summaries.h"
#include "kvstore/storage/store.h"
#include "kvstore/storage/stored_context.h"
#include "model/fingerprint.h"
#include "model/tokenizer/probe.h"
#include "prefill/cuda_accelerator.h"
#include "prefill/job.h"
#include "prefill/layer_forward.h"
#include "prefill/layer_writer.h"
#include "prefill/manifest_probe.h"
#include "prefill/recheck.h"
#include "prefill/staging.h"

namespace carrel::prefill {
namespace {

constexpr int64_t kTeachingQueries = 256, kFewestKept = 16, kTokensPerKept = 16;

// Of which indexes and summaries learn, and fidelity is measured.
int64_t TeachingQueries(const PrefillConfig& config, int64_t tokens) {
  return std::min(tokens, config.sampled_queries.value_or(kTeachingQueries));
}

// A query is as large as several tokens' K and V: of a short document few are kept.
int64_t KeptQueries(const PrefillConfig& config, int64_t tokens) {
  if (config.sampled_queries.has_value()) return TeachingQueries(config, tokens);
  return std::min(tokens, std::clamp(tokens / kTokensPerKept, kFewestKept, kTeachingQueries));
}

// What cannot be made of keys before RoPE, and where they cannot be made.
absl::Status ValidateKeysBeforeRope(const PrefillConfig& config) {
  const AttentionConfig& attention = config.attention;
  // A GPU stores keys as attention meets them: it does not take RoPE off again.
  const bool as_met = (attention.key_position == KeyPosition::kNone) ==
                      (attention.rope == model::Rope::kInfiniteHip);
  if (config.device != model::Device::kCpu && (attention.kind == AttentionKind::kHip || !as_met)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "attention=", AttentionText(attention), ", rope=", model::RopeName(attention.rope),
        " with key_position=", KeyPositionName(attention.key_position),
        " needs device=cpu: a GPU runs dense and infinitehip, and stores keys after RoPE with "
        "rope=trained, before it with rope=infinitehip"));
  }
  if (attention.key_position != KeyPosition::kNone) return absl::OkStatus();
  if (config.auto_index.has_value() || !kvstore::IndexTypeOf(config.index.kind).exact()) {
    return absl::InvalidArgumentError(
        "key_position=none needs index=flat: an index finds keys by scores, and keys before RoPE "
        "have none until they stand somewhere");
  }
  if (config.summary_rows != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("key_position=none with summaries=", config.summary_rows,
                     ": means of keys before RoPE estimate no score; summaries must be 0"));
  }
  return absl::OkStatus();
}

// Whether a prompt has room behind the document; if not, what its owner can do.
absl::Status CheckLength(const model::Checkpoint& checkpoint, const std::vector<TokenId>& tokens,
                         bool beyond_trained) {
  const auto all = static_cast<int64_t>(tokens.size());
  const int64_t most = checkpoint.config.MaxTokens(beyond_trained) - 1;
  std::string fit;
  if (all > most && checkpoint.tokenizer != nullptr) {
    const auto first =
        absl::MakeConstSpan(tokens).first(static_cast<size_t>(std::clamp<int64_t>(most, 0, all)));
    const auto text = checkpoint.tokenizer->Decode(first, /*skip_special=*/false);
    if (text.ok())
      fit = absl::StrCat(FormatBytes(static_cast<int64_t>(text->size())), " of it fit: ");
  }
  return checkpoint.config.CheckTokens(
      all + 1, absl::StrCat("the document has ", all, " tokens; with one of a prompt"),
      beyond_trained, absl::StrCat("; ", fit, "split it, or take a model with a longer context"));
}

absl::Status Validate(const PrefillConfig& config, const model::Checkpoint& checkpoint,
                      const std::vector<TokenId>& tokens) {
  const model::ModelConfig& model = checkpoint.config;
  RETURN_IF_ERROR(kvstore::ValidateContextName(config.name));
  RETURN_IF_ERROR(kvstore::CheckIndexBuild(config.index));
  if (config.auto_index.has_value())
    RETURN_IF_ERROR(kvstore::ValidateAutoIndexConfig(*config.auto_index));
  RETURN_IF_ERROR(ValidateSegmentTokens(config.segment_tokens));
  RETURN_IF_ERROR(kvstore::ValidateSummaryRows(config.summary_rows));
  if (const int64_t queries = config.sampled_queries.value_or(kTeachingQueries);
      queries < 1 || queries > 65536) {
    return absl::InvalidArgumentError(
        absl::StrCat("sampled_queries=", queries, " is outside [1, 65536]"));
  }
  if (config.recheck_tokens < 0 || config.recheck_tokens > 4096) {
    return absl::InvalidArgumentError(
        absl::StrCat("recheck=", config.recheck_tokens, " is outside [0, 4096]"));
  }
  if (config.block_tokens < 64 || config.block_tokens % 64 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("block_tokens=", config.block_tokens, " is not a multiple of 64"));
  }
  if (tokens.empty()) return absl::InvalidArgumentError("the document is empty: it has no tokens");
  RETURN_IF_ERROR(ValidateAttention(config.attention, model));
  RETURN_IF_ERROR(ValidateKeysBeforeRope(config));
  const bool moved = config.attention.rope == model::Rope::kInfiniteHip;
  if (moved && config.beyond_trained) {
    return absl::InvalidArgumentError(
        "beyond_trained is for rope=trained: with infinitehip no position is beyond it");
  }
  RETURN_IF_ERROR(model::ValidateTokenIds(tokens, model));
  if (config.probe.has_value())
    RETURN_IF_ERROR(Annotate(model::ValidateTokenIds(*config.probe, model), "probe"));
  return CheckLength(checkpoint, tokens, moved || config.beyond_trained);
}

// What follows the document, of what fits; none where nothing could be measured on it.
std::vector<TokenId> ProbeOf(const PrefillConfig& config, const model::Checkpoint& checkpoint,
                             int64_t tokens) {
  const AttentionConfig& attention = config.attention;
  if (attention.kind != AttentionKind::kDense || attention.key_position == KeyPosition::kNone ||
      attention.rope != model::Rope::kTrained) {
    return {};
  }
  std::vector<TokenId> probe;
  if (config.probe.has_value()) {
    probe = *config.probe;
  } else if (checkpoint.tokenizer != nullptr) {
    // A tokenizer that has no token for a question mark makes none.
    probe = model::PlainProbe(*checkpoint.tokenizer).value_or(std::vector<TokenId>());
  }
  const int64_t room = checkpoint.config.MaxTokens(config.beyond_trained) - tokens;
  const int64_t most = std::clamp<int64_t>(room, 0, model::ProbeTokens(tokens));
  if (static_cast<int64_t>(probe.size()) > most) probe.resize(static_cast<size_t>(most));
  return probe;
}

// Of a job that was found: as ProbeOf would have made it, of these tokens or others.
absl::Status CheckProbe(const PrefillConfig& config, const model::Checkpoint& checkpoint,
                        const v1::Manifest& job) {
  const std::vector<TokenId> probe(job.probe().token_ids().begin(), job.probe().token_ids().end());
  PrefillConfig of_found = config;
  of_found.probe = probe;
  const absl::Status valid = model::ValidateTokenIds(probe, checkpoint.config);
  if (valid.ok() && ProbeOf(of_found, checkpoint, job.tokens()) == probe) return valid;
  return absl::FailedPreconditionError(
      absl::StrCat("an interrupted prefill of \"", job.name(), "\" has a probe of ", probe.size(),
                   " tokens that is none; to discard it pass --restart"));
}

v1::Manifest DescribeJob(const PrefillConfig& config, const model::Checkpoint& checkpoint,
                         const std::vector<TokenId>& tokens) {
  v1::Manifest job =
      NewManifest(config.name, tokens, checkpoint.config.shape, config.segment_tokens);
  job.set_key_position(std::string(KeyPositionName(config.attention.key_position)));
  job.set_prefill_attention(AttentionText(config.attention));
  job.set_prefill_rope(std::string(model::RopeName(config.attention.rope)));
  std::vector<std::pair<std::string, std::string>> fingerprint = checkpoint.fingerprint;
  model::SetKeyPosition(job.key_position(), fingerprint);
  for (const auto& [name, value] : fingerprint) AddFingerprint(name, value, job);
  *job.mutable_weights_probe() =
      ProbeToProto(model::TakeWeightsProbe(*checkpoint.weights, checkpoint.tokenizer.get()));
  SetIndexPlan(config.index, config.auto_index, config.summary_rows, job);
  job.set_sampled_queries(KeptQueries(config, job.tokens()));
  const std::vector<TokenId> probe = ProbeOf(config, checkpoint, job.tokens());
  if (!probe.empty()) job.mutable_probe()->mutable_token_ids()->Add(probe.begin(), probe.end());
  return job;
}

// The document's and the probe's.
int64_t AllTokens(const v1::Manifest& job) { return job.tokens() + job.probe().token_ids_size(); }

// Room for the layers to come, for the hidden states of those in hand and for publication.
absl::Status CheckDiskSpace(const PrefillConfig& config, const v1::Manifest& job,
                            int32_t finished_layers, int64_t hidden_size) {
  constexpr int64_t kHiddenStates =
      4;  // being written, next, and of two layers that wait for their index
  const int64_t rechecked = std::min(config.recheck_tokens, job.tokens()) * job.layers();
  const int64_t needed = StoredBytes(job, static_cast<int32_t>(job.layers()) - finished_layers) +
                         (AllTokens(job) * kHiddenStates + rechecked) * 4 * hidden_size +
                         kvstore::kPublishRoom;
  return CheckRoom(config.store_folder, needed,
                   absl::StrCat("prefill of ", job.tokens(), " tokens"));
}

int64_t PeakMemoryBytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

// Share of a layer that is done when `done` of `tokens` have passed: linear work per token,
// attention over all earlier ones.
double LayerShare(const model::ModelConfig& config, const AttentionConfig& attends, int64_t done,
                  int64_t tokens) {
  const double linear =
      2.0 * static_cast<double>(config.hidden_size) *
      (config.shape.head_dim * (2.0 * config.shape.q_heads + 2.0 * config.shape.kv_heads) +
       3.0 * config.intermediate_size);
  const double attention = 2.0 * config.shape.q_heads * config.shape.head_dim;
  // Sparse attention costs about twice what it attends to: choosing is as much work again.
  const double most = attends.kind == AttentionKind::kDense
                          ? static_cast<double>(tokens)
                          : static_cast<double>(2 * (attends.sink + attends.rows + attends.window));
  const auto work = [&](double n) { return n * linear + n * std::min(n, 2 * most) * attention; };
  return work(static_cast<double>(done)) / work(static_cast<double>(tokens));
}

// Layers that are indexed and written at once, each by as many threads as the pool can spare. A few
// cores compute a layer more slowly than it is written, each head by one thread; beside many, or a GPU,
// there are some, as far as memory allows: a layer's rows wait in memory until they are written.
int Writers(model::Device device, const v1::Manifest& job, const ThreadPool& pool) {
  constexpr int kMost = 4;
  constexpr int64_t kMostBytes = int64_t{12} << 30;
  const int of_threads = (pool.threads() + 1) / (device == model::Device::kCpu ? 8 : 2);
  const int64_t layer_bytes = job.tokens() * 4 * job.kv_heads() * job.head_dim();
  const int64_t by_memory = kMostBytes / layer_bytes - 3;  // as many are held beside those
  return static_cast<int>(std::clamp<int64_t>(std::min<int64_t>(of_threads, by_memory), 1, kMost));
}

// Files for the rows of a layer, `most` at most: beside a GPU one thread would take longer to write
// them than the GPU takes for the layer.
int RowFiles(model::Device device, const v1::Manifest& job, int most) {
  constexpr int64_t kWorthIt = int64_t{16} << 20;
  const int64_t layer_bytes = job.tokens() * 4 * job.kv_heads() * job.head_dim();
  if (device == model::Device::kCpu || layer_bytes < kWorthIt) return 0;
  return static_cast<int>(std::min<int64_t>(most, 2 * job.kv_heads()));
}

// Nobody computes while a state is hashed and written, `bytes` of it: on a CPU a large one may take a
// twentieth of the time.
absl::Duration HiddenInterval(const PrefillConfig& config, size_t bytes) {
  constexpr size_t kSmall = size_t{8} << 20;
  constexpr double kBytesPerSecond = 10e6;
  if (config.hidden_interval_s >= 0) return absl::Seconds(config.hidden_interval_s);
  if (config.device != model::Device::kCpu) return absl::Minutes(1);
  return bytes < kSmall ? absl::ZeroDuration()
                        : absl::Seconds(static_cast<double>(bytes) / kBytesPerSecond);
}

// Tokens that pass a layer together on a CPU: `least`, and some for each thread; the last block has about
// as many as the others. A multiple of the tiles that products and attention take, so that the cut
// changes no bit.
int64_t BlockTokens(int64_t least, int64_t tokens, const ThreadPool& pool) {
  constexpr int64_t kOfThread = 256, kMost = 4096, kTile = 128;
  const int64_t wanted = std::min(kOfThread * (pool.threads() + 1), kMost);
  if (wanted <= least || least % kTile != 0) return least;
  const int64_t blocks = (tokens + wanted - 1) / wanted;
  const int64_t even = (tokens + blocks - 1) / blocks;
  return std::max(least, (even + kTile - 1) / kTile * kTile);
}

// Queries of each q head whose exact attention is described. Beside a GPU it is the CPU's work that
// takes the time.
// Keys before RoPE have no scores to describe.
int64_t StatisticsSamples(const PrefillConfig& config, int64_t tokens) {
  constexpr int64_t kSamples = 64, kLeast = 8, kScoredKeys = 1 << 18;  // of a q head
  if (config.attention.key_position == KeyPosition::kNone) return 0;
  return config.device == model::Device::kCpu ? kSamples
                                              : std::clamp(kScoredKeys / tokens, kLeast, kSamples);
}

// A GPU multiplies numbers that were rounded to bf16, off by 2^-9; several on a layer's way.
constexpr double kGpuProductError = 0x1p-7;

// One run of a job, from the layer it stands at to publication.
class Job {
 public:
  Job(const PrefillConfig& config, const model::Checkpoint& checkpoint,
      const std::vector<TokenId>& tokens, v1::Manifest job, Staging staging, kvstore::Store& store,
      ThreadPool* pool, Progress& progress)
      : config_(config),
        checkpoint_(checkpoint),
        tokens_(tokens),
        job_(std::move(job)),
        staging_(std::move(staging)),
        store_(store),
        pool_(pool),
        progress_(progress) {
    if (!CanRecheck(config.attention)) return;
    recheck_.tokens = std::min(config.recheck_tokens, job_.tokens());
    recheck_.seed = RecheckSeed(job_.context_id());
    recheck_.key_position = config.attention.key_position;
    if (config.device != model::Device::kCpu) recheck_.product_error = kGpuProductError;
  }

  absl::StatusOr<PrefillReport> Run() {
    RETURN_IF_ERROR(
        MakeForward());  // loading weights onto a GPU is no part of the job's time, as on the CPU
    const absl::Time start = absl::Now();
    RETURN_IF_ERROR(FindStart());
    const int32_t layers = checkpoint_.config.shape.layers;
    TellSealed(first_layer_);
    if (first_layer_ < layers) RETURN_IF_ERROR(ComputeLayers(start));
    TellSealed(layers);
    report_.compute_seconds = absl::ToDoubleSeconds(computed_ - start);
    RETURN_IF_ERROR(RecheckSealed());
    progress_.Step(1, "publishing");
    const absl::Time publishing = absl::Now();
    RETURN_IF_ERROR(Publish(absl::ToDoubleSeconds(publishing - start)));
    progress_.Clear();
    report_.publish_seconds = absl::ToDoubleSeconds(absl::Now() - publishing);
    report_.tokens = job_.tokens();
    report_.probe_tokens = job_.probe().token_ids_size();
    report_.resumed_layers = first_layer_;
    report_.seconds = absl::ToDoubleSeconds(absl::Now() - start);
    report_.tokens_per_s =
        static_cast<double>(job_.tokens()) * (layers - first_layer_) / layers / report_.seconds;
    report_.peak_memory_bytes = PeakMemoryBytes();
    report_.times = forward_->times();
    report_.device_bytes = forward_->device_bytes() + accelerator_bytes_;
    CountBytes(job_, report_);
    return report_;
  }

 private:
  absl::Status MakeForward() {
    const int64_t tokens = job_.tokens();
    const ForwardPlan plan = {tokens, job_.probe().token_ids_size(),
                              SamplePositions(tokens, TeachingQueries(config_, tokens)),
                              DrawPositions(tokens, recheck_.tokens, recheck_.seed),
                              config_.attention};
    if (config_.device == model::Device::kCpu) {
      forward_ = MakeCpuForward(checkpoint_, plan,
                                BlockTokens(config_.block_tokens, tokens, *pool_), pool_);
      return absl::OkStatus();
    }
    // Beside those that are written: of the layer that waits, the one that computes, and the next,
    // whose first half is enqueued.
    const int rows_ahead = Writers(config_.device, job_, *pool_) + 3;
    const bool summaries = config_.summary_rows > 0;
    accelerator_bytes_ = CudaAcceleratorBytes(tokens, summaries);
    ASSIGN_OR_RETURN(forward_, MakeCudaForward(checkpoint_, plan, config_.gpu_memory,
                                               accelerator_bytes_, rows_ahead, pool_));
    ASSIGN_OR_RETURN(accelerator_, MakeCudaAccelerator(tokens, summaries));
    return absl::OkStatus();
  }

  // The latest layer whose predecessors are all on disk and whose input is at hand.
  absl::Status FindStart() {
    const int32_t layers = checkpoint_.config.shape.layers;
    for (first_layer_ = WholeLayers(); first_layer_ > 0; --first_layer_) {
      if (first_layer_ == layers) return absl::OkStatus();
      const auto width = static_cast<size_t>(checkpoint_.config.hidden_size);
      std::vector<float> hidden(static_cast<size_t>(AllTokens(job_)) * width);
      std::vector<float> before(SamplePositions(job_.tokens(), kDriftTokens).size() * width);
      const absl::Status status = staging_.ReadHidden(Layer(first_layer_), hidden, before);
      if (status.ok()) {
        kept_.push_back(first_layer_);
        return forward_->SetHidden(Layer(first_layer_), {hidden, before});
      }
      if (!absl::IsNotFound(status) && !absl::IsDataLoss(status)) return status;
      staging_.DropLayer(
          Layer(first_layer_ - 1));  // it will be written again, and is not finished until it was
    }
    std::vector<TokenId> all = tokens_;
    all.insert(all.end(), job_.probe().token_ids().begin(), job_.probe().token_ids().end());
    return forward_->Embed(all);
  }

  // Layers that are finished, with what it takes to check them.
  int32_t WholeLayers() const {
    const int32_t finished = staging_.FinishedLayers(checkpoint_.config.shape.layers);
    for (Layer layer(0); recheck_.tokens > 0 && layer.value() < finished; layer = layer.next()) {
      if (EnteringOf(layer).ok()) continue;
      staging_.DropLayer(layer);
      return layer.value();
    }
    return finished;
  }

  absl::StatusOr<std::vector<float>> EnteringOf(Layer layer) const {
    return staging_.ReadEntering(
        layer, static_cast<size_t>(recheck_.tokens * checkpoint_.config.hidden_size));
  }

  absl::Status ComputeLayers(absl::Time start) {
    const model::ModelConfig& config = checkpoint_.config;
    const int64_t tokens = job_.tokens();
    ASSIGN_OR_RETURN(const kvstore::ContextId id, kvstore::ContextIdOf(job_));
    LayerWriter writer(&staging_, id, config.shape, config_.segment_tokens, config_.index,
                       config_.auto_index, config_.summary_rows, pool_,
                       {.statistics_samples = StatisticsSamples(config_, tokens),
                        .kept_queries = job_.sampled_queries(),
                        .writers = Writers(config_.device, job_, *pool_),
                        .row_files = RowFiles(config_.device, job_, 4),
                        // The job waits for them, but every file takes its time to publish.
                        .last_row_files = RowFiles(config_.device, job_, 8),
                        .accelerator = accelerator_.get(),
                        .still_right = [this] { return CheckCheckpoint(); }});
    last_kept_ = absl::Now();
    absl::Duration waited;
    const auto submit = [&](LayerRows rows) {
      const absl::Time submitted = absl::Now();
      RETURN_IF_ERROR(writer.Submit(std::move(rows)));
      waited += absl::Now() - submitted;
      return absl::OkStatus();
    };
    for (Layer layer(first_layer_); layer.value() < config.shape.layers; layer = layer.next()) {
      // Where every hidden state is kept, it is on disk before the layer before it can count as
      // finished; else rows are written as soon as they are there.
      std::optional<LayerRows> held;
      RETURN_IF_ERROR(forward_->Run(
          layer, /*rows_only=*/layer.value() + 1 == config.shape.layers,
          [&](int64_t done) {
            progress_.Update(Share(layer, done), Describe(start, layer, done));
            return CheckWanted();
          },
          [&](LayerRows rows) {
            if (config_.device == model::Device::kCuda) return submit(std::move(rows));
            held = std::move(rows);
            return absl::OkStatus();
          }));
      RETURN_IF_ERROR(KeepHidden(layer.next()));
      if (held.has_value()) RETURN_IF_ERROR(submit(*std::move(held)));
      DropHidden(writer.written());
      TellSealed(writer.written());
      progress_.Step(Share(layer, tokens), Describe(start, layer, tokens));
    }
    computed_ = absl::Now();
    progress_.Update(1, "waiting for the last index");
    RETURN_IF_ERROR(writer.Finish([this](int32_t written) { TellSealed(written); }));
    report_.index_wait_seconds = absl::ToDoubleSeconds(waited + (absl::Now() - computed_));
    report_.writer = writer.times();
    return absl::OkStatus();
  }

  absl::Status KeepHidden(Layer layer) {
    if (layer.value() == checkpoint_.config.shape.layers) return absl::OkStatus();
    const size_t bytes =
        tokens_.size() * static_cast<size_t>(checkpoint_.config.hidden_size) * sizeof(float);
    if (absl::Now() - last_kept_ < HiddenInterval(config_, bytes)) return absl::OkStatus();
    ASSIGN_OR_RETURN(const HiddenState state, forward_->Hidden());
    RETURN_IF_ERROR(CheckCheckpoint());
    RETURN_IF_ERROR(staging_.WriteHidden(layer, state.all, state.before));
    kept_.push_back(layer.value());
    last_kept_ = absl::Now();
    return absl::OkStatus();
  }

  // Of the states that a restart could begin with, the latest is enough.
  void DropHidden(int32_t written) {
    while (kept_.size() > 1 && kept_[1] <= written) {
      staging_.DropHidden(Layer(kept_.front()));
      kept_.pop_front();
    }
  }

  // The first `written` layers are sealed.
  void TellSealed(int32_t written) {
    for (; config_.sealed != nullptr && told_ < written; ++told_) {
      SealedLayer layer{.context_id = job_.context_id(), .first_file = told_files_};
      layer.paths = staging_.SstPaths(Layer(told_));
      // Rows are before all else in order of keys, and in files of their own, if there are several.
      std::rotate(layer.paths.begin(), layer.paths.begin() + 1, layer.paths.end());
      told_files_ += static_cast<int64_t>(layer.paths.size());
      config_.sealed(layer);
    }
  }

  absl::Status CheckWanted() const {
    if (!config_.wanted || config_.wanted()) return absl::OkStatus();
    return absl::CancelledError(
        absl::StrCat("prefill of \"", config_.name, "\": cancelled by its caller"));
  }

  double Share(Layer layer, int64_t done) const {
    const int32_t layers = checkpoint_.config.shape.layers;
    return (layer.value() +
            LayerShare(checkpoint_.config, config_.attention, done, job_.tokens())) /
           layers;
  }

  std::string Describe(absl::Time start, Layer layer, int64_t done) const {
    const double before = static_cast<double>(first_layer_) / checkpoint_.config.shape.layers;
    const double share = Share(layer, done) - before;
    const absl::Duration elapsed = absl::Now() - start;
    const absl::Duration left = elapsed * ((1 - before - share) / share);
    return absl::StrFormat(
        "layer %d/%d  %.0f tokens/s  %s left", layer.value() + 1, checkpoint_.config.shape.layers,
        share * static_cast<double>(job_.tokens()) / absl::ToDoubleSeconds(elapsed),
        FormatClock(left));
  }

  // What was computed so far was computed by the weights of the fingerprint. Asked before anything
  // is kept for a resumed job, too: that one trusts what it finds.
  absl::Status CheckCheckpoint() const {
    const absl::Status status = checkpoint_.CheckUnchanged();
    if (status.ok()) return status;
    return absl::Status(status.code(), absl::StrCat(status.message(), "; nothing is published"));
  }

  // What fails is not gone on with: another draw might miss it.
  absl::Status RecheckSealed() {
    if (recheck_.tokens == 0) return absl::OkStatus();
    progress_.Update(1, "computing some tokens again");
    const absl::Time start = absl::Now();
    std::vector<std::string> files;
    for (Layer layer(0); layer.value() < checkpoint_.config.shape.layers; layer = layer.next()) {
      for (std::string& path : staging_.SstPaths(layer)) files.push_back(std::move(path));
    }
    ASSIGN_OR_RETURN(const auto sealed, kvstore::OpenStagedContext(job_, files));
    const absl::StatusOr<double> worst = Recheck(
        checkpoint_, tokens_, *sealed, [this](Layer layer) { return EnteringOf(layer); }, recheck_,
        pool_);
    if (!worst.ok()) {
      RETURN_IF_ERROR(CheckCheckpoint());
      RETURN_IF_ERROR(staging_.Remove());
      const bool model = absl::IsInvalidArgument(worst.status());
      return absl::Status(
          worst.status().code(),
          absl::StrCat("the document is not kept: ", worst.status().message(),
                       model ? ""
                             : "; what was computed or written is wrong there: the next run "
                               "begins anew, and if it fails, too, look at this machine's "
                               "memory, disk and GPU",
                       " (recheck of ", recheck_.tokens, " tokens, seed ", recheck_.seed, ")"));
    }
    report_.recheck_tokens = recheck_.tokens;
    report_.recheck_seed = recheck_.seed;
    report_.recheck_worst = *worst;
    report_.recheck_seconds = absl::ToDoubleSeconds(absl::Now() - start);
    return absl::OkStatus();
  }

  absl::Status Publish(double seconds) {
    RETURN_IF_ERROR(CheckCheckpoint());
    job_.set_prefill_seconds(seconds);
    return PublishStaged(job_, staging_, tokens_, store_);
  }

  const PrefillConfig& config_;
  const model::Checkpoint& checkpoint_;
  const std::vector<TokenId>& tokens_;
  v1::Manifest job_;
  const Staging staging_;
  kvstore::Store& store_;
  ThreadPool* const pool_;
  Progress& progress_;
  RecheckConfig recheck_{.tokens = 0};
  std::unique_ptr<LayerForward> forward_;
  std::unique_ptr<kvstore::Accelerator> accelerator_;  // null: none
  int64_t accelerator_bytes_ = 0;                      // of a GPU's memory
  std::deque<int32_t> kept_;                           // layers whose input is on disk, ascending
  absl::Time last_kept_;
  absl::Time computed_ = absl::Now();
  int32_t first_layer_ = 0;
  int32_t told_ = 0;        // layers that `sealed` was told of
  int64_t told_files_ = 1;  // with that of the token ids, the first
  PrefillReport report_;
};

}  // namespace

void SetIndexPlan(const kvstore::IndexParams& index,
                  const std::optional<kvstore::AutoIndexConfig>& auto_index, int64_t summary_rows,
                  v1::Manifest& manifest) {
  manifest.set_summary_rows(static_cast<uint32_t>(summary_rows));
  v1::IndexSpec& spec = *manifest.mutable_index();
  spec.Clear();
  if (!auto_index.has_value()) return kvstore::SetIndexSpec(index, spec);
  // What decides the choice is recorded: a resumed job must not choose otherwise.
  kvstore::SetIndexSpec(auto_index->params, spec);
  spec.set_kind(std::string(kvstore::kAutoIndexKind));
  spec.set_want_recall(static_cast<float>(auto_index->want_recall));
  spec.set_wanted(static_cast<uint32_t>(auto_index->wanted));
}

void CountBytes(const v1::Manifest& manifest, PrefillReport& report) {
  for (const v1::LayerSizes& sizes : manifest.layer_sizes()) {
    report.index_bytes += sizes.index_bytes();
    report.summary_bytes += sizes.summary_bytes();
    report.stored_bytes += sizes.key_bytes() + sizes.value_bytes() + sizes.index_bytes() +
                           sizes.summary_bytes() + sizes.sampled_query_bytes() +
                           sizes.query_drift_bytes();
  }
}

absl::StatusOr<PrefillReport> RunPrefill(const PrefillConfig& config,
                                         const model::Checkpoint& checkpoint,
                                         const std::vector<TokenId>& tokens, kvstore::Store& store,
                                         ThreadPool* pool, Progress& progress) {
  RETURN_IF_ERROR(Validate(config, checkpoint, tokens));
  if (config.device == model::Device::kCuda) RETURN_IF_ERROR(CheckCudaForward(checkpoint.config));
  RETURN_IF_ERROR(CheckNameIsFree(store, config.store_folder, config.name));
  ASSIGN_OR_RETURN(Staging staging, Staging::Open(config.store_folder, config.name));
  if (config.restart) RETURN_IF_ERROR(staging.Empty());
  v1::Manifest job = DescribeJob(config, checkpoint, tokens);
  const absl::StatusOr<v1::Manifest> found = staging.ReadJob();
  const absl::Status room =
      CheckDiskSpace(config, job, staging.FinishedLayers(checkpoint.config.shape.layers),
                     checkpoint.config.hidden_size);
  if (!room.ok()) {
    if (absl::IsNotFound(found.status())) (void)staging.Remove();
    return room;
  }
  if (found.ok()) {
    // It goes on with the probe that it began with, whatever is made today; none, if it had none.
    job.clear_probe();
    if (found->has_probe()) *job.mutable_probe() = found->probe();
    RETURN_IF_ERROR(SameJob(*found, job));
    RETURN_IF_ERROR(CheckProbe(config, checkpoint, job));
    job.set_context_id(found->context_id());
  } else {
    if (!absl::IsNotFound(found.status()))
      return Annotate(found.status(),
                      "an interrupted prefill cannot be read; to discard it pass --restart");
    RETURN_IF_ERROR(staging.Empty());  // whatever lies there without a job belongs to none
    job.set_context_id(kvstore::ContextId::Random().Bytes());
    RETURN_IF_ERROR(staging.WriteJob(job));
  }
  absl::StatusOr<PrefillReport> report =
      Job(config, checkpoint, tokens, std::move(job), staging, store, pool, progress).Run();
  if (!IsDiskFull(report.status())) return report;
  if (!config.keep_when_full) RETURN_IF_ERROR(staging.Remove());
  return MakeDiskFull(absl::StrCat(
      report.status().message(),
      config.keep_when_full
          ? absl::StrCat("; what is computed stays: the same prefill goes on with it once there is "
                         "room, carrel rm ",
                         config.name, " gives up its own")
          : "; nothing of the prefill stays"));
}

}  // namespace carrel::prefill
