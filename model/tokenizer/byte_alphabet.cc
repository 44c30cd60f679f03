#include "model/tokenizer/byte_alphabet.h"

#include <array>
#include <cstdint>

#include "model/tokenizer/utf8.h"

namespace carrel::model {
namespace {

constexpr uint32_t kMaxCodePoint = 0x100 + 67;

struct Alphabet {
  std::array<uint16_t, 256> code_point{};
  std::array<int16_t, kMaxCodePoint + 1> byte{};
};

constexpr Alphabet MakeAlphabet() {
  Alphabet alphabet;
  for (int16_t& byte : alphabet.byte) byte = -1;
  uint16_t next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) ||
                           (byte >= 0xAE && byte <= 0xFF);
    const uint16_t code_point = printable ? static_cast<uint16_t>(byte) : next++;
    alphabet.code_point[byte] = code_point;
    alphabet.byte[code_point] = static_cast<int16_t>(byte);
  }
  return alphabet;
}

constexpr Alphabet kAlphabet = MakeAlphabet();

}  // namespace

std::optional<std::string> BytesOfToken(absl::string_view token) {
  std::string bytes;
  while (!token.empty()) {
    const Utf8Char next = DecodeUtf8(token);
    if (next.size == 0 || next.code_point > kMaxCodePoint) return std::nullopt;
    const int16_t byte = kAlphabet.byte[next.code_point];
    if (byte < 0) return std::nullopt;
    bytes.push_back(static_cast<char>(byte));
    token.remove_prefix(next.size);
  }
  return bytes;
}

std::string TokenOfBytes(absl::string_view bytes) {
  std::string token;
  for (const char c : bytes) {
    const uint16_t code_point = kAlphabet.code_point[static_cast<uint8_t>(c)];
    if (code_point < 0x80) {
      token.push_back(static_cast<char>(code_point));
    } else {  // at most U+0143: two bytes
      token.push_back(static_cast<char>(0xC0 | (code_point >> 6)));
      token.push_back(static_cast<char>(0x80 | (code_point & 0x3F)));
    }
  }
  return token;
}

}  // namespace carrel::model
