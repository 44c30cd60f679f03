#include "tools/carrel/retrieval_flags.h"

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/status.h"
#include "decoder/fidelity.h"
#include "decoder/lab_options.h"
#include "tools/carrel/lab.h"

namespace carrel::tools {

void DeclareContentId(CLI::App& command, std::string& content_id) {
  command.add_option("--content-id", content_id,
                     "refuse a context that holds anything else (ls --json, inspect)");
}

void RetrievalFlags::DeclareModel(CLI::App& command) {
  command
      .add_option("--model", model_dir,
                  "Hugging Face folder or GGUF file that computed the context")
      ->required();
  DeclareAdapter(command, adapter_dir);
}

void RetrievalFlags::Declare(CLI::App& command, bool context_required) {
  DeclareModel(command);
  DeclareMissingBytes(command, missing_bytes);
  DeclareContext(command, context_required);
}

void RetrievalFlags::DeclareWeights(CLI::App& command) {
  command.add_option("--weights", weights,
                     "same as computed the context | derived: also made from those");
}

void RetrievalFlags::DeclareContext(CLI::App& command, bool context_required) {
  DeclareWeights(command);
  CLI::Option& context_option = *command.add_option(
      "--context", context,
      context_required ? "its name" : "its name; without one the model sees the prompt alone");
  if (context_required) context_option.required();
  DeclareContentId(command, config.content_id);
  store.DeclareSeveral(command);
  command.add_option("--retry-for", retry_for,
                     "--server: how long one that is gone is waited for; 0: not at all");
  command.add_option("--request-timeout", request_timeout,
                     "--server: how long the answer to a request may take");
  DeclareRetrieval(command);
  command.add_option("--max-tokens", max_tokens, "of the answer, at most");
  sampling.Declare(command);
}

void RetrievalFlags::DeclareRetrieval(CLI::App& command) {
  CLI::Option& fidelity_option =
      *command.add_option("--fidelity", fidelity,
                          "how near to dense attention: fast | balanced (the default) | faithful");
  CLI::Option& error_option =
      *command
           .add_option("--target-error", target_error,
                       "the same as a number: relative error of attention outputs")
           ->excludes(&fidelity_option);
  command.add_option("--top-k", top_k, "instead: rows attended per KV head and token, or all")
      ->excludes(&fidelity_option)
      ->excludes(&error_option);
  DeclareDevice(command, device, device_config.gpu_memory);
  command.add_option("--zone", zone,
                     "who searches: auto (the fastest) | store | host (here) | device");
  command.add_option("--plan", plan,
                     "zone=auto, fixed: store[-dense] | host[-dense] | device[-dense]");
  command.add_option("--threads", threads, "0: one per core");
  DeclareSelectionLab(command);
  DeclareZoneLab(command);
}

void RetrievalFlags::DeclareSelectionLab(CLI::App& command) {
  command
      .add_option("--select", select,
                  "instead: top-k:K | range:B (rows with scores within B of the best) | mass:P "
                  "(the best rows with a share P of the softmax)")
      ->excludes(command.get_option("--fidelity"))
      ->excludes(command.get_option("--target-error"))
      ->excludes(command.get_option("--top-k"));
  command
      .add_option("--max-rows", max_rows,
                  "range, mass: bound on the rows per KV head; 0: the store's")
      ->default_str("");
  command.add_option(
      "--estimate", estimate,
      "rows that are not selected count through summaries of their clusters: on | off "
      "| auto (where the context has summaries and want is attend)");
  command.add_option("--prompt-rows", prompt_rows,
                     "what tokens of a prompt attend to: chosen (as the answer's do) | all | auto "
                     "(all where a GPU holds "
                     "the rows)");
  command.add_option("--dense-layers", dense_layers,
                     "the first layers attend to every row; by default 2 with --top-k and "
                     "--select, else 0");
  command.add_option("--sink", config.sink, "first rows of the context held by the decoder");
  command.add_option("--local", config.local, "last rows of the context held by the decoder");
  command.add_option("--budget", budget,
                     "top-k per layer, same total: uniform | linear (rising) | measured (more "
                     "where the attention that prefill sampled is peaked)");
  command.add_option("--prefetch", prefetch,
                     "off | speculative (ask ahead with predicted queries) | verified (again where "
                     "they are too far off)");
  command.add_option("--oversample", config.oversample,
                     "candidates asked ahead, as a multiple of top-k");
  command.add_option(
      "--want", want,
      "what travels: rows (K and V) | values (scores and V) | attend (partial attention)");
  command
      .add_option("--row-cache", config.row_cache_bytes,
                  "want=rows: memory for rows that the store sent before, as bytes or 500MB: they "
                  "need not travel again; 0: none are kept")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true));
  command.add_option("--effort,--ef-search", config.effort,
                     "how much an index does for recall: beam width, lists probed or rows scored "
                     "exactly; 0: the context's own");
  MoveToLab(command, {"select", "max-rows", "estimate", "prompt-rows", "dense-layers", "sink",
                      "local", "budget", "prefetch", "oversample", "want", "row-cache", "effort"});
}

