#include "kvstore/engine/layer_loader.h"

#include <algorithm>

#include "common/thrown.h"
#include "kvstore/engine/resident_budget.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {
namespace {

// Reading a layer in order takes as long as reading a sixth to a tenth of it in random pages.
constexpr int64_t kLoadShare = 8;

}  // namespace

LayerLoader::LayerLoader(const ResidentBudget* budget)
    : budget_(budget), thread_([this] { Run(); }) {}

LayerLoader::~LayerLoader() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  thread_.join();
}

void LayerLoader::Touch(const std::shared_ptr<const StoredContext>& stored, Layer layer) {
  const auto used = [&] {
    const int64_t asked = stored->LayerBytesAsked(layer.value());
    return asked > 0 && asked >= stored->LayerBytes(layer.value()) / kLoadShare;
  };
  if (!used()) return;
  absl::MutexLock lock(&mu_);
  const bool known = std::any_of(wanted_.begin(), wanted_.end(), [&](const Wanted& wanted) {
    return wanted.stored == stored && wanted.layer == layer;
  });
  // Asked again: it may have been loaded, and forgotten, since.
  if (!known && used()) wanted_.push_back({stored, layer});
}

int64_t LayerLoader::loads() const {
  absl::MutexLock lock(&mu_);
  return loads_;
}

void LayerLoader::Run() {
  absl::MutexLock lock(&mu_);
  const auto busy = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return stopping_ || !wanted_.empty();
  };
  for (;;) {
    mu_.Await(absl::Condition(&busy));
    if (stopping_) return;
    const Wanted next = wanted_.front();
    mu_.Unlock();
    bool load = false;
    CatchThrown("loading a layer", [&] {
      const int64_t bytes = next.stored->LayerBytes(next.layer.value());
      load = budget_->HasRoom(bytes);
      if (load) next.stored->Load(next.layer.value(), stopping_);
      return absl::OkStatus();
    }).IgnoreError();
    mu_.Lock();
    wanted_.pop_front();
    loads_ += load ? 1 : 0;
  }
}

}  // namespace carrel::kvstore
