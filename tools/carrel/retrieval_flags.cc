#include "tools/carrel/retrieval_flags.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <thread>

#include "carrel/v1/context.pb.h"
#include "common/status.h"
#include "decoder/fidelity.h"
#include "kvstore/service/context_client.h"
#include "tools/carrel/mapped_rows.h"

namespace carrel::tools {

void DeclareContentId(CLI::App& command, std::string& content_id) {
  command.add_option("--content-id", content_id,
                     "refuse a context that holds anything else: its content id as ls --json and "
                     "inspect show it, or the first 12 digits or more");
}

void RetrievalFlags::Declare(CLI::App& command, bool context_required) {
  command
      .add_option("--model", model_dir,
                  "folder of the Hugging Face checkpoint, or the GGUF file, that computed the "
                  "context")
      ->required();
  DeclareAdapter(command, adapter_dir);
  command
      .add_option("--weights", weights,
                  "same: those that computed the context | derived: also others that can be shown "
                  "to be made from them, as a quantised file of the same checkpoint")
      ->capture_default_str();
  DeclareMissingBytes(command, missing_bytes);
  CLI::Option& context_option = *command.add_option(
      "--context", context,
      context_required ? "name of the context"
                       : "name of the context; without one the model sees the prompt alone");
  if (context_required) context_option.required();
  DeclareContentId(command, config.content_id);
  store.Declare(command);
  command
      .add_option(
          "--retry-for", retry_for,
          "with --server: how long a server that is gone is waited for; the answer then goes "
          "on where it was; 0: not at all")
      ->capture_default_str();
  CLI::Option& fidelity_option = *command.add_option(
      "--fidelity", fidelity,
      "how near to dense attention: fast | balanced | faithful; each KV head gets the rows that "
      "reach it by what prefill measured (default: balanced; 128 rows and two dense layers where "
      "the context was not measured)");
  CLI::Option& error_option =
      *command
           .add_option("--target-error", target_error,
                       "the same as a number: the mean error of attention outputs, as a share of "
                       "theirs, that is aimed at")
           ->excludes(&fidelity_option);
  CLI::Option& top_k_option =
      *command
           .add_option("--top-k", top_k,
                       "instead: so many rows attended per KV head and token, or \"all\"")
           ->excludes(&fidelity_option)
           ->excludes(&error_option);
  command
      .add_option("--select", select,
                  "instead: top-k:K | range:B (rows with scores within B of the best) | mass:P "
                  "(the best rows with a share P of the softmax)")
      ->excludes(&fidelity_option)
      ->excludes(&error_option)
      ->excludes(&top_k_option);
  command.add_option("--max-rows", config.max_rows,
                     "range, mass: bound on the rows per KV head; 0: the store's");
  command
      .add_option("--estimate", estimate,
                  "rows that are not selected count through summaries of their clusters: on | off "
                  "| auto (where the context has summaries and want is attend)")
      ->capture_default_str();
  command.add_option("--dense-layers", dense_layers,
                     "the first layers attend to every row; by default 2 with --top-k and "
                     "--select, else 0");
  command.add_option("--sink", config.sink, "first rows of the context held by the decoder")
      ->capture_default_str();
  command.add_option("--local", config.local, "last rows of the context held by the decoder")
      ->capture_default_str();
  command
      .add_option("--budget", budget,
                  "top-k per layer, same total: uniform | linear (rising) | measured (more "
                  "where the attention that prefill sampled is peaked)")
      ->capture_default_str();
  command
      .add_option("--prefetch", prefetch,
                  "off | speculative (ask ahead with approximate queries) | verified (again where "
                  "they are too far off)")
      ->capture_default_str();
  command
      .add_option("--oversample", config.oversample,
                  "candidates asked ahead, as a multiple of top-k")
      ->capture_default_str();
  command
      .add_option(
          "--want", want,
          "what travels: rows (K and V) | values (scores and V) | attend (partial attention)")
      ->capture_default_str();
  command
      .add_option("--row-cache", config.row_cache_bytes,
                  "want=rows: memory for rows that the store sent before, as bytes or 500MB: they "
                  "need not travel again; 0: none are kept")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true))
      ->capture_default_str();
  command
      .add_option("--effort,--ef-search", config.effort,
                  "how much an index does for recall: beam width, lists probed or rows scored "
                  "exactly; 0: the context's own")
      ->capture_default_str();
  DeclareDevice(command, device, device_config.gpu_memory);
  command
      .add_option("--gpu-new-tokens", device_config.new_tokens,
                  "cuda: room on the GPU for what is prompted and generated")
      ->capture_default_str();
  command
      .add_option("--zone", zone,
                  "store: the kvstore searches | host: rows of --store are mapped here, or with "
                  "--device cuda lie in this host's pinned memory | device: rows are copied to the "
                  "GPU at open; of both --refine chooses")
      ->capture_default_str();
  command
      .add_option(
          "--bank-bytes", device_config.bank.bytes,
          "zone=host, device=cuda: GPU memory for the rows used last, as bytes or 500MB; 0: "
          "rows are read where they lie")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true))
      ->capture_default_str();
  command
      .add_option(
          "--bank-map", bank_map,
          "how a bank finds a row: vector (fast, 4 bytes per row of the zone) | hash (bytes "
          "by the bank's size)")
      ->capture_default_str();
  command
      .add_option("--bank-ahead", device_config.bank.ahead,
                  "prefetch=speculative: rows fetched ahead, as a multiple of those attended")
      ->capture_default_str();
  command.add_option("--refine", refine,
                     "zone=host and device: exact (the default) | hip | infinitehip | "
                     "hash | channels, with parameters as NAME:key=value,key=value "
                     "(docs/methods.md)");
  command
      .add_option(
          "--rope", rope,
          "where keys stand: trained (where the document has them) | infinitehip (zone=host: "
          "at positions within the trained length, on a context of prefill --key-position "
          "none)")
      ->capture_default_str();
  command.add_flag("--beyond-trained", config.beyond_trained,
                   "rope=trained: go beyond the length that the model was trained for");
  command.add_option("--threads", threads, "threads of the model; 0: one per core")
      ->capture_default_str();
  command.add_option("--max-tokens", max_tokens, "generate at most so many tokens")
      ->capture_default_str();
  command.add_option("--temperature", sampling.temperature, "0: greedy")->capture_default_str();
  command
      .add_option("--top-p", sampling.top_p,
                  "draw from the smallest set of tokens that carries this probability")
      ->capture_default_str();
  command.add_option("--seed", sampling.seed, "of the sampler")->capture_default_str();
}

