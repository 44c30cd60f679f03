#include "library/loaded_model.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "common/usable_cores.h"

namespace carrel::library {

absl::StatusOr<int> ResolveThreads(int threads) {
  if (threads < 0 || threads > 1024) {
    return absl::InvalidArgumentError(absl::StrCat("threads=", threads, " is outside [0, 1024]"));
  }
  return threads > 0 ? threads : UsableCores();
}

absl::StatusOr<std::shared_ptr<LoadedModel>> LoadedModel::Load(const std::string& path,
                                                               const std::string& adapter,
                                                               int threads) {
  ASSIGN_OR_RETURN(const int count, ResolveThreads(threads));
  std::shared_ptr<LoadedModel> loaded(new LoadedModel(count));
  loaded->path_ = path;
  const model::DigestCache cache(model::DigestCache::DefaultFolder());
  ASSIGN_OR_RETURN(loaded->checkpoint_,
                   model::LoadCheckpoint(path, &loaded->pool_, adapter, &cache));
  return loaded;
}

std::shared_ptr<LoadedModel> LoadedModel::Of(model::Checkpoint checkpoint, int threads) {
  std::shared_ptr<LoadedModel> loaded(new LoadedModel(threads));
  loaded->checkpoint_ = std::move(checkpoint);
  return loaded;
}

void LoadedModel::DropMissingBytes() {
  if (checkpoint_.tokenizer == nullptr) return;
  std::const_pointer_cast<model::Tokenizer>(checkpoint_.tokenizer)->DropMissingBytes();
}

}  // namespace carrel::library
