#include "carrel/prefill.h"

#include "carrel/v1/context.pb.h"
#include "common/progress.h"
#include "common/status.h"
#include "kvstore/format/context_name.h"
#include "kvstore/service/context_client.h"
#include "kvstore/storage/store.h"
#include "kvstore/storage/unfinished.h"
#include "library/handles.h"
#include "library/move_context.h"
#include "library/status.h"
#include "prefill/prefill.h"

namespace carrel {
namespace library {
namespace {

absl::StatusOr<prefill::PrefillConfig> ConfigOf(const std::string& name,
                                                const PrefillOptions& options) {
  prefill::PrefillConfig config;
  config.name = name;
  if (options.index == "auto") {
    config.auto_index = kvstore::AutoIndexConfig();
  } else {
    ASSIGN_OR_RETURN(config.index.kind, kvstore::ParseIndexKind(options.index));
  }
  config.device = options.device == Device::kCuda ? model::Device::kCuda : model::Device::kCpu;
  if (options.gpu_memory > 0) config.gpu_memory = options.gpu_memory;
  config.restart = options.restart;
  config.wanted = options.wanted;
  if (options.probe.has_value()) config.probe.emplace(options.probe->begin(), options.probe->end());
  return config;
}

absl::StatusOr<PrefillReport> RunHere(prefill::PrefillConfig config, LoadedModel& model,
                                      const std::vector<TokenId>& tokens, kvstore::Store& store,
                                      const std::string& folder, carrel::Progress& progress) {
  config.store_folder = folder;
  ASSIGN_OR_RETURN(
      const prefill::PrefillReport made,
      prefill::RunPrefill(config, model.checkpoint(), tokens, store, model.pool(), progress));
  ASSIGN_OR_RETURN(const v1::Manifest manifest, store.GetManifest(config.name));
  return PrefillReport{Describe(manifest), made.seconds, made.resumed_layers};
}

// Made in a folder of this host, then moved.
absl::StatusOr<PrefillReport> RunInto(const prefill::PrefillConfig& config, LoadedModel& model,
                                      const std::vector<TokenId>& tokens, StoreAccess& served,
                                      const std::string& staging, carrel::Progress& progress) {
  if (staging.empty()) {
    return absl::InvalidArgumentError(
        "prefill into a server needs options.staging: the folder where the context is made");
  }
  ASSIGN_OR_RETURN(const auto client, served.NewContextClient());
  RETURN_IF_ERROR(CheckNameIsFreeAt(*client, config.name, ""));
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Store> store,
                   kvstore::Store::Open(staging, kvstore::StoreMode::kReadWrite));
  PrefillReport report;
  if (const auto there = store->GetManifest(config.name); there.ok()) {
    return absl::AlreadyExistsError(absl::StrCat("the staging folder ", staging,
                                                 " has a context \"", config.name,
                                                 "\" already: carrel export and import move it"));
  }
  ASSIGN_OR_RETURN(report, RunHere(config, model, tokens, *store, staging, progress));
  RETURN_IF_ERROR(MoveContext(*store, config.name, *client, progress).status());
  return report;
}

}  // namespace
}  // namespace library

inline namespace api {

Result<PrefillReport> Prefill(Model& model, std::span<const Token> document, Store& store,
                              const std::string& name, const PrefillOptions& options) {
  const auto run = [&]() -> absl::StatusOr<PrefillReport> {
    ASSIGN_OR_RETURN(const prefill::PrefillConfig config, library::ConfigOf(name, options));
    library::LoadedModel& loaded = *library::ModelHandle::Of(model).loaded();
    const library::StoreHandle& handle = library::StoreHandle::Of(store);
    const std::vector<TokenId> tokens(document.begin(), document.end());
    carrel::Progress progress(options.progress);
    if (kvstore::Store* const here = handle.access()->store(); here != nullptr) {
      return library::RunHere(config, loaded, tokens, *here, handle.address().folder, progress);
    }
    return library::RunInto(config, loaded, tokens, *handle.access(), options.staging, progress);
  };
  return library::ToPublic(run());
}

Status DiscardPrefill(Store& store, const std::string& name) {
  const auto discard = [&]() -> absl::Status {
    RETURN_IF_ERROR(kvstore::ValidateContextName(name));
    const library::StoreHandle& handle = library::StoreHandle::Of(store);
    if (handle.access()->store() == nullptr) {
      return absl::InvalidArgumentError("DiscardPrefill needs a store opened by its folder");
    }
    const absl::Status removed = kvstore::RemoveUnfinished(handle.address().folder, name);
    return absl::IsNotFound(removed) ? absl::OkStatus() : removed;
  };
  return library::ToPublic(discard());
}

Result<std::vector<UnfinishedPrefill>> ListUnfinished(Store& store) {
  const auto list = [&]() -> absl::StatusOr<std::vector<UnfinishedPrefill>> {
    ASSIGN_OR_RETURN(const auto client,
                     library::StoreHandle::Of(store).access()->NewContextClient());
    ASSIGN_OR_RETURN(const v1::ListResponse listed, client->List());
    std::vector<UnfinishedPrefill> unfinished;
    for (const auto& one : listed.unfinished()) {
      unfinished.push_back({one.name(), one.bytes(), one.touched_unix_s(), one.running()});
    }
    return unfinished;
  };
  return library::ToPublic(list());
}

}  // namespace api
}  // namespace carrel
