// What: where tests find the files that they read. Tests only.
#pragma once

#include <string>

namespace carrel {

// The repository: $CARREL_SOURCE, else the folder that this program was built from. A program that
// runs on another machine than it was built on needs the variable.
std::string SourceFolder();

// Larger documents and reference outputs: $CARREL_SHARED, else shared beside the repository; empty if
// there is no such folder.
std::string SharedFolder();

}  // namespace carrel
