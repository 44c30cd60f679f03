// What:   the flags that ask and eval share: which model, which context, where the store is, and
//         how to retrieve.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/thread_pool.h"
#include "decoder/config.h"
#include "decoder/decoder.h"
#include "model/checkpoint.h"
#include "tools/carrel/derived_weights.h"
#include "tools/carrel/store_access.h"

namespace CLI {
class App;
}

namespace carrel::tools {

struct RetrievalFlags {
  std::string model_dir;
  std::string adapter_dir;  // empty: none
  std::string weights = "same";
  std::string missing_bytes = "refuse";
  std::string context;
  StoreFlags store;
  std::string retry_for = "30s";
  std::optional<std::string> fidelity;  // none: balanced, where the context was measured
  std::optional<double> target_error;   // instead of fidelity
  std::optional<std::string> top_k;     // instead of fidelity
  std::optional<std::string> select;    // instead of fidelity
  std::string estimate = "auto";
  std::string budget = "uniform";
  std::string prefetch = "off";
  std::string want = "attend";
  std::string device = "cpu";
  std::string zone = "store";
  std::string bank_map = "vector";
  std::string refine;  // empty: exact for a zone in this host read by the CPU, hash for a GPU
  std::string rope = "trained";
  std::optional<int32_t> dense_layers;  // none: by rope
  int threads = 0;
  decoder::DeviceConfig device_config;
  decoder::RetrievalConfig config;  // the rest of the flags write here
  int64_t max_tokens = 64;
  decoder::SamplingConfig sampling;

  // context_required: otherwise a command may run the model alone, without a store.
  void Declare(CLI::App& command, bool context_required);
  absl::Status Resolve();  // texts into config

 private:
  absl::Status ResolveSelect();
};

// A decoder and what it needs to live.
class OpenDecoder {
 public:
  static absl::StatusOr<std::unique_ptr<OpenDecoder>> Create(const RetrievalFlags& flags);
  const model::Checkpoint& checkpoint() const { return checkpoint_; }
  decoder::Decoder& decoder() { return *decoder_; }
  // What becomes of an attempt at answers: `status`, unless the weights, or rows mapped here, changed
  // while it went on. DataLoss then (names the file): no answer of it counts.
  absl::Status Confirm(const absl::Status& status) const;
  // How rows are chosen here (decoder::DescribeRefine); empty where the store searches.
  const std::string& refine() const { return refine_; }
  // With --weights derived, where the weights are not the context's own.
  const std::optional<DerivedWeights>& derived() const { return derived_; }

 private:
  explicit OpenDecoder(int threads) : pool_(threads - 1) {}
  absl::Status AcceptDerived(const std::string& context);
  ThreadPool pool_;
  model::Checkpoint checkpoint_;
  std::unique_ptr<StoreAccess> store_;
  std::shared_ptr<const decoder::HostRows> rows_;  // null: none are mapped here
  std::unique_ptr<decoder::Decoder> decoder_;
  std::string refine_;
  std::optional<DerivedWeights> derived_;
};

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

// --device and --gpu-memory.
void DeclareDevice(CLI::App& command, std::string& device, int64_t& gpu_memory);

// threads as given, or one per core for 0; InvalidArgument outside [0, 1024].
absl::StatusOr<int> ResolveThreads(int threads);

}  // namespace carrel::tools
