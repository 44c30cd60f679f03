#include "model/tokenizer/utf8.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace carrel::model {
namespace {

// Size of the character that the lead byte announces (0: not a lead byte) and the range of the byte
// after it; every later byte is 80..BF.
struct Lead {
  size_t size;
  uint8_t second_min;
  uint8_t second_max;
};

Lead LeadOf(uint8_t byte) {
  if (byte < 0x80) return {1, 0, 0};
  if (byte < 0xC2) return {0, 0, 0};
  if (byte < 0xE0) return {2, 0x80, 0xBF};
  if (byte < 0xF0) {
    return {3, static_cast<uint8_t>(byte == 0xE0 ? 0xA0 : 0x80),
            static_cast<uint8_t>(byte == 0xED ? 0x9F : 0xBF)};
  }
  if (byte < 0xF5) {
    return {4, static_cast<uint8_t>(byte == 0xF0 ? 0x90 : 0x80),
            static_cast<uint8_t>(byte == 0xF4 ? 0x8F : 0xBF)};
  }
  return {0, 0, 0};
}

// How many of the leading bytes fit the character that bytes[0], a lead byte, announces.
size_t FittingBytes(absl::string_view bytes, const Lead& lead) {
  size_t fit = 1;
  for (; fit < lead.size && fit < bytes.size(); ++fit) {
    const uint8_t byte = static_cast<uint8_t>(bytes[fit]);
    const uint8_t low = fit == 1 ? lead.second_min : 0x80;
    const uint8_t high = fit == 1 ? lead.second_max : 0xBF;
    if (byte < low || byte > high) break;
  }
  return fit;
}

}  // namespace

Utf8Char DecodeUtf8(absl::string_view bytes) {
  if (bytes.empty()) return {};
  const Lead lead = LeadOf(static_cast<uint8_t>(bytes[0]));
  if (lead.size == 0 || FittingBytes(bytes, lead) < lead.size) return {};
  if (lead.size == 1) return {static_cast<uint8_t>(bytes[0]), 1};
  uint32_t code_point = static_cast<uint8_t>(bytes[0]) & (0xFFu >> (lead.size + 1));
  for (size_t i = 1; i < lead.size; ++i) {
    code_point = (code_point << 6) | (static_cast<uint8_t>(bytes[i]) & 0x3F);
  }
  return {code_point, lead.size};
}

Utf8Char DecodeLastUtf8(absl::string_view bytes) {
  for (size_t size = 1; size <= std::min<size_t>(4, bytes.size()); ++size) {
    const Utf8Char last = DecodeUtf8(bytes.substr(bytes.size() - size));
    if (last.size == size) return last;
  }
  return {};
}

absl::Status ValidateUtf8(absl::string_view bytes) {
  size_t at = 0;
  while (at < bytes.size()) {
    if (static_cast<uint8_t>(bytes[at]) < 0x80) {
      ++at;
      continue;
    }
    const size_t size = DecodeUtf8(bytes.substr(at)).size;
    if (size == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("invalid UTF-8 at byte offset ", at, " of ", bytes.size(), " (byte 0x",
                       absl::Hex(static_cast<uint8_t>(bytes[at]), absl::kZeroPad2), ")"));
    }
    at += size;
  }
  return absl::OkStatus();
}

size_t CompleteUtf8Size(absl::string_view bytes) {
  // A lead byte always begins a character, so looking back from the end is enough.
  for (size_t tail = 1; tail <= std::min<size_t>(3, bytes.size()); ++tail) {
    const absl::string_view last = bytes.substr(bytes.size() - tail);
    const Lead lead = LeadOf(static_cast<uint8_t>(last[0]));
    if (lead.size == 0) continue;
    return lead.size > tail && FittingBytes(last, lead) == tail ? bytes.size() - tail
                                                                : bytes.size();
  }
  return bytes.size();
}

}  // namespace carrel::model