void RetrievalFlags::DeclareZoneLab(CLI::App& command) {
  command.add_option("--gpu-new-tokens", device_config.new_tokens,
                     "cuda: room on the GPU for what is prompted and generated");
  command
      .add_option(
          "--bank-bytes", bank.bytes,
          "zone=host, device=cuda: GPU memory for the rows used last, as bytes or 500MB; 0: "
          "rows are read where they lie")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true));
  command.add_option(
      "--bank-map", bank_map,
      "how a bank finds a row: vector (fast, 4 bytes per row of the zone) | hash (bytes "
      "by the bank's size)");
  command.add_option("--bank-ahead", bank.ahead,
                     "prefetch=speculative: rows fetched ahead, as a multiple of those attended");
  command.add_option(
      "--method,--refine", method,
      "zone=host and device: how rows are chosen: exact (the default; hash with zone=host and "
      "device=cuda) | hip | "
      "infinitehip | hash | channels; on a CPU also pages | landmarks; with parameters "
      "as NAME:key=value,key=value (docs/methods.md)");
  command.add_option(
      "--rope", rope,
      "where keys stand: trained (where the document has them) | infinitehip (zone=host, on a "
      "GPU also device: at positions within the trained length, on a context of prefill "
      "--key-position none)");
  command.add_flag("--beyond-trained", config.beyond_trained,
                   "rope=trained: go beyond the length that the model was trained for");
  MoveToLab(command, {"gpu-new-tokens", "bank-bytes", "bank-map", "bank-ahead", "method", "rope",
                      "beyond-trained"});
}

// One of the four says which rows; without any it is fidelity, as far as the context knows.
absl::Status RetrievalFlags::ResolveSelect() {
  const int given =
      fidelity.has_value() + target_error.has_value() + top_k.has_value() + select.has_value();
  if (given > 1) {
    return absl::InvalidArgumentError(
        "fidelity, target-error, top-k and select each say which rows are attended: give one");
  }
  bool bounded = max_rows == 0;
  if (select.has_value() || top_k.has_value()) {
    absl::StatusOr<select::Selection> selection =
        select.has_value() ? decoder::ParseSelection(*select) : decoder::ParseTopK(*top_k);
    RETURN_IF_ERROR(selection.status());
    if (int64_t* const bound = select::MaxRows(*selection)) {
      *bound = max_rows;
      bounded = true;
    }
    config.selection = *std::move(selection);
  } else {
    ASSIGN_OR_RETURN(const decoder::Fidelity named,
                     decoder::ParseFidelity(fidelity.value_or("balanced")));
    decoder::FidelityOptions options{target_error.value_or(decoder::TargetError(named))};
    if (given == 0) options.or_top_k = decoder::kUsualTopK;
    config.selection = options;
  }
  if (bounded) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "max_rows=", max_rows, " bounds range and mass, in [0, infinity); top-k is its own bound"));
}

