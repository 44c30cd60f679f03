#include "common/checksum.h"
#include "common/file.h"
#include "common/test_folders.h"
#include "common/test_util.h"
#include "model/tokenizer/sentencepiece_reference.h"
#include "model/tokenizer/sentencepiece_spec.h"
#include "model/tokenizer/tokenizer_test_util.h"
#include "model/tokenizer/utf8.h"

namespace carrel::model {
namespace {

using testing::ElementsAre;

constexpr TokenId kFirst = 259;  // the first piece behind <unk>, <s>, </s> and the bytes

const std::vector<std::string> kPieces = {"\u2581hello", "\u2581", "lo",          "h",
                                          "\u2581w",     "\u00E9", "\u2581\u2581"};

std::string ReplaceInvalid(absl::string_view bytes) {
  std::string text;
  while (!bytes.empty()) {
    const size_t size = DecodeUtf8(bytes).size;
    text += size == 0 ? "\uFFFD" : std::string(bytes.substr(0, size));
    bytes.remove_prefix(std::max<size_t>(size, 1));
  }
  return text;
}

// Ours gives raw bytes where the library gives U+FFFD; otherwise the two are the same.
void ExpectDecodesAsLibrary(const Tokenizer& tokenizer, const std::string& model) {
  std::mt19937_64 rng(TestSeed());
  for (int round = 0; round < 100; ++round) {
    std::vector<TokenId> ids(rng() % 20);
    const int64_t range = round % 2 == 0 ? tokenizer.vocab_size() : 12;
    const int64_t first = round % 2 == 0 ? 0 : tokenizer.vocab_size() - 12;
    for (TokenId& id : ids) id = static_cast<TokenId>(first + static_cast<int64_t>(rng() % range));
    const auto text = tokenizer.Decode(ids, /*skip_special=*/true);
    CARREL_ASSERT_OK(text);
    // Runs of bytes end at other pieces: the library never joins them over a control piece, so
    // leave those out here.
    std::erase_if(ids, [](TokenId id) { return id == 1 || id == 2; });
    const std::string reference = SentencePieceReferenceDecode(model, ids);
    ASSERT_EQ(ReplaceInvalid(*text), reference) << testing::PrintToString(ids);
  }
}

TEST(SentencePiece, DropTokensFrom_AddedTokensBeyondTheModel_AreText) {
  const auto tokenizer =
      *LoadFiles({{"tokenizer.model", SmallSentencePieceModel(kPieces)},
                  {"added_tokens.json", absl::StrCat("{\"<i>\": ", kFirst + 7, "}")}});
  EXPECT_EQ(tokenizer->Encode("hello<i>")->back(), kFirst + 7);
  tokenizer->DropTokensFrom(kFirst + 7);
  EXPECT_EQ(tokenizer->vocab_size(), kFirst + 7);
  EXPECT_EQ(*tokenizer->Decode(*tokenizer->Encode("hello<i>"), false), "hello<i>");
  tokenizer->DropTokensFrom(5);  // the model's own pieces stay
  EXPECT_EQ(tokenizer->vocab_size(), kFirst + 7);
}

TEST(SentencePiece, Decode_RandomIds_AsTheLibrary) {
  for (const bool prefix : {false, true}) {
    for (const bool remove : {false, true}) {
      const std::string model = SmallSentencePieceModel(
          kPieces, {.add_dummy_prefix = prefix, .remove_extra_whitespaces = remove});
      const auto tokenizer = LoadFiles({{"tokenizer.model", model}});
      CARREL_ASSERT_OK(tokenizer);
      ExpectDecodesAsLibrary(**tokenizer, model);
    }
  }
}

TEST(SentencePiece, Decode_GoldenModelsRandomIds_AsTheLibrary) {
  if (SharedFolder().empty()) GTEST_SKIP() << "no shared folder (CARREL_SHARED)";
  for (const char* kind : {"bpe", "unigram"}) {
    const std::string dir =
        absl::StrCat(SharedFolder(), "/golden-models/tokenizers/sentencepiece-", kind);
    const auto tokenizer = LoadTokenizer(dir);
    CARREL_ASSERT_OK(tokenizer);
    ExpectDecodesAsLibrary(**tokenizer, *ReadFile(dir + "/tokenizer.model"));
  }
}

TEST(SentencePiece, Encode_Text_GivesPiecesAndBytes) {
  const std::string model = SmallSentencePieceModel(kPieces);
  const auto tokenizer = LoadFiles({{"tokenizer.model", model}});
  CARREL_ASSERT_OK(tokenizer);
  EXPECT_THAT(*(*tokenizer)->Encode("hello\n"), ElementsAre(kFirst, 3 + '\n'));
  EXPECT_THAT(*(*tokenizer)->Encode(""), ElementsAre());
  EXPECT_THAT((*tokenizer)->Encode("h\xFF"),
              StatusIs(absl::StatusCode::kInvalidArgument, "byte offset 1"));
  EXPECT_EQ((*tokenizer)->vocab_size(), kFirst + static_cast<int64_t>(kPieces.size()));
  EXPECT_EQ((*tokenizer)->bos_token_id(), 1);
  EXPECT_EQ((*tokenizer)->sha256(), Sha256Hex(model));
}

// With identity normalization and no removal of white space, text comes back exactly.
TEST(SentencePiece, Decode_EncodedRandomText_GivesText) {
  const auto tokenizer = LoadFiles({{"tokenizer.model", SmallSentencePieceModel(kPieces)}});
  CARREL_ASSERT_OK(tokenizer);
  std::mt19937_64 rng(TestSeed());
  for (int round = 0; round < 50; ++round) {
    const std::string text = RandomUtf8(rng, 50);
    const auto ids = (*tokenizer)->Encode(text);
    CARREL_ASSERT_OK(ids);
    ASSERT_EQ(*(*tokenizer)->Decode(*ids, false), text);
  }
}

TEST(SentencePiece, Decode_SpecialTokens_AreWrittenOutOrSkipped) {
  const auto tokenizer = LoadFiles({{"tokenizer.model", SmallSentencePieceModel(kPieces)}});
  CARREL_ASSERT_OK(tokenizer);
  EXPECT_EQ(*(*tokenizer)->Decode({1, kFirst, 2}, true), "hello");
  EXPECT_EQ(*(*tokenizer)->Decode({1, kFirst, 2}, false), "<s> hello</s>");
  EXPECT_EQ(*(*tokenizer)->Decode({kFirst, 0}, true), "hello \u2047 ");
}

TEST(SentencePiece, AddedTokens_FromBothFiles_AreRecognised) {
  const std::string model = SmallSentencePieceModel(kPieces);
  const Files files = {
      {"tokenizer.model", model},
      {"tokenizer_config.json",
       R"({"bos_token": {"content": "<s>"}, "pad_token": "<p>", "added_tokens_decoder": {
             "1": {"content": "<s>", "special": true},
             "300": {"content": "<x>", "special": false}}})"},
      {"added_tokens.json", R"({"<p>": 301, "<x>": 300, "<q>": 303})"}};
  const auto tokenizer = LoadFiles(files);
  CARREL_ASSERT_OK(tokenizer);
  EXPECT_THAT(*(*tokenizer)->Encode("<s>hello<x>hello<p><q>"),
              ElementsAre(1, kFirst, 300, kFirst, 301, 303));
  EXPECT_EQ(*(*tokenizer)->Decode({1, kFirst, 300, 301, 303}, true), "hello<x><q>");
  EXPECT_EQ((*tokenizer)->vocab_size(), 304);
  EXPECT_EQ((*tokenizer)->bos_token_id(), 1);
  EXPECT_NE((*tokenizer)->sha256(), Sha256Hex(model));
  EXPECT_THAT((*tokenizer)->Decode({302}, true),
              StatusIs(absl::StatusCode::kInvalidArgument, "token id 302 is not"));
}

