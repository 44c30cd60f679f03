// What:   random keys, and comparing them without telling by time how much of one was right.
// Threads: any.
#pragma once

#include <cstddef>
#include <string>

#include "absl/strings/string_view.h"

namespace carrel {

// From the system's generator, fit for keys.
std::string RandomBytes(size_t bytes);

// Takes as long whatever the bytes are; the sizes are no secret.
bool EqualSecrets(absl::string_view a, absl::string_view b);

}  // namespace carrel
