// What:   the flags that choose and shape an index and summaries, shared by the commands that build
//         one.
#pragma once

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "kvstore/index/auto_index.h"
#include "kvstore/index/index.h"

namespace CLI {
class App;
}

namespace carrel::tools {

inline constexpr char kSummariesHelp[] =
    "rows per cluster of the summaries, by which rows that are not retrieved still count (40: 8 "
    "bytes per key at head_dim 128); 0: none";

struct IndexFlags {
  std::string kind = "flat", code_train = "off", code_scan = "asymmetric";
  kvstore::IndexParams params;
  kvstore::AutoIndexConfig automatic;
  std::optional<kvstore::AutoIndexConfig> auto_index;  // set by Resolve if kind is "auto"

  void Declare(CLI::App& command);
  absl::Status Resolve();
};

}  // namespace carrel::tools
