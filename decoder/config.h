// What:   how a decoder retrieves: every choice of one sequence's attention, and its validation.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "common/selection.h"
#include "decoder/select/selector_config.h"
#include "kernels/rows/row_bank/row_bank.h"
#include "model/device.h"
#include "model/rope_mode.h"
#include "retrieval/query.h"

namespace carrel::decoder {

enum class Prefetch : uint8_t { kOff = 0, kSpeculative = 1, kVerified = 2 };
using retrieval::Want;  // kIds: of what is asked beside attention alone
enum class Budget : uint8_t { kUniform = 0, kLinear = 1, kMeasured = 2 };

// Of each KV head as many rows as reach a fidelity on what prefill measured (fidelity.h).
struct FidelityOptions {
  double target_error = 0;  // > 0
  // A context that was not measured: this top_k, at most its tokens, with so many dense layers. Empty: it
  // is refused.
  std::optional<int64_t> or_top_k = {};
  int32_t or_dense_layers = 2;
};
// Which rows of the zone each KV head attends to for a token, in layers that are not dense. A top_k is at
// most the context's tokens.
using SelectionOptions = std::variant<select::Selection, FidelityOptions>;

inline constexpr int64_t kUsualTopK = 128;

// The estimation term: rows that are not selected count through summaries of their clusters. kAuto:
// where want=attend and the context has summaries; with a selector on a GPU, where they are in this host.
enum class Estimate : uint8_t { kAuto = 0, kOn = 1, kOff = 2 };

// What tokens of a prompt attend to: what is chosen for each, as generated tokens do, or every row of the zone, which
// a block reads once. kAuto: all where a GPU holds the rows.
enum class PromptRows : uint8_t { kAuto = 0, kChosen = 1, kAll = 2 };

using model::Rope;  // kInfiniteHip: repositioned_attention.h

// The GPU's banks of rows, for a zone in this host's memory.
struct BankConfig {
  int64_t bytes = 0;  // of device memory for all banks, their page tables included; 0: no banks,
                      // rows are read where they lie
  kernels::RowMap map = kernels::RowMap::kVector;  // the fastest; kHash where 4 bytes per row of
                                                   // the zone, layer and KV head are too many
  double ahead = 1;  // with prefetch=speculative, rows fetched ahead, as a multiple of those
                     // attended; 1 .. 8
};

// Where the zone lives, and what chooses its rows: one of zones.def, such as the store, by the context's
// index; or the decoder, by a method, among rows in this host's memory or on the GPU, where the store is
// read once, at open.
enum class ZoneKind : uint8_t {
#define CARREL_ZONE(Name, name) k##Name,
#define CARREL_GPU_ZONE CARREL_ZONE
#include "decoder/zone/zones.def"
#undef CARREL_ZONE
#undef CARREL_GPU_ZONE
};
struct PlainZoneOptions {
  ZoneKind kind = ZoneKind::kStore;
};
struct HostZoneOptions {
  SelectorConfig selector;
  BankConfig bank = {};  // with a GPU
};
struct DeviceZoneOptions {
  SelectorConfig selector;
};
using ZoneOptions = std::variant<PlainZoneOptions, HostZoneOptions, DeviceZoneOptions>;

struct PlanOptions;  // plan/plan.h

struct RetrievalConfig {
  // What the context must hold: its content id (Manifest), or the first 12 digits or more; empty:
  // anything.
  std::string content_id;
  SelectionOptions selection = select::TopK{kUsualTopK};
  Estimate estimate = Estimate::kAuto;
  PromptRows prompt_rows =
      PromptRows::kAuto;     // kAll: where this decoder has the rows, on the CPU or a GPU's memory
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
  // The zone, and whether all rows are attended, is chosen by cost when the context is opened; null: they are as the
  // other fields say.
  std::shared_ptr<const PlanOptions> plan;
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

// Whether a zone in this host's memory is a session's that looks at every row (Query::scan): on the CPU, where
// the method is exact.
bool ScansHere(const RetrievalConfig& config, const DeviceConfig& device);

// Whether a decoder needs the context's rows, or what prefill left beside them, in this host's
// memory: on the CPU unless ScansHere; on the GPU for methods that are calibrated by them.
bool NeedsHostRows(const RetrievalConfig& config, const DeviceConfig& device);
// Whether it takes them where they can be had: also a zone in host memory, and the summaries of the
// estimation term.
bool TakesHostRows(const RetrievalConfig& config, const DeviceConfig& device);

// Of the context's last rows a sequence may give up so many (GenerateOptions::give_up), since the decoder
// holds them: at most kMostGivenUp; none with rope=infinitehip on a GPU.
inline constexpr int64_t kMostGivenUp = 32;
int64_t MostGivenUp(const RetrievalConfig& config, const DeviceConfig& device,
                    int64_t context_tokens);

// [layers], of what selects by number, range or mass: with a top_k as many rows in all, uniform, or rising
// linearly from top_k / 2 in the first sparse layer to 3/2 top_k in the last (docs/methods.md, layer
// budgets), or more where the entropy of a layer's attention is low (in proportion to exp(-entropy / 4)).
// Dense layers get all rows, and so does any layer whose share covers the zone.
std::vector<select::Selection> LayerSelections(const RetrievalConfig& config, int32_t layers,
                                               int64_t zone_rows);
// [layers], of what a fidelity needs of each KV head: head_rows [layers, kv_heads].
std::vector<select::Selection> LayerSelections(const RetrievalConfig& config,
                                               absl::Span<const int64_t> head_rows,
                                               const AttentionShape& shape, int64_t zone_rows);
// The same as numbers of rows per KV head, for what a method takes: kAllRows, or a top_k.
std::vector<int64_t> Budgets(const std::vector<select::Selection>& selections);
// [layers, kv_heads], where KV heads of some layer take different numbers: 0 where a layer says none;
// otherwise empty.
std::vector<int64_t> HeadBudgets(const std::vector<select::Selection>& selections,
                                 int32_t kv_heads);

// Whether tokens of a prompt attend to every row of the zone.
bool PromptTakesAll(const RetrievalConfig& config, const DeviceConfig& device);

// Whether attention has the estimation term.
bool Estimates(const RetrievalConfig& config, bool has_summaries);

absl::StatusOr<kernels::RowMap> ParseRowMap(absl::string_view name);
// "host" and "device" without their options; a name of zones.def.
absl::StatusOr<ZoneOptions> ParseZone(absl::string_view name);
absl::StatusOr<Prefetch> ParsePrefetch(absl::string_view name);
absl::StatusOr<Want> ParseWant(absl::string_view name);
absl::StatusOr<Estimate> ParseEstimate(absl::string_view name);
absl::StatusOr<PromptRows> ParsePromptRows(absl::string_view name);
absl::StatusOr<Budget> ParseBudget(absl::string_view name);
absl::StatusOr<select::Selection> ParseTopK(absl::string_view text);  // "all" or a number >= 1
// "top-k:K", "top-k:all", "range:B" or "mass:P".
absl::StatusOr<select::Selection> ParseSelection(absl::string_view text);

}  // namespace carrel::decoder
