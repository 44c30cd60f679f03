// What:   the byte-level alphabet, in which tokenizer.json spells the bytes of its tokens: one
//         printable character per byte.
// Source: GPT-2 (bytes_to_unicode): '!'..'~', U+00A1..U+00AC and U+00AE..U+00FF stand for
//         themselves, the other 68 bytes in order for U+0100, U+0101, ...
#pragma once

#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace carrel::model {

// The bytes that `token` spells; nothing if a character is not of the alphabet.
std::optional<std::string> BytesOfToken(absl::string_view token);

// What stands for a space where tokens are spelled in their own characters: U+2581.
inline constexpr char kSpaceSymbol[] = "\xE2\x96\x81";

// The other way.
std::string TokenOfBytes(absl::string_view bytes);

}  // namespace carrel::model
