// What: a method's own options in a SelectorConfig, which holds whatever its method put there.
#pragma once

#include <any>

#include "decoder/select/selector_config.h"

namespace carrel::decoder {

// The method's defaults where the config says nothing.
template <typename Options>
Options OptionsOf(const SelectorConfig& config) {
  const auto* const given = std::any_cast<Options>(&config.options);
  return given == nullptr ? Options() : *given;
}

}  // namespace carrel::decoder
