// What:   the flags of prefill and synth that say which index is built.
// Errors: InvalidArgument an unknown kind; what else is wrong is told when the index is built.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "kvstore/index/index.h"

namespace CLI {
class App;
}

namespace carrel::tools {

struct IndexFlags {
  std::string kind = "flat";
  kvstore::IndexParams params;  // but the kind

  void Declare(CLI::App& command);
  absl::StatusOr<kvstore::IndexParams> Resolve() const;
};

}  // namespace carrel::tools