// One of the four says which rows; without any it is fidelity, as far as the context knows.
absl::Status RetrievalFlags::ResolveSelect() {
  const int given =
      fidelity.has_value() + target_error.has_value() + top_k.has_value() + select.has_value();
  if (given > 1) {
    return absl::InvalidArgumentError(
        "fidelity, target-error, top-k and select each say which rows are attended: give one");
  }
  if (select.has_value()) return decoder::ParseSelect(*select, config);
  if (top_k.has_value()) {
    ASSIGN_OR_RETURN(config.top_k, decoder::ParseTopK(*top_k));
    return absl::OkStatus();
  }
  config.select = decoder::Select::kFidelity;
  config.or_top_k = given == 0;
  ASSIGN_OR_RETURN(const decoder::Fidelity named,
                   decoder::ParseFidelity(fidelity.value_or("balanced")));
  config.target_error = target_error.value_or(decoder::TargetError(named));
  return absl::OkStatus();
}

absl::Status RetrievalFlags::Resolve() {
  RETURN_IF_ERROR(ResolveSelect());
  if (weights != "same" && weights != "derived") {
    return absl::InvalidArgumentError(
        absl::StrCat("weights=", weights, " is none of same, derived"));
  }
  if (weights == "derived" && context.empty()) {
    return absl::InvalidArgumentError("weights=derived needs --context: it is of its rows");
  }
  ASSIGN_OR_RETURN(config.estimate, decoder::ParseEstimate(estimate));
  ASSIGN_OR_RETURN(device_config.device, model::ParseDevice(device));
  if (zone != "store" && zone != "host" && zone != "device") {
    return absl::InvalidArgumentError(
        absl::StrCat("zone=", zone, " is none of store, host, device"));
  }
  if (zone == "store" && !refine.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("refine=", refine, " needs --zone host or device: the store has its indexes"));
  }
  ASSIGN_OR_RETURN(device_config.bank.map, decoder::ParseRowMap(bank_map));
  device_config.zone_in_host = zone == "host" && device_config.device == model::Device::kCuda;
  if (zone == "host" && !device_config.zone_in_host) {
    if (!store.server.empty())
      return absl::InvalidArgumentError(
          "--zone host maps the rows of a folder of this host: give --store instead of --server");
    if (context.empty())
      return absl::InvalidArgumentError("--zone host without --context: there is no zone");
    ASSIGN_OR_RETURN(config.refine, decoder::ParseRefine(refine.empty() ? "exact" : refine));
  }
  ASSIGN_OR_RETURN(config.rope, model::ParseRope(rope));
  // With positions given by attention all of a long context would share few of them.
  const bool none =
      config.rope == model::Rope::kInfiniteHip || config.select == decoder::Select::kFidelity;
  const int32_t usual = decoder::RetrievalConfig().dense_layers;
  config.dense_layers = dense_layers.value_or(none ? 0 : usual);
  config.or_dense_layers =
      dense_layers.value_or(config.rope == model::Rope::kInfiniteHip ? 0 : usual);
  device_config.zone_on_device = zone == "device";
  if (zone == "device" || device_config.zone_in_host) {
    if (context.empty() && device_config.device == model::Device::kCuda)
      return absl::InvalidArgumentError(
          absl::StrCat("--zone ", zone, " without --context: there is no zone"));
    ASSIGN_OR_RETURN(config.refine, decoder::ParseRefine(refine.empty() ? "exact" : refine));
    if (!store.server.empty() && decoder::RefineNeedsHostRows(*config.refine)) {
      return absl::InvalidArgumentError(
          absl::StrCat("refine=", refine, " is calibrated by what prefill left in the store's ",
                       "folder: give --store instead of --server"));
    }
  }
  ASSIGN_OR_RETURN(config.budget, decoder::ParseBudget(budget));
  ASSIGN_OR_RETURN(config.prefetch, decoder::ParsePrefetch(prefetch));
  ASSIGN_OR_RETURN(config.want, decoder::ParseWant(want));
  ASSIGN_OR_RETURN(threads, ResolveThreads(threads));
  if (!context.empty()) return store.Validate();
  if (store.folder.empty() && store.server.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError("--store or --server without --context: name the context");
}

