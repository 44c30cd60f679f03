// Typed reads of GGUF metadata; see gguf.h.
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "absl/strings/escaping.h"
#include "common/status.h"
#include "model/gguf.h"

namespace carrel::model {
namespace {

template <typename T>
T Read(absl::string_view bytes) {
  T value;
  std::memcpy(&value, bytes.data(), sizeof(T));
  return value;
}

// A number of an integer type at the front of `bytes`; nothing for other types, and for what
// leaves int64.
std::optional<int64_t> ReadInt(GgufValueType type, absl::string_view bytes) {
  switch (type) {
    case GgufValueType::kU8:
      return Read<uint8_t>(bytes);
    case GgufValueType::kI8:
      return Read<int8_t>(bytes);
    case GgufValueType::kU16:
      return Read<uint16_t>(bytes);
    case GgufValueType::kI16:
      return Read<int16_t>(bytes);
    case GgufValueType::kU32:
      return Read<uint32_t>(bytes);
    case GgufValueType::kI32:
      return Read<int32_t>(bytes);
    case GgufValueType::kI64:
      return Read<int64_t>(bytes);
    case GgufValueType::kU64: {
      const uint64_t value = Read<uint64_t>(bytes);
      if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
      return static_cast<int64_t>(value);
    }
    case GgufValueType::kF32:
    case GgufValueType::kBool:
    case GgufValueType::kString:
    case GgufValueType::kArray:
    case GgufValueType::kF64:
      break;
  }
  return std::nullopt;
}

// The decimal number that a float was rounded from, if it had few digits.
double Decimal(float x) {
  if (!std::isfinite(x)) return x;
  char digits[64];
  const auto written = std::to_chars(digits, digits + sizeof(digits), x);
  double value = x;
  (void)std::from_chars(digits, written.ptr, value);
  return value;
}

std::string ValueText(const GgufValue& value) {
  const std::optional<int64_t> integer = ReadInt(value.type, value.bytes);
  if (integer) return absl::StrCat(*integer);
  switch (value.type) {
    case GgufValueType::kF32:
      return absl::StrCat(Decimal(Read<float>(value.bytes)));
    case GgufValueType::kF64:
      return absl::StrCat(Read<double>(value.bytes));
    case GgufValueType::kBool:
      return value.bytes[0] == 0 ? "false" : "true";
    case GgufValueType::kString:
      return absl::StrCat("\"", absl::CHexEscape(value.bytes.substr(0, 100)), "\"");
    case GgufValueType::kArray:
      return absl::StrCat("array of ", value.count);
    default:
      return absl::StrCat(Read<uint64_t>(value.bytes));
  }
}

}  // namespace

const GgufValue* GgufMetadata::Find(absl::string_view key) const {
  const auto it = values_.find(key);
  return it == values_.end() ? nullptr : &it->second;
}

std::string GgufMetadata::Describe(absl::string_view key, absl::string_view what) const {
  const GgufValue* value = Find(key);
  return absl::StrCat(where_, ": ", key, value == nullptr ? "" : "=",
                      value == nullptr ? "" : ValueText(*value), " ", what);
}

absl::Status GgufMetadata::Invalid(absl::string_view key, absl::string_view what) const {
  return absl::InvalidArgumentError(Describe(key, what));
}

absl::Status GgufMetadata::Unsupported(absl::string_view key, absl::string_view what) const {
  return absl::UnimplementedError(Describe(key, what));
}

absl::StatusOr<int64_t> GgufMetadata::Int(absl::string_view key, int64_t min, int64_t max) const {
  const GgufValue* value = Find(key);
  if (value == nullptr) return Invalid(key, "is missing");
  const std::optional<int64_t> integer = ReadInt(value->type, value->bytes);
  if (!integer || *integer < min || *integer > max) {
    return Invalid(key, absl::StrCat("is not an integer in [", min, ", ", max, "]"));
  }
  return *integer;
}

absl::StatusOr<int64_t> GgufMetadata::IntOr(absl::string_view key, int64_t fallback, int64_t min,
                                            int64_t max) const {
  if (!Has(key)) return fallback;
  return Int(key, min, max);
}

absl::StatusOr<double> GgufMetadata::Number(absl::string_view key, double min, double max) const {
  const GgufValue* value = Find(key);
  if (value == nullptr) return Invalid(key, "is missing");
  std::optional<double> number;
  if (value->type == GgufValueType::kF32) number = Decimal(Read<float>(value->bytes));
  if (value->type == GgufValueType::kF64) number = Read<double>(value->bytes);
  if (const auto integer = ReadInt(value->type, value->bytes); integer) {
    number = static_cast<double>(*integer);
  }
  if (!number || !(*number >= min && *number <= max)) {
    return Invalid(key, absl::StrCat("is not a number in [", min, ", ", max, "]"));
  }
  return *number;
}

absl::StatusOr<double> GgufMetadata::NumberOr(absl::string_view key, double fallback, double min,
                                              double max) const {
  if (!Has(key)) return fallback;
  return Number(key, min, max);
}

absl::StatusOr<bool> GgufMetadata::BoolOr(absl::string_view key, bool fallback) const {
  const GgufValue* value = Find(key);
  if (value == nullptr) return fallback;
  if (value->type != GgufValueType::kBool || static_cast<uint8_t>(value->bytes[0]) > 1) {
    return Invalid(key, "is not a bool");
  }
  return value->bytes[0] != 0;
}

absl::StatusOr<std::string> GgufMetadata::String(absl::string_view key) const {
  const GgufValue* value = Find(key);
  if (value == nullptr) return Invalid(key, "is missing");
  if (value->type != GgufValueType::kString) return Invalid(key, "is not a string");
  return std::string(value->bytes);
}

absl::StatusOr<const GgufValue*> GgufMetadata::Array(absl::string_view key) const {
  const GgufValue* value = Find(key);
  if (value == nullptr) return Invalid(key, "is missing");
  if (value->type != GgufValueType::kArray) return Invalid(key, "is not an array");
  return value;
}

absl::StatusOr<std::vector<absl::string_view>> GgufMetadata::Strings(absl::string_view key) const {
  ASSIGN_OR_RETURN(const GgufValue* array, Array(key));
  if (array->element != GgufValueType::kString) return Invalid(key, "is not one of strings");
  std::vector<absl::string_view> strings;
  strings.reserve(static_cast<size_t>(array->count));
  absl::string_view rest = array->bytes;
  for (int64_t i = 0; i < array->count; ++i) {
    const uint64_t size = Read<uint64_t>(rest);  // within the array: the reader has been through it
    strings.push_back(rest.substr(8, size));
    rest.remove_prefix(8 + size);
  }
  return strings;
}

absl::StatusOr<std::vector<int64_t>> GgufMetadata::Ints(absl::string_view key) const {
  ASSIGN_OR_RETURN(const GgufValue* array, Array(key));
  std::vector<int64_t> integers;
  const auto size = static_cast<size_t>(ScalarBytes(array->element));
  for (int64_t i = 0; i < array->count; ++i) {
    const std::optional<int64_t> integer =
        ReadInt(array->element, array->bytes.substr(static_cast<size_t>(i) * size));
    if (!integer) return Invalid(key, "is not one of integers within 63 bits");
    integers.push_back(*integer);
  }
  return integers;
}

absl::StatusOr<std::vector<float>> GgufMetadata::Floats(absl::string_view key) const {
  ASSIGN_OR_RETURN(const GgufValue* array, Array(key));
  if (array->element != GgufValueType::kF32) return Invalid(key, "is not one of 32-bit floats");
  std::vector<float> floats(static_cast<size_t>(array->count));
  if (!floats.empty()) std::memcpy(floats.data(), array->bytes.data(), array->bytes.size());
  return floats;
}

}  // namespace carrel::model
