// What: the flags that say which store a command means.
#pragma once

#include "library/store_access.h"

namespace CLI {
class App;
}

namespace carrel::tools {

struct StoreFlags : library::StoreAddress {
  void Declare(CLI::App& command);
  // --server alone, and what it takes.
  void DeclareServer(CLI::App& command);
};

}  // namespace carrel::tools
