// What: the version of this library, and which of its surfaces may change (docs/stability.md).
#pragma once

#include "carrel/export.h"

#define CARREL_VERSION_MAJOR 0
#define CARREL_VERSION_MINOR 2
#define CARREL_VERSION_PATCH 0

namespace carrel {
inline namespace api {

// Of the library that runs, "MAJOR.MINOR.PATCH"; the macros are those of the headers.
CARREL_API const char* Version();

}  // namespace api
}  // namespace carrel
