#include "model/tokenizer/tokenizer_test_util.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "common/file.h"
#include "common/status.h"
#include "common/test_folders.h"
#include "common/test_util.h"
#include "model/tokenizer/byte_alphabet.h"
#include "model/tokenizer/pretokenizer.h"

namespace carrel::model {

std::string DemoDir() { return SourceFolder() + "/models/demo"; }

std::vector<TokenizerVector> ReadVectors(const std::string& path) {
  const auto bytes = ReadFile(path);
  CARREL_CHECK(bytes.ok());
  std::vector<TokenizerVector> vectors;
  for (const nlohmann::json& one : nlohmann::json::parse(*bytes)) {
    const std::string text = one["text"];
    vectors.push_back({text, one["ids"], one.value("decoded", text)});
  }
  return vectors;
}

std::string SmallTokenizerJson(const std::string& edit) {
  nlohmann::json vocab = nlohmann::json::object();
  for (int byte = 0; byte < 256; ++byte) {
    vocab[TokenOfBytes(std::string(1, static_cast<char>(byte)))] = byte;
  }
  vocab["ab"] = 256;
  vocab["abc"] = 257;
  vocab[TokenOfBytes(" a")] = 258;
  nlohmann::json document = {
      {"version", "1.0"},
      {"added_tokens", {{{"id", 259}, {"content", "<e>"}, {"special", true}}}},
      {"normalizer", nullptr},
      {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
      {"post_processor", nullptr},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model",
       {{"type", "BPE"},
        {"vocab", vocab},
        {"merges", {"a b", "ab c", absl::StrCat(TokenOfBytes(" "), " a")}}}}};
  document.merge_patch(nlohmann::json::parse(edit));
  return document.dump();
}

std::string WriteFiles(const Files& files) {
  const std::string dir = FreshTempDir();
  for (const auto& [name, bytes] : files) {
    std::ofstream(absl::StrCat(dir, "/", name), std::ios::binary) << bytes;
  }
  return dir;
}

absl::StatusOr<std::unique_ptr<Tokenizer>> LoadFiles(const Files& files) {
  return LoadTokenizer(WriteFiles(files));
}

namespace {

std::string Varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes.push_back(static_cast<char>(value | 0x80));
  bytes.push_back(static_cast<char>(value));
  return bytes;
}

std::string NumberField(uint64_t number, uint64_t value) {
  return Varint(number << 3) + Varint(value);
}

std::string BytesField(uint64_t number, const std::string& bytes) {
  return Varint(number << 3 | 2) + Varint(bytes.size()) + bytes;
}

std::string PieceField(const std::string& name, float score, int type) {
  std::string score_bytes(sizeof(score), '\0');
  std::copy_n(reinterpret_cast<const char*>(&score), sizeof(score), score_bytes.begin());
  return BytesField(1,
                    BytesField(1, name) + Varint(2 << 3 | 5) + score_bytes + NumberField(3, type));
}

}  // namespace

std::string SmallSentencePieceModel(const std::vector<std::string>& pieces,
                                    const SmallModelOptions& options) {
  constexpr int kNormal = 1, kUnknown = 2, kControl = 3, kByte = 6;
  std::string model = PieceField("<unk>", 0, kUnknown) + PieceField("<s>", 0, kControl) +
                      PieceField("</s>", 0, kControl);
  for (int byte = 0; byte < 256; ++byte) {
    const char* digits = "0123456789ABCDEF";
    model += PieceField(absl::StrCat("<0x", std::string(1, digits[byte / 16]),
                                     std::string(1, digits[byte % 16]), ">"),
                        0, kByte);
  }
  float score = -1;
  for (const std::string& piece : pieces) model += PieceField(piece, score -= 0.25f, kNormal);
  constexpr int kUnigram = 1;
  model +=
      BytesField(2, NumberField(3, kUnigram) + NumberField(35, 1));  // model_type, byte_fallback
  model += BytesField(3, BytesField(1, "identity") + NumberField(3, options.add_dummy_prefix) +
                             NumberField(4, options.remove_extra_whitespaces));
  if (options.denormalizer) model += BytesField(5, BytesField(2, "rules"));
  return model;
}

std::string EncodeUtf8(uint32_t c) {
  std::string bytes;
  const auto put = [&](uint32_t byte) { bytes.push_back(static_cast<char>(byte)); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xC0 | c >> 6), put(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    put(0xE0 | c >> 12), put(0x80 | (c >> 6 & 0x3F)), put(0x80 | (c & 0x3F));
  } else {
    put(0xF0 | c >> 18), put(0x80 | (c >> 12 & 0x3F)), put(0x80 | (c >> 6 & 0x3F)),
        put(0x80 | (c & 0x3F));
  }
  return bytes;
}

std::string RandomUtf8(std::mt19937_64& rng, int64_t characters) {
  constexpr struct {
    uint32_t first, last;
  } kRanges[] = {{'a', 'z'},       {'a', 'z'},          {' ', ' '},         {'0', '9'},
                 {0, 0x7F},        {0x80, 0x7FF},       {0x300, 0x36F},     {0x800, 0xD7FF},
                 {0xE000, 0xFFFF}, {0x10000, 0x10FFFF}, {0x1F600, 0x1F64F}, {0x2000, 0x200F}};
  std::string text;
  for (int64_t i = 0; i < characters; ++i) {
    const auto& range = kRanges[rng() % std::size(kRanges)];
    text += EncodeUtf8(range.first + static_cast<uint32_t>(rng() % (range.last - range.first + 1)));
  }
  return text;
}

}  // namespace carrel::model
