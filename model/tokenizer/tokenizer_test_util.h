// What: what the tokenizer tests share: where files are, a small tokenizer.json, a small
//       SentencePiece model, random text. Tests only.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "model/tokenizer/tokenizer.h"

namespace carrel::model {

std::string DemoDir();  // models/demo

struct TokenizerVector {
  std::string text;
  std::vector<TokenId> ids;
  std::string decoded;  // text where the file has none
};
std::vector<TokenizerVector> ReadVectors(const std::string& path);

// A tokenizer.json over all 256 bytes (id = byte) and 256 "ab", 257 "abc", 258 " a", 259 "<e>"
// (special, added). `edit` is a JSON merge patch (RFC 7396): null takes a key out.
std::string SmallTokenizerJson(const std::string& edit = "{}");

// Writes files into a fresh folder of this test and loads it.
using Files = std::vector<std::pair<std::string, std::string>>;
std::string WriteFiles(const Files& files);
absl::StatusOr<std::unique_ptr<Tokenizer>> LoadFiles(const Files& files);

// A unigram model with identity normalization: <unk>, <s>, </s>, 256 byte pieces, then `pieces`
// with falling scores.
struct SmallModelOptions {
  bool add_dummy_prefix = true;
  bool remove_extra_whitespaces = false;
  bool denormalizer = false;
};
std::string SmallSentencePieceModel(const std::vector<std::string>& pieces,
                                    const SmallModelOptions& options = {});

std::string EncodeUtf8(uint32_t code_point);
// Characters of all sizes, many of them letters, digits, white space and combining marks.
std::string RandomUtf8(std::mt19937_64& rng, int64_t characters);

}  // namespace carrel::model
