// What:   the flags that ask and eval share: which model, which context, where the store is, and
//         how to retrieve.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "decoder/config.h"
#include "library/loaded_model.h"
#include "library/open_decoder.h"
#include "tools/carrel/sampling_flags.h"
#include "tools/carrel/store_flags.h"

namespace CLI {
class App;
}

namespace carrel::tools {

using library::OpenDecoder;
using library::ResolveThreads;

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

// A decoder of the model over the flags' context. turn_head: library::DecoderSpec's. open_seconds: what
// opening store and context took; may be null. store: the flags', if it is open already.
absl::StatusOr<std::unique_ptr<library::OpenDecoder>> MakeDecoder(
    const RetrievalFlags& flags, std::shared_ptr<library::LoadedModel> model,
    const std::string& turn_head, double* open_seconds = nullptr,
    std::shared_ptr<library::StoreAccess> store = nullptr);

// So many of them, of one store.
using OpenDecoders = std::vector<std::unique_ptr<library::OpenDecoder>>;
absl::StatusOr<OpenDecoders> MakeDecoders(const RetrievalFlags& flags,
                                          const std::shared_ptr<library::LoadedModel>& model,
                                          const std::string& turn_head, int64_t count);

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
// The same of a prompt of that decoder.
absl::StatusOr<model::Seam> EncodePrompt(const std::string& missing_bytes, const std::string& what,
                                         OpenDecoder& open, const std::string& text);

// --device and --gpu-memory.
void DeclareDevice(CLI::App& command, std::string& device, int64_t& gpu_memory);

}  // namespace carrel::tools
