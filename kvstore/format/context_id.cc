#include "kvstore/format/context_id.h"

#include <unistd.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/status.h"
#include "kvstore/format/big_endian.h"

namespace carrel::kvstore {
namespace {

constexpr uint64_t kFirstBit = uint64_t{1} << 63;
constexpr int kTimeShift = 16;  // 47 bits of milliseconds above 16 random ones

}  // namespace

ContextId ContextId::Random() {
  ContextId id;
  CARREL_CHECK(getentropy(&id.high_, sizeof(id.high_)) == 0);
  CARREL_CHECK(getentropy(&id.low_, sizeof(id.low_)) == 0);
  const auto now = static_cast<uint64_t>(absl::ToUnixMillis(absl::Now()));
  id.high_ = kFirstBit | (now << kTimeShift & ~kFirstBit) | id.high_ >> (64 - kTimeShift);
  return id;
}

std::optional<ContextId> ContextId::FromBytes(absl::string_view bytes) {
  if (bytes.size() != 8 && bytes.size() != 16) return std::nullopt;
  ContextId id(LoadBigEndian(bytes.substr(bytes.size() - 8)));
  if (bytes.size() == 16) id.high_ = LoadBigEndian(bytes.substr(0, 8));
  const bool first_bit = static_cast<uint8_t>(bytes[0]) >= 0x80;
  if (first_bit != (bytes.size() == 16)) return std::nullopt;
  return id;
}

std::string ContextId::Bytes() const {
  std::string bytes;
  if (!is_number()) AppendBigEndian(bytes, high_, 8);
  AppendBigEndian(bytes, low_, 8);
  return bytes;
}

std::string ContextId::ToString() const {
  return is_number() ? absl::StrCat(low_) : absl::BytesToHexString(Bytes());
}

}  // namespace carrel::kvstore