absl::Status RetrievalFlags::Resolve() {
  RETURN_IF_ERROR(ResolveFor(!context.empty()));
  if (!context.empty()) return store.Validate();
  if (store.folder.empty() && store.server.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError("--store or --server without --context: name the context");
}

// What is said of a store's searches, or of a method, is said of one zone: nothing is left to plan.
absl::Status RetrievalFlags::ResolvePlan(bool has_context) {
  planned = false;
  if (plan != "auto") {
    if (zone != "auto") {
      return absl::InvalidArgumentError(
          absl::StrCat("--plan ", plan, " with --zone ", zone,
                       ": each says where rows are attended to: give one"));
    }
    if (!has_context) {
      return absl::InvalidArgumentError(
          absl::StrCat("--plan ", plan, " without --context: there is no zone"));
    }
    ASSIGN_OR_RETURN(way, decoder::ParseWay(plan));
  }
  if (zone != "auto") return absl::OkStatus();
  const decoder::RetrievalConfig usual;
  const bool of_a_store = want != "attend" || prefetch != "off" || budget != "uniform" ||
                          config.row_cache_bytes != 0 || config.effort != 0 || select.has_value() ||
                          estimate != "auto" || prompt_rows == "all" || dense_layers.has_value() ||
                          rope != "trained" || config.oversample != usual.oversample;
  zone = "store";
  if (!of_a_store) {
    planned = has_context;
    return absl::OkStatus();
  }
  if (plan == "auto") return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "--plan ", plan, " with --lab: what these say is of one zone: give --zone instead"));
}

absl::Status RetrievalFlags::ResolveZone(bool has_context) {
  RETURN_IF_ERROR(ResolvePlan(has_context));
  ASSIGN_OR_RETURN(config.zone, decoder::ParseZone(zone));
  const bool plain = std::holds_alternative<decoder::PlainZoneOptions>(config.zone);
  if (plain && !method.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("method=", method, " needs --zone host or device: the store has its indexes"));
  }
  ASSIGN_OR_RETURN(bank.map, decoder::ParseRowMap(bank_map));
  if (zone != "host") RETURN_IF_ERROR(decoder::ValidateNoBanks(bank));
  if (plain) return absl::OkStatus();
  const bool cuda = device_config.device == model::Device::kCuda;
  if (zone == "device" && !cuda) return absl::InvalidArgumentError("zone=device needs device=cuda");
  if (zone == "host" && !cuda && !store.server.empty()) {
    return absl::InvalidArgumentError(
        "--zone host maps the rows of a folder of this host: give --store instead of --server");
  }
  if (!has_context) {
    return absl::InvalidArgumentError(
        absl::StrCat("--zone ", zone, " without --context: there is no zone"));
  }
  decoder::SelectorConfig selector = decoder::UsualSelector(zone == "host" && cuda);
  if (!method.empty()) {
    ASSIGN_OR_RETURN(selector, decoder::ParseSelector(method));
  }
  if (cuda && !store.server.empty() && decoder::SelectorNeedsHostRows(selector)) {
    return absl::InvalidArgumentError(
        absl::StrCat("method=", method, " is calibrated by what prefill left in the store's ",
                     "folder: give --store instead of --server"));
  }
  if (zone == "host") {
    config.zone = decoder::HostZoneOptions{selector, bank};
  } else {
    config.zone = decoder::DeviceZoneOptions{selector};
  }
  return absl::OkStatus();
}

