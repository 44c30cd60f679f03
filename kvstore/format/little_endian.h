// What:   fixed-width little-endian numbers at unaligned addresses.
#pragma once

#include <bit>
#include <cstring>
#include <string>
#include <type_traits>

namespace carrel::kvstore {

static_assert(std::endian::native == std::endian::little,
              "rows are mapped as they lie on disk, which is little-endian");

template <typename T>
void AppendLittleEndian(std::string& out, T value) {
  static_assert(std::is_arithmetic_v<T>);
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

template <typename T>
T LoadLittleEndian(const void* at) {
  static_assert(std::is_arithmetic_v<T>);
  T value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

}  // namespace carrel::kvstore
