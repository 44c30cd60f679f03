// What: --help with one line per flag: its default, not its variable in the environment, nor what it
//       excludes (an error says that).
#pragma once

#include <memory>

namespace CLI {
class Formatter;
}

namespace carrel::tools {

std::shared_ptr<CLI::Formatter> MakeHelpFormat();

}  // namespace carrel::tools
