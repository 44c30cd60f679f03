// What:   of which model and device a context is planned for (inspect --plan, doctor).
// Errors: PlanOf: those of opening a decoder; InvalidArgument no --model.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "decoder/plan/plan.h"
#include "library/loaded_model.h"
#include "tools/carrel/store_flags.h"

namespace CLI {
class App;
}

namespace carrel::tools {

struct PlanFlags {
  std::string model;
  std::string device = "cpu";
  std::string fidelity = "balanced";
  int64_t gpu_memory = 0;
  int threads = 0;

  void Declare(CLI::App& command);
};

// That of a decoder which is opened over the context as `ask` opens it. loaded: the model, if it is; null: it is loaded.
absl::StatusOr<decoder::Plan> PlanOf(const PlanFlags& flags, const StoreFlags& store,
                                     const std::string& context,
                                     std::shared_ptr<library::LoadedModel> loaded = nullptr);

}  // namespace carrel::tools