absl::Status RetrievalFlags::ResolveFor(bool has_context) {
  RETURN_IF_ERROR(ResolveSelect());
  if (weights != "same" && weights != "derived") {
    return absl::InvalidArgumentError(
        absl::StrCat("weights=", weights, " is none of same, derived"));
  }
  if (weights == "derived" && !has_context) {
    return absl::InvalidArgumentError("weights=derived needs --context: it is of its rows");
  }
  ASSIGN_OR_RETURN(config.estimate, decoder::ParseEstimate(estimate));
  ASSIGN_OR_RETURN(config.prompt_rows, decoder::ParsePromptRows(prompt_rows));
  ASSIGN_OR_RETURN(device_config.device, model::ParseDevice(device));
  RETURN_IF_ERROR(ResolveZone(has_context));
  ASSIGN_OR_RETURN(config.rope, model::ParseRope(rope));
  // With positions given by attention all of a long context would share few of them.
  auto* const by_fidelity = std::get_if<decoder::FidelityOptions>(&config.selection);
  const bool none = config.rope == model::Rope::kInfiniteHip || by_fidelity != nullptr;
  const int32_t usual = decoder::RetrievalConfig().dense_layers;
  config.dense_layers = dense_layers.value_or(none ? 0 : usual);
  if (by_fidelity != nullptr) {
    by_fidelity->or_dense_layers =
        dense_layers.value_or(config.rope == model::Rope::kInfiniteHip ? 0 : usual);
  }
  ASSIGN_OR_RETURN(config.budget, decoder::ParseBudget(budget));
  ASSIGN_OR_RETURN(config.prefetch, decoder::ParsePrefetch(prefetch));
  ASSIGN_OR_RETURN(config.want, decoder::ParseWant(want));
  RETURN_IF_ERROR(decoder::ValidateLabOptions(config));
  ASSIGN_OR_RETURN(threads, ResolveThreads(threads));
  return absl::OkStatus();
}

void DeclareAdapter(CLI::App& command, std::string& adapter_dir) {
  command.add_option("--adapter", adapter_dir, "folder of a LoRA adapter (PEFT) for the model");
}

void DeclareMissingBytes(CLI::App& command, std::string& missing_bytes) {
  command
      .add_option("--missing-bytes", missing_bytes,
                  "bytes that the tokenizer has no token for: refuse | drop")
      ->check(CLI::IsMember({"refuse", "drop"}));
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
    absl::FPrintF(stderr, "%s: left out %d bytes without a token, the first 0x%02x at offset %d\n",
                  what, dropped.bytes, dropped.first_byte, dropped.first_offset);
  }
  return ids;
}

absl::StatusOr<model::Seam> EncodePrompt(const RetrievalFlags& flags, const std::string& what,
                                         serving::Engine& engine,
                                         const serving::OpenedContext& context,
                                         const std::string& text) {
  model::Seam prompt;
  RETURN_IF_ERROR(
      EncodeText(flags.missing_bytes, what,
                 [&](model::Tokenizer::Dropped* dropped) -> absl::StatusOr<std::vector<TokenId>> {
                   ASSIGN_OR_RETURN(prompt, engine.Encode({.text = text}, flags.context,
                                                          context.content_id, dropped));
                   return prompt.tokens;
                 })
          .status());
  return prompt;
}

void DeclareDevice(CLI::App& command, std::string& device, int64_t& gpu_memory) {
  command.add_option("--device", device, "what runs the model: cpu | cuda");
  command
      .add_option("--gpu-memory", gpu_memory, "bound on the GPU's memory: bytes or 20GB; 0: none")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true));
}

absl::StatusOr<std::shared_ptr<library::StoreAccess>> OpenStore(const RetrievalFlags& flags) {
  StoreFlags store = flags.store;
  if (!absl::ParseDuration(flags.retry_for, &store.retry_for) ||
      store.retry_for < absl::ZeroDuration() || store.retry_for > absl::Hours(24)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "retry-for=", flags.retry_for, " is no duration from 0 to 24h, such as 30s or 2m"));
  }
  if (!absl::ParseDuration(flags.request_timeout, &store.request_timeout) ||
      store.request_timeout < absl::Milliseconds(1) || store.request_timeout > absl::Hours(24)) {
    return absl::InvalidArgumentError(
        absl::StrCat("request-timeout=", flags.request_timeout,
                     " is no duration from 1ms to 24h, such as 30s or 2m"));
  }
  store.tell = [](const std::string& what) { absl::FPrintF(stderr, "carrel: %s\n", what); };
  return library::StoreAccess::Open(store, kvstore::StoreMode::kReadOnly);
}

absl::StatusOr<std::shared_ptr<library::LoadedModel>> LoadModel(const RetrievalFlags& flags) {
  return library::LoadedModel::Load(flags.model_dir, flags.adapter_dir, flags.threads);
}

