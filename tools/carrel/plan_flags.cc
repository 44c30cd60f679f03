#include "tools/carrel/plan_flags.h"

#include <CLI/CLI.hpp>
#include <utility>

#include "common/status.h"
#include "decoder/fidelity.h"
#include "library/open_decoder.h"
#include "model/device.h"
#include "tools/carrel/retrieval_flags.h"

namespace carrel::tools {

void PlanFlags::Declare(CLI::App& command) {
  command.add_option("--model", model,
                     "Hugging Face folder or GGUF file that computed the context");
  DeclareDevice(command, device, gpu_memory);
  command.add_option("--fidelity", fidelity, "fast | balanced | faithful");
  command.add_option("--threads", threads, "0: one per core");
}

absl::StatusOr<decoder::Plan> PlanOf(const PlanFlags& flags, const StoreFlags& store,
                                     const std::string& context,
                                     std::shared_ptr<library::LoadedModel> loaded) {
  if (flags.model.empty()) {
    return absl::InvalidArgumentError(
        "--plan: a plan is of a model on a device: give --model, and --device where it is not the "
        "CPU");
  }
  library::DecoderSpec spec;
  spec.context = context;
  spec.folder = store.folder;
  spec.planned = true;
  ASSIGN_OR_RETURN(const decoder::Fidelity fidelity, decoder::ParseFidelity(flags.fidelity));
  decoder::FidelityOptions options{decoder::TargetError(fidelity)};
  options.or_top_k = decoder::kUsualTopK;
  spec.config.selection = options;
  spec.config.dense_layers = 0;
  ASSIGN_OR_RETURN(spec.device.device, model::ParseDevice(flags.device));
  spec.device.gpu_memory = flags.gpu_memory;
  if (loaded == nullptr) {
    ASSIGN_OR_RETURN(loaded, library::LoadedModel::Load(flags.model, "", flags.threads));
  }
  ASSIGN_OR_RETURN(std::shared_ptr<library::StoreAccess> access,
                   library::StoreAccess::Open(store, kvstore::StoreMode::kReadOnly));
  ASSIGN_OR_RETURN(
      const std::unique_ptr<library::OpenDecoder> open,
      library::OpenDecoder::Create(std::move(spec), std::move(loaded), std::move(access)));
  return *open->decoder().plan();
}

}  // namespace carrel::tools
