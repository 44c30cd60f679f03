// What: the flags that say which store a command means.
#pragma once

#include <string>
#include <vector>

#include "library/store_access.h"

namespace CLI {
class App;
}

namespace carrel::tools {

struct StoreFlags : library::StoreAddress {
  void Declare(CLI::App& command);
  // The same, and --server may be given several times.
  void DeclareSeveral(CLI::App& command);
  // --server alone, and what it takes.
  void DeclareServer(CLI::App& command);

  std::vector<std::string> given_servers;  // into server and other_servers

 private:
  void DeclareLogin(CLI::App& command);
};

}  // namespace carrel::tools