void DeclareAdapter(CLI::App& command, std::string& adapter_dir) {
  command.add_option("--adapter", adapter_dir,
                     "folder of a LoRA adapter in PEFT's form for the model; a config.json in it "
                     "replaces the model's rope and trained length");
}

void DeclareMissingBytes(CLI::App& command, std::string& missing_bytes) {
  command
      .add_option("--missing-bytes", missing_bytes,
                  "bytes of a text that the tokenizer has no token for: refuse (names the first) | "
                  "drop (as Hugging Face tokenizers do; says how many)")
      ->capture_default_str();
}

absl::StatusOr<std::vector<TokenId>> EncodeText(
    const std::string& missing_bytes, const std::string& what,
    const std::function<absl::StatusOr<std::vector<TokenId>>(model::Tokenizer::Dropped*)>& encode) {
  if (missing_bytes != "refuse" && missing_bytes != "drop") {
    return absl::InvalidArgumentError(
        absl::StrCat("missing-bytes=", missing_bytes, " is none of refuse, drop"));
  }
  if (missing_bytes == "refuse") return encode(nullptr);
  model::Tokenizer::Dropped dropped;
  absl::StatusOr<std::vector<TokenId>> ids = encode(&dropped);
  if (ids.ok() && dropped.bytes > 0) {
    std::fprintf(stderr,
                 "%s: left out %lld bytes without a token, the first 0x%02x at offset %lld\n",
                 what.c_str(), static_cast<long long>(dropped.bytes), dropped.first_byte,
                 static_cast<long long>(dropped.first_offset));
  }
  return ids;
}

void DeclareDevice(CLI::App& command, std::string& device, int64_t& gpu_memory) {
  command.add_option("--device", device, "what runs the model: cpu | cuda")->capture_default_str();
  command
      .add_option(
          "--gpu-memory", gpu_memory,
          "bound on the GPU's memory, in bytes or as 20GB; refused if it does not do; 0: none")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true))
      ->capture_default_str();
}