TEST(SentencePiece, AddedToken_ContradictsPiece_IsRefused) {
  EXPECT_THAT(LoadFiles({{"tokenizer.model", SmallSentencePieceModel(kPieces)},
                         {"added_tokens.json", R"({"<x>": 259})"}}),
              StatusIs(absl::StatusCode::kInvalidArgument, "id 259 is the piece"));
}

TEST(SentencePiece, Bos_EverySetting_AsDocumented) {
  const std::string model = SmallSentencePieceModel(kPieces);
  const auto bos = [&](const std::string& config) {
    const auto tokenizer =
        LoadFiles({{"tokenizer.model", model}, {"tokenizer_config.json", config}});
    return tokenizer.ok() ? (*tokenizer)->bos_token_id() : -100;
  };
  EXPECT_EQ(bos("{}"), 1);
  EXPECT_EQ(bos(R"({"bos_token": null})"), -1);
  EXPECT_EQ(bos(R"({"bos_token": "</s>"})"), 2);
  EXPECT_EQ(bos(R"({"bos_token": "<s>", "add_bos_token": false})"), -1);
  EXPECT_EQ(bos(R"({"bos_token": "absent"})"), -100);
}

TEST(SentencePiece, Load_Malformed_IsRefused) {
  const std::string model = SmallSentencePieceModel(kPieces);
  for (const std::string& bytes :
       {std::string(), std::string("not a model"), std::string(50, '\xFF'),
        model.substr(0, model.size() / 2), model.substr(0, 5)}) {
    EXPECT_THAT(LoadFiles({{"tokenizer.model", bytes}}),
                StatusIs(absl::StatusCode::kInvalidArgument, "tokenizer.model"));
  }
  EXPECT_THAT(
      LoadFiles({{"tokenizer.model", SmallSentencePieceModel(kPieces, {.denormalizer = true})}}),
      StatusIs(absl::StatusCode::kUnimplemented, "denormalizer_spec"));
}

TEST(SentencePieceSpec, Read_Model_GivesFields) {
  const auto spec = ReadSentencePieceSpec(SmallSentencePieceModel(
      kPieces, {.add_dummy_prefix = false, .remove_extra_whitespaces = true}));
  CARREL_ASSERT_OK(spec);
  EXPECT_FALSE(spec->add_dummy_prefix);
  EXPECT_TRUE(spec->remove_extra_whitespaces);
  EXPECT_FALSE(spec->has_denormalizer);
  const auto empty = ReadSentencePieceSpec("");  // all defaults
  CARREL_ASSERT_OK(empty);
  EXPECT_TRUE(empty->add_dummy_prefix);
}

TEST(SentencePieceSpec, Read_RandomBytes_NeverCrashes) {
  std::mt19937_64 rng(TestSeed());
  const std::string model = SmallSentencePieceModel(kPieces);
  int refused = 0;
  for (int round = 0; round < 2000; ++round) {
    std::string bytes = model.substr(0, rng() % model.size());
    for (int i = 0; i < 5 && !bytes.empty(); ++i)
      bytes[rng() % bytes.size()] = static_cast<char>(rng());
    refused += ReadSentencePieceSpec(bytes).ok() ? 0 : 1;
  }
  EXPECT_GT(refused, 0);
}

}  // namespace
}  // namespace carrel::model
