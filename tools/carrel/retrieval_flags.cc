#include "tools/carrel/retrieval_flags.h"

#include <CLI/CLI.hpp>
#include <thread>

#include "common/status.h"

namespace carrel::tools {

void RetrievalFlags::Declare(CLI::App& command, bool context_required) {
  command.add_option("--model", model_dir, "folder of the Hugging Face checkpoint that computed the context")->required();
  CLI::Option& context_option = *command.add_option(
      "--context", context, context_required ? "name of the context" : "name of the context; without one the model sees the prompt alone");
  if (context_required) context_option.required();
  store.Declare(command);
  CLI::Option& top_k_option = *command.add_option("--top-k", top_k, "rows attended per KV head and token, or \"all\"")->capture_default_str();
  command.add_option("--select", select, "which rows: top-k:K | range:B (scores within B of the best) | mass:P (the best rows with a share P of the softmax)")
      ->excludes(&top_k_option);
  command.add_option("--max-rows", config.max_rows, "range, mass: bound on the rows per KV head; 0: the store's");
  command.add_option("--estimate", estimate, "rows that are not selected count through summaries of their clusters: on | off | auto (where the context has summaries and want is attend)")->capture_default_str();
  command.add_option("--dense-layers", config.dense_layers, "the first layers attend to every row")->capture_default_str();
  command.add_option("--sink", config.sink, "first rows of the context held by the decoder")->capture_default_str();
  command.add_option("--local", config.local, "last rows of the context held by the decoder")->capture_default_str();
  command.add_option("--budget", budget, "top-k per layer, same total: uniform | linear (rising)")->capture_default_str();
  command.add_option("--prefetch", prefetch, "off | speculative (ask ahead with approximate queries) | verified (again where they are too far off)")
      ->capture_default_str();
  command.add_option("--oversample", config.oversample, "candidates asked ahead, as a multiple of top-k")->capture_default_str();
  command.add_option("--want", want, "what travels: rows (K and V) | values (scores and V) | attend (partial attention)")->capture_default_str();
  command.add_option("--effort,--ef-search", config.effort, "how much an index does for recall: beam width, lists probed or rows scored exactly; 0: the context's own")->capture_default_str();
  command.add_option("--threads", threads, "threads of the model; 0: one per core")->capture_default_str();
  command.add_option("--max-tokens", max_tokens, "generate at most so many tokens")->capture_default_str();
  command.add_option("--temperature", sampling.temperature, "0: greedy")->capture_default_str();
  command.add_option("--top-p", sampling.top_p, "draw from the smallest set of tokens that carries this probability")->capture_default_str();
  command.add_option("--seed", sampling.seed, "of the sampler")->capture_default_str();
}

absl::Status RetrievalFlags::Resolve() {
  ASSIGN_OR_RETURN(config.top_k, decoder::ParseTopK(top_k));
  if (!select.empty()) RETURN_IF_ERROR(decoder::ParseSelect(select, config));
  ASSIGN_OR_RETURN(config.estimate, decoder::ParseEstimate(estimate));
  ASSIGN_OR_RETURN(config.budget, decoder::ParseBudget(budget));
  ASSIGN_OR_RETURN(config.prefetch, decoder::ParsePrefetch(prefetch));
  ASSIGN_OR_RETURN(config.want, decoder::ParseWant(want));
  ASSIGN_OR_RETURN(threads, ResolveThreads(threads));
  if (!context.empty()) return store.Validate();
  if (store.folder.empty() && store.server.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError("--store or --server without --context: name the context");
}

absl::StatusOr<int> ResolveThreads(int threads) {
  if (threads < 0 || threads > 1024) {
    return absl::InvalidArgumentError(absl::StrCat("threads=", threads, " is outside [0, 1024]"));
  }
  return threads > 0 ? threads : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

absl::StatusOr<std::unique_ptr<OpenDecoder>> OpenDecoder::Create(const RetrievalFlags& flags) {
  std::unique_ptr<OpenDecoder> open(new OpenDecoder(flags.threads));
  ASSIGN_OR_RETURN(open->checkpoint_, model::LoadCheckpoint(flags.model_dir, &open->pool_));
  if (flags.context.empty()) {
    ASSIGN_OR_RETURN(open->decoder_, decoder::Decoder::OpenModelOnly(open->checkpoint_, &open->pool_));
    return open;
  }
  ASSIGN_OR_RETURN(open->store_, StoreAccess::Open(flags.store, kvstore::StoreMode::kReadOnly));
  ASSIGN_OR_RETURN(std::unique_ptr<decoder::StoreClient> client, open->store_->NewClient());
  ASSIGN_OR_RETURN(open->decoder_, decoder::Decoder::Open(open->checkpoint_, std::move(client), flags.context, flags.config, &open->pool_));
  return open;
}

}  // namespace carrel::tools
