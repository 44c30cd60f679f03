// What:   the runner of a loaded model and its store: slots are decoders (library/open_decoder.h), and a step is
//         decoder::Generation's: steps are batch-invariant, whoever joins or leaves.
// Errors: as runner.h.
// Threads: as runner.h.   Ownership: keeps model and store.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "decoder/config.h"
#include "decoder/plan/way.h"
#include "library/loaded_model.h"
#include "library/store_access.h"
#include "serving/runner.h"

namespace carrel::serving {

struct RunnerConfig {
  decoder::RetrievalConfig retrieval;
  decoder::DeviceConfig device;
  bool derived_weights = false;  // as library/open_decoder.h
  std::string folder;            // of an embedded store, for zones in this host's memory
  bool planned = false;          // likewise, with `way`
  std::optional<decoder::Way> way;
  std::string turn_head;  // as library/open_decoder.h
};

// store: null: there are no contexts.
std::unique_ptr<Runner> MakeDecoderRunner(const RunnerConfig& config,
                                          std::shared_ptr<library::LoadedModel> model,
                                          std::shared_ptr<library::StoreAccess> store);

}  // namespace carrel::serving
