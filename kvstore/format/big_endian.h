// What: unsigned integers as bytes whose order is that of the numbers: for keys.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace carrel::kvstore {

inline void AppendBigEndian(std::string& out, uint64_t value, int bytes) {
  for (int i = bytes - 1; i >= 0; --i) out.push_back(static_cast<char>(value >> (8 * i)));
}

inline uint64_t LoadBigEndian(absl::string_view bytes) {
  uint64_t value = 0;
  for (const char c : bytes) value = value << 8 | static_cast<uint8_t>(c);
  return value;
}

}  // namespace carrel::kvstore
