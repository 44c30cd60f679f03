// What:   how a decoder retrieves: every choice of one sequence's attention, and its validation.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/ids.h"
#include "decoder/select/selector_config.h"
#include "kernels/rows/row_bank/row_bank.h"
#include "model/device.h"
#include "model/rope_mode.h"

namespace carrel::decoder {

enum class Prefetch : uint8_t { kOff = 0, kSpeculative = 1, kVerified = 2 };
enum class Want : uint8_t { kRows = 0, kValues = 1, kAttend = 2 };
enum class Budget : uint8_t { kUniform = 0, kLinear = 1, kMeasured = 2 };

// kRange: rows within `range` of the best score; kMass: the best rows with a share `mass` of the
// softmax (carrel/v1/retrieval.proto, Select).
// kFidelity: of each KV head as many as reach a fidelity on what prefill measured (fidelity.h).
enum class Select : uint8_t { kTopK = 0, kRange = 1, kMass = 2, kFidelity = 3 };

// The estimation term: rows that are not selected count through summaries of their clusters. kAuto:
// where want=attend and the context has summaries; never with a selector.
enum class Estimate : uint8_t { kAuto = 0, kOn = 1, kOff = 2 };

using model::Rope;  // kInfiniteHip: repositioned_attention.h

inline constexpr int64_t kAsSelected = 0;  // a layer's budget: what range or mass selects

// The GPU's banks of rows, for a zone in this host's memory.
struct BankConfig {
  int64_t bytes = 0;  // of device memory for all banks, their page tables included; 0: no banks,
                      // rows are read where they lie
  kernels::RowMap map = kernels::RowMap::kVector;  // the fastest; kHash where 4 bytes per row of
                                                   // the zone, layer and KV head are too many
  double ahead = 1;  // with prefetch=speculative, rows fetched ahead, as a multiple of those
                     // attended; 1 .. 8
};

// Where the zone lives, and who chooses its rows: the store, by the context's index; or the decoder,
// by a method, among rows in this host's memory or on the GPU, where the store is read once, at open.
struct StoreZoneOptions {};
struct HostZoneOptions {
  SelectorConfig selector;
  BankConfig bank = {};  // with a GPU
};
struct DeviceZoneOptions {
  SelectorConfig selector;
};
using ZoneOptions = std::variant<StoreZoneOptions, HostZoneOptions, DeviceZoneOptions>;

struct RetrievalConfig {
  // What the context must hold: its content id (Manifest), or the first 12 digits or more; empty:
  // anything.
  std::string content_id;
  int64_t top_k = 128;  // rows of the zone attended per KV head and token; >= 1, at most the
                        // context's tokens; kAllRows: all
  Select select = Select::kTopK;
  double range = 0;         // kRange: in units of scaled scores; > 0
  double mass = 0;          // kMass: 0 < mass <= 1
  double target_error = 0;  // kFidelity: > 0
  // kFidelity: a context that was not measured is attended by top_k instead, with so many dense
  // layers.
  bool or_top_k = false;
  int32_t or_dense_layers = 2;
  // kFidelity: set by Decoder::Open: [layers, kv_heads], and the error that they promise.
  std::vector<int64_t> head_rows;
  double promised_error = 0;
  int64_t max_rows = 0;  // kRange, kMass: bound on the rows per KV head; 0: the store's
  Estimate estimate = Estimate::kAuto;
  int32_t dense_layers = 2;  // the first layers attend to every row: their attention is flat, and
                             // the demo model loses answers without; 0 .. layers
  int64_t sink =
      4;  // first rows of the context that the decoder holds; >= 0, at most what there is
  int64_t local =
      64;  // last rows of the context that the decoder holds; >= 0, at most what there is
  Budget budget = Budget::kUniform;
  // kMeasured: of each layer's sampled attention, as the store reports it when the context is
  // opened (carrel/v1/retrieval.proto, OpenReply); set by Decoder::Open.
  std::vector<float> layer_entropy_nats;
  Prefetch prefetch = Prefetch::kOff;
  Want want = Want::kAttend;       // ATTEND sends least
  double oversample = 2.0;         // candidates asked ahead, as a multiple of top_k; 1 .. 16
  double verified_hit_rate = 0.9;  // verified: the share of the true top_k that approximate
                                   // candidates must have held, to be used unverified; 0 .. 1
  int64_t row_cache_bytes = 0;     // want=rows: memory for rows that the store sent before, which
                                   // then need not travel again; 0: none are kept
  int32_t effort = 0;              // effort of a graph index; 0: the context's own
  ZoneOptions zone;
  Rope rope = Rope::kTrained;   // kInfiniteHip: with method exact, hip or infinitehip
  bool beyond_trained = false;  // kTrained: positions may exceed what the model was trained for
                                // (max_position_embeddings), where it knows no better than to guess
  bool measure = false;  // also ask for exact answers, for the statistics: hit rate and mass.
                         // Outside of what is timed.
};

// Where the model runs.
struct DeviceConfig {
  model::Device device = model::Device::kCpu;
  // kCuda:
  int64_t gpu_memory = model::kAllGpuMemory;  // bound on the bytes of its memory, weights included
  int64_t new_tokens =
      4096;  // room for what is prompted and generated; sized at start; 1 .. 1048576
};

// The method of a zone that the decoder holds; null where the store chooses.
const SelectorConfig* SelectorOf(const RetrievalConfig& config);

// InvalidArgument names field and bound; also what does not go together with the retrieval.
absl::Status ValidateDeviceConfig(const DeviceConfig& device, const RetrievalConfig& config);

// Of options that go to no zone.
absl::Status ValidateNoBanks(const BankConfig& bank);

absl::Status ValidateRetrievalConfig(const RetrievalConfig& config, int32_t layers);

// Whether a decoder needs the context's rows, or what prefill left beside them, in this host's
// memory: always on the CPU; on the GPU for methods that are calibrated by them.
bool NeedsHostRows(const RetrievalConfig& config, const DeviceConfig& device);
// Whether it takes them where they can be had: also a zone in host memory, and the summaries of the
// estimation term.
bool TakesHostRows(const RetrievalConfig& config, const DeviceConfig& device);

// Rows per layer with the same total: uniform, or rising linearly from top_k / 2 in the first
// sparse layer to 3/2 top_k in the last (docs/methods.md, layer budgets), or more
// where the entropy of a layer's attention is low (in proportion to exp(-entropy / 4)). Dense
// layers get kAllRows, and so does any layer whose share covers the zone. Under kFidelity a layer's
// number is that of the KV head that gets most.
std::vector<int64_t> LayerBudgets(const RetrievalConfig& config, int32_t layers, int64_t zone_rows);

// kFidelity: of one KV head of a layer that is not dense.
inline int64_t HeadBudget(const RetrievalConfig& config, Layer layer, KvHead head,
                          int32_t kv_heads) {
  return config.head_rows[static_cast<size_t>(layer.value() * kv_heads + head.value())];
}

// Whether attention has the estimation term.
bool Estimates(const RetrievalConfig& config, bool has_summaries);

absl::StatusOr<kernels::RowMap> ParseRowMap(absl::string_view name);
absl::StatusOr<Prefetch> ParsePrefetch(absl::string_view name);
absl::StatusOr<Want> ParseWant(absl::string_view name);
absl::StatusOr<Estimate> ParseEstimate(absl::string_view name);
absl::StatusOr<Budget> ParseBudget(absl::string_view name);
absl::StatusOr<int64_t> ParseTopK(absl::string_view text);  // "all" or a number >= 1
// "top-k:K", "top-k:all", "range:B" or "mass:P": sets select and its number.
absl::Status ParseSelect(absl::string_view text, RetrievalConfig& config);

}  // namespace carrel::decoder
