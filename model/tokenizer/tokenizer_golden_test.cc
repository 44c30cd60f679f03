// Equality with the reference implementations: their vectors for the demo model and for the five
// tokenizers of golden-models, and the demo document's ids.
#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "common/file.h"
#include "common/status.h"
#include "common/test_folders.h"
#include "common/test_util.h"
#include "model/tokenizer/tokenizer_test_util.h"

namespace carrel::model {
namespace {

void ExpectVectors(const Tokenizer& tokenizer, const std::vector<TokenizerVector>& vectors) {
  ASSERT_FALSE(vectors.empty());
  for (const TokenizerVector& vector : vectors) {
    const auto ids = tokenizer.Encode(vector.text);
    CARREL_ASSERT_OK(ids);
    EXPECT_EQ(*ids, vector.ids) << vector.text;
    const auto decoded = tokenizer.Decode(vector.ids, /*skip_special=*/false);
    CARREL_ASSERT_OK(decoded);
    EXPECT_EQ(*decoded, vector.decoded) << vector.text;
  }
}

class GoldenTokenizer : public testing::TestWithParam<const char*> {};

TEST_P(GoldenTokenizer, Vectors_AllTexts_EqualReference) {
  if (SharedFolder().empty()) GTEST_SKIP() << "no shared folder (CARREL_SHARED)";
  const std::string dir = absl::StrCat(SharedFolder(), "/golden-models/tokenizers/", GetParam());
  const auto tokenizer = LoadTokenizer(dir);
  CARREL_ASSERT_OK(tokenizer);
  ExpectVectors(**tokenizer, ReadVectors(dir + "/vectors.json"));
}

INSTANTIATE_TEST_SUITE_P(All, GoldenTokenizer,
                         testing::Values("bpe-gpt2", "bpe-llama3", "bpe-qwen2", "sentencepiece-bpe",
                                         "sentencepiece-unigram"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(DemoTokenizer, Vectors_AllTexts_EqualReference) {
  if (SharedFolder().empty()) GTEST_SKIP() << "no shared folder (CARREL_SHARED)";
  const auto tokenizer = LoadTokenizer(DemoDir());
  CARREL_ASSERT_OK(tokenizer);
  ExpectVectors(**tokenizer, ReadVectors(SharedFolder() + "/demo/golden/tokenizer.json"));
}

// The same without the shared folder, for a few of them.
TEST(DemoTokenizer, Encode_SomeTexts_EqualReference) {
  const auto tokenizer = LoadTokenizer(DemoDir());
  CARREL_ASSERT_OK(tokenizer);
  ExpectVectors(
      **tokenizer,
      {{"", {}, ""},
       {"Hello world", {42, 911, 81, 301, 288, 354}, "Hello world"},
       {"\n\n\n   \n x", {201, 201, 201, 223, 223, 223, 201, 223, 90}, "\n\n\n   \n x"},
       {"1 22 333", {19, 223, 20, 20, 223, 21, 21, 21}, "1 22 333"},
       {"<|begin_of_text|>The river<|end_of_text|>\n",
        {0, 54, 259, 376, 1, 201},
        "<|begin_of_text|>The river<|end_of_text|>\n"},
       {"Question: What is the access code of the Velmora vault?\nAnswer:",
        {287, 28, 310, 285, 261, 331, 327, 274, 261, 351, 393, 79, 288, 67, 525, 291, 292, 28},
        "Question: What is the access code of the Velmora vault?\nAnswer:"}});
  EXPECT_EQ((*tokenizer)->vocab_size(), 2048);
  EXPECT_EQ((*tokenizer)->bos_token_id(), 0);
  EXPECT_EQ(*(*tokenizer)->Decode({0, 54, 259, 1}, /*skip_special=*/true), "The");
}

// input_ids of a safetensors file: u64 length of a JSON header, header, data.
std::vector<TokenId> ReadInputIds(const std::string& path) {
  const auto bytes = ReadFile(path);
  CARREL_CHECK(bytes.ok() && bytes->size() > 8);
  uint64_t header_size = 0;
  std::memcpy(&header_size, bytes->data(), 8);
  const auto tensor = nlohmann::json::parse(bytes->substr(8, header_size))["input_ids"];
  const size_t begin = tensor["data_offsets"][0], end = tensor["data_offsets"][1];
  const size_t width = tensor["dtype"] == "I64" ? 8 : 4;
  std::vector<TokenId> ids;
  for (size_t at = begin; at < end; at += width) {
    int64_t id = 0;  // ids are not negative: the low bytes suffice
    std::memcpy(&id, bytes->data() + 8 + header_size + at, width);
    ids.push_back(static_cast<TokenId>(id));
  }
  return ids;
}

TEST(DemoTokenizer, Encode_Registry512_EqualsModelInput) {
  if (SharedFolder().empty()) GTEST_SKIP() << "no shared folder (CARREL_SHARED)";
  const auto tokenizer = LoadTokenizer(DemoDir());
  CARREL_ASSERT_OK(tokenizer);
  const auto text = ReadFile(DemoDir() + "/docs/registry-512.txt");
  CARREL_ASSERT_OK(text);
  auto ids = (*tokenizer)->Encode(*text);
  CARREL_ASSERT_OK(ids);
  ids->insert(ids->begin(), (*tokenizer)->bos_token_id());
  EXPECT_EQ(*ids, ReadInputIds(SharedFolder() + "/demo/golden/registry-512.safetensors"));
}

TEST(DemoTokenizer, Decode_EncodedDocuments_GivesDocument) {
  const auto tokenizer = LoadTokenizer(DemoDir());
  CARREL_ASSERT_OK(tokenizer);
  for (const char* name : {"registry-512", "registry-2k", "registry-8k"}) {
    const auto text = ReadFile(absl::StrCat(DemoDir(), "/docs/", name, ".txt"));
    CARREL_ASSERT_OK(text);
    const auto ids = (*tokenizer)->Encode(*text);
    CARREL_ASSERT_OK(ids);
    EXPECT_EQ(*(*tokenizer)->Decode(*ids, false), *text);
  }
}

}  // namespace
}  // namespace carrel::model