absl::StatusOr<int> ResolveThreads(int threads) {
  if (threads < 0 || threads > 1024) {
    return absl::InvalidArgumentError(absl::StrCat("threads=", threads, " is outside [0, 1024]"));
  }
  return threads > 0 ? threads
                     : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

namespace {

// What auto means for this context and zone. Codes are read where the context's folder is.
absl::StatusOr<decoder::RetrievalConfig> WithResolvedRefine(const RetrievalFlags& flags) {
  decoder::RetrievalConfig config = flags.config;
  if (!config.refine.has_value()) return config;
  decoder::RefineConfig& refine = *config.refine;
  if (!flags.device_config.zone_on_device) {
    refine = decoder::WithOversample(refine,
                                     flags.device_config.zone_in_host ? 1 : decoder::kOversample);
  }
  if (refine.kind == decoder::RefineKind::kHash &&
      refine.hash.source == decoder::HashSource::kAuto) {
    bool stored = false;
    if (!flags.store.folder.empty()) {
      ASSIGN_OR_RETURN(stored, HasStoredCodes(flags.store.folder, flags.context));
    }
    refine.hash.source = stored ? decoder::HashSource::kStored : decoder::HashSource::kRandom;
  }
  return config;
}

}  // namespace

absl::Status OpenDecoder::AcceptDerived(const std::string& context) {
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::ContextClient> client,
                   store_->NewContextClient());
  ASSIGN_OR_RETURN(const v1::Manifest manifest, client->Get(context));
  ASSIGN_OR_RETURN(derived_, AcceptDerivedWeights(manifest, checkpoint_));
  if (derived_.has_value()) std::fprintf(stderr, "%s\n", DescribeDerived(*derived_).c_str());
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<OpenDecoder>> OpenDecoder::Create(const RetrievalFlags& flags) {
  std::unique_ptr<OpenDecoder> open(new OpenDecoder(flags.threads));
  const model::DigestCache cache(model::DigestCache::DefaultFolder());
  ASSIGN_OR_RETURN(open->checkpoint_,
                   model::LoadCheckpoint(flags.model_dir, &open->pool_, flags.adapter_dir, &cache));
  if (flags.context.empty()) {
    ASSIGN_OR_RETURN(open->decoder_, decoder::Decoder::OpenModelOnly(
                                         open->checkpoint_, &open->pool_, flags.device_config));
    return open;
  }
  StoreFlags store = flags.store;
  if (!absl::ParseDuration(flags.retry_for, &store.retry_for) ||
      store.retry_for < absl::ZeroDuration() || store.retry_for > absl::Hours(24)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "retry-for=", flags.retry_for, " is no duration from 0 to 24h, such as 30s or 2m"));
  }
  ASSIGN_OR_RETURN(open->store_, StoreAccess::Open(store, kvstore::StoreMode::kReadOnly));
  if (flags.weights == "derived") RETURN_IF_ERROR(open->AcceptDerived(flags.context));
  ASSIGN_OR_RETURN(const decoder::RetrievalConfig config, WithResolvedRefine(flags));
  if (config.refine.has_value()) open->refine_ = decoder::DescribeRefine(*config.refine);
  // A GPU fetches the rows of its zone from a server if their folder is not here.
  if (decoder::NeedsHostRows(config, flags.device_config) ||
      (decoder::TakesHostRows(config, flags.device_config) && !flags.store.folder.empty())) {
    ASSIGN_OR_RETURN(open->rows_, MapContextRows(flags.store.folder, flags.context, &open->pool_));
  }
  ASSIGN_OR_RETURN(std::unique_ptr<decoder::StoreClient> client, open->store_->NewClient());
  absl::StatusOr<std::unique_ptr<decoder::Decoder>> made =
      decoder::Decoder::Open(open->checkpoint_, std::move(client), flags.context, config,
                             &open->pool_, flags.device_config, open->rows_);
  if (!made.ok()) return open->Confirm(made.status());
  open->decoder_ = *std::move(made);
  return open;
}

absl::Status OpenDecoder::Confirm(const absl::Status& status) const {
  RETURN_IF_ERROR(checkpoint_.CheckUnchanged());
  if (rows_ != nullptr) RETURN_IF_ERROR(rows_->CheckUnchanged());
  return status;
}

}  // namespace carrel::tools