library::DecoderSpec DecoderSpecOf(const RetrievalFlags& flags) {
  return {.folder = flags.store.folder,
          .derived_weights = flags.weights == "derived",
          .config = flags.config,
          .device = flags.device_config,
          .planned = flags.planned,
          .way = flags.way};
}

absl::StatusOr<std::unique_ptr<serving::Engine>> StartEngine(
    const RetrievalFlags& flags, std::shared_ptr<library::LoadedModel> model, int64_t answers) {
  std::shared_ptr<library::StoreAccess> store;
  if (!flags.context.empty()) {
    ASSIGN_OR_RETURN(store, OpenStore(flags));
  }
  return serving::Engine::Start({.scheduler = {.decoders = DecoderSpecOf(flags),
                                               .max_answers = answers,
                                               .max_open_contexts = 1}},
                                std::move(model), std::move(store));
}

absl::StatusOr<serving::OpenedContext> OpenContext(const RetrievalFlags& flags,
                                                   serving::Engine& engine, int64_t count) {
  ASSIGN_OR_RETURN(serving::OpenedContext context,
                   engine.Open(flags.context, flags.config.content_id, count));
  if (context.derived.has_value()) {
    absl::FPrintF(stderr, "%s\n", library::DescribeDerived(*context.derived));
  }
  return context;
}

void SamplingFlags::Declare(CLI::App& command) {
  command.add_option("--temperature", temperature,
                     "0: greedy; by default as the model advises, or greedy");
  command.add_option("--top-p", top_p,
                     "draw from the likeliest tokens of this mass; by default as advised");
  command.add_option("--seed", seed, "of the sampler; by default 0: the same answer every time");
}

absl::Status SamplingFlags::Check() const {
  decoder::SamplingConfig config;
  config.temperature = temperature.value_or(0);
  config.top_p = top_p.value_or(1);
  return decoder::ValidateSamplingConfig(config);
}

absl::StatusOr<decoder::SamplingConfig> SamplingFlags::Resolve(
    const model::GenerationDefaults& advice) const {
  decoder::SamplingConfig config;
  if (temperature != 0.0) config = decoder::AdvisedSampling(advice, {});
  config.temperature = temperature.value_or(config.temperature);
  config.top_p = top_p.value_or(config.top_p);
  config.seed = seed.value_or(0);
  RETURN_IF_ERROR(decoder::ValidateSamplingConfig(config));
  if (config.temperature == 0 && (top_p.has_value() || seed.has_value())) {
    return absl::InvalidArgumentError(
        absl::StrCat(top_p.has_value() ? "--top-p" : "--seed",
                     " changes nothing: the answer is greedy; give --temperature as well"));
  }
  return config;
}

std::string SamplingFlags::Tell(const model::GenerationDefaults& advice) const {
  if (advice.source.empty() || temperature == 0.0) return "";
  const absl::StatusOr<decoder::SamplingConfig> config = Resolve(advice);
  if (!config.ok() || (config->greedy() && advice.ignored.empty())) return "";
  return absl::StrCat(
      "sampling as ", advice.source, " advises: ", DescribeSampling(*config),
      advice.ignored.empty()
          ? ""
          : absl::StrCat(" (not done here: ", absl::StrJoin(advice.ignored, ", "), ")"),
      "; --temperature 0 is greedy");
}

std::string DescribeSampling(const decoder::SamplingConfig& config) {
  if (config.greedy()) return "greedy";
  std::string text = absl::StrCat("temperature ", config.temperature);
  if (config.top_p != 1) absl::StrAppend(&text, ", top_p ", config.top_p);
  if (config.top_k != 0) absl::StrAppend(&text, ", top_k ", config.top_k);
  if (config.min_p != 0) absl::StrAppend(&text, ", min_p ", config.min_p);
  if (config.repetition_penalty != 1) {
    absl::StrAppend(&text, ", repetition_penalty ", config.repetition_penalty);
  }
  return text;
}

}  // namespace carrel::tools
