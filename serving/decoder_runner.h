// What:   the runner of a loaded model and its store: slots are decoders (library/open_decoder.h), and a step is
//         decoder::Generation's: steps are batch-invariant, whoever joins or leaves.
// Errors: as runner.h.
// Threads: as runner.h.   Ownership: keeps model and store.
#pragma once

#include <memory>

#include "library/loaded_model.h"
#include "library/open_decoder.h"
#include "library/store_access.h"
#include "serving/runner.h"

namespace carrel::serving {

// decoders: how each is opened; its context is the caller's of Open, and so is config.content_id.
// store: null: there are no contexts.
std::unique_ptr<Runner> MakeDecoderRunner(library::DecoderSpec decoders,
                                          std::shared_ptr<library::LoadedModel> model,
                                          std::shared_ptr<library::StoreAccess> store);

}  // namespace carrel::serving
