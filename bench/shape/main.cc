// What:  decoding with a model of random weights over a synthetic context of its shape, beside the time
//        that memory needs for what a token must read; and how long the model takes to load once its
//        digest is known. Two JSON objects.
// Math:  floor = (weights + rows attended + summaries) / bandwidth, the bandwidth being that of as
//        many threads that add up 512 MiB, measured before and after. Embeddings of one token are not
//        counted, nor what the index reads (`index_bytes`, of which a search reads the codes).
//        With a device: instead, what a plan of this machine foresees of each way to attend, and what it takes: a JSON
//        object for each way.
// Usage: shape_bench MODEL.gguf STORE CONTEXT [TOKENS [THREADS [cpu | cuda]]]   (defaults 24, one per core)
//        The context's fingerprint is presented, whatever the model: only times count here.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "carrel/v1/context.pb.h"
#include "common/status.h"
#include "common/thread_pool.h"
#include "common/usable_cores.h"
#include "decoder/decoder.h"
#include "decoder/fidelity.h"
#include "kvstore/storage/store.h"
#include "library/loaded_model.h"
#include "library/open_decoder.h"
#include "library/store_access.h"
#include "model/checkpoint.h"
#include "model/digest_cache.h"
#include "model/weights.h"

namespace carrel {
namespace {

constexpr int64_t kStreamWords = int64_t{64} << 20;
constexpr int64_t kStreamUnit = 1 << 16;
constexpr int kStreamRounds = 5;
// Pages of rows and weights come into memory, and rows are verified, which is done once.
constexpr int64_t kWarmTokens = 32;

// GB/s that the pool's threads and the caller add up numbers with; the best of some rounds.
double Bandwidth(ThreadPool* pool, const std::vector<uint64_t>& words) {
  double best = 0;
  for (int round = 0; round < kStreamRounds; ++round) {
    std::vector<uint64_t> sums(static_cast<size_t>(kStreamWords / kStreamUnit));
    const absl::Time start = absl::Now();
    pool->ParallelFor(static_cast<int64_t>(sums.size()), [&](int64_t unit) {
      uint64_t parts[8] = {};
      const uint64_t* const at = words.data() + unit * kStreamUnit;
      for (int64_t i = 0; i < kStreamUnit; i += 8) {
        for (int64_t j = 0; j < 8; ++j) parts[j] += at[i + j];
      }
      for (const uint64_t part : parts) sums[static_cast<size_t>(unit)] += part;
    });
    const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
    uint64_t total = 0;
    for (const uint64_t sum : sums) total += sum;
    if (total == 0) return 0;  // the words are not zero: this keeps the sums alive
    best = std::max(best, 8.0 * static_cast<double>(kStreamWords) / seconds / 1e9);
  }
  return best;
}

int64_t BytesOf(const model::Matrix& w) {
  return w.blocks ? kernels::GgufBytes(w.blocks->type, w.out * w.in)
                  : w.out * w.in * DTypeBytes(w.dtype);
}

int64_t WeightBytes(const model::Checkpoint& checkpoint) {
  int64_t bytes = BytesOf(checkpoint.weights->head());
  for (Layer layer(0); layer.value() < checkpoint.config.shape.layers; layer = layer.next()) {
    const model::LayerWeights& w = checkpoint.weights->layer(layer);
    for (const model::Matrix* matrix : {&w.q, &w.k, &w.v, &w.o, &w.gate, &w.up, &w.down}) {
      bytes += BytesOf(*matrix);
    }
  }
  return bytes;
}

struct Totals {
  double rows = 0, exposed_wait_us = 0, tokens = 0;
};

Totals Sum(const decoder::Statistics& statistics) {
  Totals totals;
  for (const decoder::LayerStatistics& layer : statistics.layers) {
    totals.rows += static_cast<double>(layer.rows_attended);
    totals.exposed_wait_us += layer.exposed_wait_us;
    totals.tokens = static_cast<double>(layer.tokens);
  }
  return totals;
}

struct Flags {
  std::string model, store, context;
  int64_t tokens = 24;
  int threads = 0;
  std::string device;  // empty: the floor; otherwise the ways of a plan
};

// The context's own fingerprint, so that it lets the model in.
void TakeFingerprint(const v1::Manifest& manifest, model::Checkpoint& checkpoint) {
  checkpoint.fingerprint.clear();
  for (const auto& field : manifest.fingerprint().fields()) {
    checkpoint.fingerprint.emplace_back(field.name(), field.value());
  }
}

// What decoding some tokens came to.
struct Decoded {
  double ms_per_token = 0, exposed_wait_ms = 0, rows = 0, promised_error = 0;
  int64_t steps = 0;
};

absl::StatusOr<Decoded> Decode(decoder::Decoder& decoder, int64_t tokens) {
  decoder::GenerateOptions options;
  options.ignore_eos = true;
  options.max_tokens = kWarmTokens + 1;
  const std::vector<TokenId> prompt = {1, 2, 3, 4};
  RETURN_IF_ERROR(decoder.Generate(prompt, options).status());
  const Totals warm = Sum(decoder.statistics());
  options.max_tokens = tokens + 1;
  ASSIGN_OR_RETURN(const decoder::GenerateResult result, decoder.Generate(prompt, options));
  const Totals end = Sum(decoder.statistics());
  const double passed = end.tokens - warm.tokens;
  Decoded decoded;
  decoded.steps = result.steps;
  decoded.ms_per_token = 1000 * result.generate_seconds / static_cast<double>(result.steps);
  decoded.exposed_wait_ms = (end.exposed_wait_us - warm.exposed_wait_us) / passed / 1000;
  decoded.rows = (end.rows - warm.rows) / passed;
  decoded.promised_error = decoder.statistics().promised_error;
  return decoded;
}

void Print(const Flags& flags, const v1::Manifest& manifest, const Decoded& decoded,
           double weight_bytes, double bandwidth) {
  int64_t summary_bytes = 0, index_bytes = 0;
  for (const v1::LayerSizes& sizes : manifest.layer_sizes()) {
    summary_bytes += sizes.summary_bytes();
    index_bytes += sizes.index_bytes();
  }
  const double row_bytes = decoded.rows * manifest.head_dim() * 2 * sizeof(uint16_t);
  const double floor_ms =
      (weight_bytes + row_bytes + static_cast<double>(summary_bytes)) / bandwidth / 1e6;
  const nlohmann::json json = {
      {"layers", manifest.layers()},
      {"context_tokens", manifest.tokens()},
      {"threads", flags.threads},
      {"steps", decoded.steps},
      {"ms_per_token", decoded.ms_per_token},
      {"exposed_wait_ms", decoded.exposed_wait_ms},
      {"weight_bytes", weight_bytes},
      {"row_bytes", row_bytes},
      {"summary_bytes", summary_bytes},
      {"index_bytes", index_bytes},
      {"rows_per_kv_head", decoded.rows / manifest.layers() / manifest.kv_heads()},
      {"promised_error", decoded.promised_error},
      {"bandwidth_gb_per_s", bandwidth},
      {"floor_ms", floor_ms},
      {"share_of_floor", floor_ms / decoded.ms_per_token}};
  std::printf("%s\n", json.dump().c_str());
}

// A decoder by a plan, or by this way of it.
absl::StatusOr<std::unique_ptr<library::OpenDecoder>> OpenBy(
    const Flags& flags, std::optional<decoder::Way> way,
    const std::shared_ptr<library::LoadedModel>& model,
    const std::shared_ptr<library::StoreAccess>& store) {
  library::DecoderSpec spec;
  spec.context = flags.context;
  spec.folder = flags.store;
  spec.config.dense_layers = 0;
  spec.config.selection =
      decoder::FidelityOptions{decoder::TargetError(decoder::Fidelity::kBalanced)};
  spec.device.device = flags.device == "cuda" ? model::Device::kCuda : model::Device::kCpu;
  spec.planned = true;
  spec.way = way;
  return library::OpenDecoder::Create(std::move(spec), model, store);
}

absl::StatusOr<Decoded> DecodeBy(const Flags& flags, decoder::Way way,
                                 const std::shared_ptr<library::LoadedModel>& model,
                                 const std::shared_ptr<library::StoreAccess>& store) {
  ASSIGN_OR_RETURN(const auto open, OpenBy(flags, way, model, store));
  return Decode(open->decoder(), flags.tokens);
}

absl::Status Ways(const Flags& flags, const v1::Manifest& manifest, model::Checkpoint checkpoint,
                  const std::shared_ptr<library::StoreAccess>& store) {
  const auto model = library::LoadedModel::Of(std::move(checkpoint), flags.threads);
  std::optional<decoder::Plan> plan;
  {
    ASSIGN_OR_RETURN(const auto open, OpenBy(flags, std::nullopt, model, store));
    plan = open->decoder().plan();
  }
  if (!plan.has_value()) return absl::InternalError("no plan was made");
  for (const decoder::PlannedWay& way : plan->ways) {
    nlohmann::json line = {{"bench", "ways"},
                           {"machine", plan->machine},
                           {"layers", manifest.layers()},
                           {"context_tokens", manifest.tokens()},
                           {"way", decoder::WayName(way.way)},
                           {"taken", way.way == plan->taken().way},
                           {"planned_attention_ms", 1e3 * way.seconds},
                           {"promised_error", way.error},
                           {"bytes", way.bytes}};
    const absl::StatusOr<Decoded> decoded = DecodeBy(flags, way.way, model, store);
    if (decoded.ok()) {
      line["ms_per_token"] = decoded->ms_per_token;
      line["rows_per_kv_head"] = decoded->rows / manifest.layers() / manifest.kv_heads();
    } else {
      line["failed"] = decoded.status().ToString();
    }
    std::printf("%s\n", line.dump().c_str());
    std::fflush(stdout);
  }
  return absl::OkStatus();
}

absl::Status Run(const Flags& flags) {
  ThreadPool pool(flags.threads - 1);
  std::vector<uint64_t> words(static_cast<size_t>(kStreamWords), 1);
  const double before = Bandwidth(&pool, words);
  const model::DigestCache cache(model::DigestCache::DefaultFolder());
  const absl::Time start = absl::Now();
  const std::clock_t cpu_start = std::clock();
  ASSIGN_OR_RETURN(model::Checkpoint checkpoint,
                   model::LoadCheckpoint(flags.model, &pool, "", &cache));
  const double load_s = absl::ToDoubleSeconds(absl::Now() - start);
  const double load_cpu_s = static_cast<double>(std::clock() - cpu_start) / CLOCKS_PER_SEC;
  library::StoreAddress address;
  address.folder = flags.store;
  ASSIGN_OR_RETURN(const std::shared_ptr<library::StoreAccess> store,
                   library::StoreAccess::Open(address, kvstore::StoreMode::kReadOnly));
  ASSIGN_OR_RETURN(const v1::Manifest manifest, store->store()->GetManifest(flags.context));
  TakeFingerprint(manifest, checkpoint);
  if (!flags.device.empty()) return Ways(flags, manifest, std::move(checkpoint), store);
  ASSIGN_OR_RETURN(std::unique_ptr<retrieval::Session> client, store->NewClient(&pool));
  decoder::RetrievalConfig config;
  config.dense_layers = 0;
  config.selection = decoder::FidelityOptions{decoder::TargetError(decoder::Fidelity::kBalanced)};
  ASSIGN_OR_RETURN(
      const std::unique_ptr<decoder::Decoder> decoder,
      decoder::Decoder::Open(checkpoint, std::move(client), flags.context, config, &pool));
  ASSIGN_OR_RETURN(const Decoded decoded, Decode(*decoder, flags.tokens));
  const double bandwidth = std::max(before, Bandwidth(&pool, words));
  std::printf(
      "%s\n",
      nlohmann::json({{"model_load_s", load_s}, {"model_load_cpu_s", load_cpu_s}}).dump().c_str());
  Print(flags, manifest, decoded, static_cast<double>(WeightBytes(checkpoint)), bandwidth);
  return absl::OkStatus();
}

}  // namespace
}  // namespace carrel

int main(int argc, char** argv) {
  if (argc < 4 || argc > 7) {
    std::fprintf(stderr,
                 "usage: shape_bench MODEL.gguf STORE CONTEXT [TOKENS [THREADS [cpu | cuda]]]\n");
    return 2;
  }
  carrel::Flags flags{argv[1], argv[2], argv[3]};
  if (argc > 4) flags.tokens = std::strtol(argv[4], nullptr, 10);
  flags.threads = argc > 5 ? std::atoi(argv[5]) : carrel::UsableCores();
  if (argc > 6) flags.device = argv[6];
  if (!flags.device.empty() && flags.device != "cpu" && flags.device != "cuda") {
    std::fprintf(stderr, "shape_bench: device %s is neither cpu nor cuda\n", argv[6]);
    return 2;
  }
  if (flags.tokens < 1 || flags.threads < 1) {
    std::fprintf(stderr, "shape_bench: TOKENS and THREADS are at least 1\n");
    return 2;
  }
  const absl::Status status = carrel::Run(flags);
  if (!status.ok()) std::fprintf(stderr, "shape_bench: %s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
