// What:   which context a key, a file or a manifest is of.
// Bytes:  16, drawn at random when a document is prefilled; the first bit is set. So what belongs
//         to a context is told from all else, in this store and in any other. Contexts of format
//         versions 1 and 2 have a number instead, below 2^63, that their store gave out and that
//         says nothing outside of it: 8 bytes. The first bit keeps the two apart.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"

namespace carrel::kvstore {

class ContextId {
 public:
  constexpr ContextId() = default;  // number 0: of no context
  // Of format versions 1 and 2.
  constexpr explicit ContextId(uint64_t number) : low_(number) {}
  // A new one: the time, then 80 bits from the operating system's source of randomness. What is new
  // comes behind what is there, so that publishing never reads old files, which may be damaged.
  static ContextId Random();
  // nullopt: neither 16 bytes with the first bit set nor 8 without it.
  static std::optional<ContextId> FromBytes(absl::string_view bytes);

  bool is_number() const { return high_ == 0; }
  uint64_t number() const { return low_; }  // if it is one
  std::string Bytes() const;     // 16, or 8 of a number; big-endian: bytes order as ids do
  std::string ToString() const;  // 32 hexadecimal digits, or the number

  constexpr auto operator<=>(const ContextId&) const = default;
  friend std::ostream& operator<<(std::ostream& os, const ContextId& id) {
    return os << id.ToString();
  }
  template <typename H>
  friend H AbslHashValue(H h, const ContextId& id) {
    return H::combine(std::move(h), id.high_, id.low_);
  }

 private:
  uint64_t high_ = 0;  // 0 of a number, else at least 2^63
  uint64_t low_ = 0;
};

}  // namespace carrel::kvstore
