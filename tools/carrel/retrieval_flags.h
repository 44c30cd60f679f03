// What:   the flags that ask and eval share: which model, which context, where the store is, and
//         how to retrieve.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "decoder/config.h"
#include "decoder/sampler.h"
#include "library/loaded_model.h"
#include "library/store_access.h"
#include "model/generation_defaults.h"
#include "serving/engine.h"
#include "tools/carrel/store_flags.h"

namespace CLI {
class App;
}

namespace carrel::tools {

using library::ResolveThreads;

// How an answer's tokens are drawn: as the flags say; what they do not say, as the model's makers advise
// (model/generation_defaults.h); where they advise nothing, greedily. InvalidArgument a value outside its bound, and a
// flag that would change nothing (--top-p and --seed of a greedy answer).
struct SamplingFlags {
  std::optional<double> temperature, top_p;
  std::optional<uint64_t> seed;

  void Declare(CLI::App& command);
  absl::Status Check() const;  // of the values alone, before a model is loaded
  absl::StatusOr<decoder::SamplingConfig> Resolve(const model::GenerationDefaults& advice) const;
  // For people, when something that was not said is as the model advises: what, and how to have it otherwise.
  // Empty: nothing is.
  std::string Tell(const model::GenerationDefaults& advice) const;
};

// "temperature 0.7, top_p 0.8, top_k 20"; "greedy".
std::string DescribeSampling(const decoder::SamplingConfig& config);

struct RetrievalFlags {
  std::string model_dir;
  std::string adapter_dir;  // empty: none
  std::string weights = "same";
  std::string missing_bytes = "refuse";
  std::string context;
  StoreFlags store;
  std::string retry_for = "30s";
  std::string request_timeout = "2m";
  std::optional<std::string> fidelity;  // none: balanced, where the context was measured
  std::optional<double> target_error;   // instead of fidelity
  std::optional<std::string> top_k;     // instead of fidelity
  std::optional<std::string> select;    // instead of fidelity
  int64_t max_rows = 0;                 // of select
  std::string estimate = "auto";
  std::string prompt_rows = "auto";
  std::string budget = "uniform";
  std::string prefetch = "off";
  std::string want = "attend";
  std::string device = "cpu";
  std::string zone = "auto";
  std::string plan = "auto";
  bool planned = false;             // the way is chosen when the context is opened
  std::optional<decoder::Way> way;  // of --plan
  std::string bank_map = "vector";
  std::string method;  // empty: exact for a zone in this host read by the CPU, hash for a GPU
  std::string rope = "trained";
  std::optional<int32_t> dense_layers;  // none: by rope
  int threads = 0;
  decoder::DeviceConfig device_config;
  decoder::BankConfig bank;         // of a zone in host memory
  decoder::RetrievalConfig config;  // the rest of the flags write here
  int64_t max_tokens = 64;
  SamplingFlags sampling;

  // context_required: otherwise a command may run the model alone, without a store.
  void Declare(CLI::App& command, bool context_required);
  // Parts of it, for a command that asks many contexts: which model, and how rows are retrieved.
  void DeclareModel(CLI::App& command);
  void DeclareWeights(CLI::App& command);
  // Which context, how its rows are retrieved, and how an answer is drawn.
  void DeclareContext(CLI::App& command, bool context_required);
  void DeclareRetrieval(CLI::App& command);
  absl::Status Resolve();  // texts into config
  // Without a look at which context and store.
  absl::Status ResolveFor(bool has_context);

 private:
  void DeclareSelectionLab(CLI::App& command);
  void DeclareZoneLab(CLI::App& command);
  absl::Status ResolveSelect();
  absl::Status ResolvePlan(bool has_context);
  absl::Status ResolveZone(bool has_context);
};

// The store of the flags.
absl::StatusOr<std::shared_ptr<library::StoreAccess>> OpenStore(const RetrievalFlags& flags);

absl::StatusOr<std::shared_ptr<library::LoadedModel>> LoadModel(const RetrievalFlags& flags);

// How contexts are opened and attended to, as the flags say.
library::DecoderSpec DecoderSpecOf(const RetrievalFlags& flags);

// Of the flags' store, if they name a context, and a model: so many answers at a time, of one context.
absl::StatusOr<std::unique_ptr<serving::Engine>> StartEngine(
    const RetrievalFlags& flags, std::shared_ptr<library::LoadedModel> model, int64_t answers);

// The flags' context, open in so many decoders; what is special about it is told on standard error.
absl::StatusOr<serving::OpenedContext> OpenContext(const RetrievalFlags& flags,
                                                   serving::Engine& engine, int64_t count);

// --content-id.
void DeclareContentId(CLI::App& command, std::string& content_id);

// --adapter.
void DeclareAdapter(CLI::App& command, std::string& adapter_dir);

// --missing-bytes.
void DeclareMissingBytes(CLI::App& command, std::string& missing_bytes);

// The ids of a text by `encode`, under --missing-bytes; what was dropped is told on standard error.
absl::StatusOr<std::vector<TokenId>> EncodeText(
    const std::string& missing_bytes, const std::string& what,
    const std::function<absl::StatusOr<std::vector<TokenId>>(model::Tokenizer::Dropped*)>& encode);
// The same of a prompt behind the flags' context, as it is open.
absl::StatusOr<model::Seam> EncodePrompt(const RetrievalFlags& flags, const std::string& what,
                                         serving::Engine& engine,
                                         const serving::OpenedContext& context,
                                         const std::string& text);

// --device and --gpu-memory.
void DeclareDevice(CLI::App& command, std::string& device, int64_t& gpu_memory);

}  // namespace carrel::tools
