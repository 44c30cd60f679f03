// What LoadTokenizer makes of a tokenizer.json: what it runs, refuses, and survives.
#include <nlohmann/json.hpp>
#include <thread>

#include "absl/strings/str_replace.h"
#include "common/checksum.h"
#include "common/file.h"
#include "common/test_util.h"
#include "model/tokenizer/tokenizer_test_util.h"

namespace carrel::model {
namespace {

using testing::ElementsAre;

absl::StatusOr<std::unique_ptr<Tokenizer>> Load(const std::string& edit) {
  return LoadFiles({{"tokenizer.json", SmallTokenizerJson(edit)}});
}

TEST(TokenizerJson, Encode_SmallVocabulary_MergesByRank) {
  const auto tokenizer = Load("{}");
  CARREL_ASSERT_OK(tokenizer);
  EXPECT_THAT(*(*tokenizer)->Encode("abc ab<e> ac"), ElementsAre(257, ' ', 256, 259, 258, 'c'));
  EXPECT_EQ(*(*tokenizer)->Decode({257, ' ', 256, 259, 258}, false), "abc ab<e> a");
  EXPECT_EQ(*(*tokenizer)->Decode({257, ' ', 256, 259, 258}, true), "abc ab a");
  EXPECT_EQ((*tokenizer)->vocab_size(), 260);
  EXPECT_EQ((*tokenizer)->bos_token_id(), -1);
  EXPECT_EQ((*tokenizer)->sha256(), Sha256Hex(SmallTokenizerJson()));
}

TEST(TokenizerJson, Encode_BothSpellingsOfMerges_AreTheSame) {
  const auto pairs = Load(R"({"model": {"merges": [["a", "b"], ["ab", "c"]]}})");
  const auto lines = Load(R"({"model": {"merges": ["#version: 0.2", "a b", "ab c"]}})");
  CARREL_ASSERT_OK(pairs);
  CARREL_ASSERT_OK(lines);
  EXPECT_THAT(*(*pairs)->Encode("abcab"), ElementsAre(257, 256));
  EXPECT_THAT(*(*lines)->Encode("abcab"), ElementsAre(257, 256));
}

TEST(TokenizerJson, Encode_IgnoreMerges_TakesWholeWords) {
  const auto merging = Load(R"({"model": {"merges": []}})");
  const auto whole = Load(R"({"model": {"merges": [], "ignore_merges": true}})");
  CARREL_ASSERT_OK(merging);
  CARREL_ASSERT_OK(whole);
  EXPECT_THAT(*(*merging)->Encode("abc"), ElementsAre('a', 'b', 'c'));
  EXPECT_THAT(*(*whole)->Encode("abc"), ElementsAre(257));
}

TEST(TokenizerJson, Encode_RandomText_DecodesToItself) {
  std::mt19937_64 rng(TestSeed());
  for (const std::string& dir :
       {DemoDir(), WriteFiles({{"tokenizer.json", SmallTokenizerJson()}})}) {
    const auto tokenizer = LoadTokenizer(dir);
    CARREL_ASSERT_OK(tokenizer);
    for (int round = 0; round < 100; ++round) {
      const std::string text = RandomUtf8(rng, static_cast<int64_t>(rng() % 200));
      const auto ids = (*tokenizer)->Encode(text);
      CARREL_ASSERT_OK(ids);
      ASSERT_EQ(*(*tokenizer)->Decode(*ids, false), text);
    }
  }
}

TEST(TokenizerJson, Encode_InvalidUtf8_NamesOffset) {
  const auto tokenizer = Load("{}");
  CARREL_ASSERT_OK(tokenizer);
  EXPECT_THAT((*tokenizer)->Encode("abc\xC3("),
              StatusIs(absl::StatusCode::kInvalidArgument, "byte offset 3 of 5"));
}

TEST(TokenizerJson, Encode_PrefixSpace_PerSpanBetweenAddedTokens) {
  const auto tokenizer =
      Load(R"({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": true}})");
  CARREL_ASSERT_OK(tokenizer);
  EXPECT_THAT(*(*tokenizer)->Encode("a<e>a<e> a"), ElementsAre(258, 259, 258, 259, 258));
}

TEST(TokenizerJson, Encode_NormalizedAddedToken_MatchesAfterNfc) {
  const auto tokenizer =
      Load(R"({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]},
      "added_tokens": [{"id": 259, "content": "<e\u0301>", "normalized": true},
                       {"id": 260, "content": "[e\u0301]", "normalized": false}]})");
  CARREL_ASSERT_OK(tokenizer);
  // Composed: the normalized token is found, the raw one is not.
  EXPECT_THAT(*(*tokenizer)->Encode("<\u00E9>[\u00E9]"), ElementsAre(259, '[', 0xC3, 0xA9, ']'));
  EXPECT_THAT(*(*tokenizer)->Encode("<e\u0301>[e\u0301]"), ElementsAre(259, 260));
  EXPECT_EQ(*(*tokenizer)->Decode({259, 260}, false), "<e\u0301>[e\u0301]");
}

TEST(TokenizerJson, Load_ConfigAddsTokens_TheyCountInIdentity) {
  const std::string json = SmallTokenizerJson();
  const auto same = LoadFiles(
      {{"tokenizer.json", json},
       {"tokenizer_config.json",
        R"({"chat_template": "x", "added_tokens_decoder": {"259": {"content": "<e>", "special": true}}})"}});
  CARREL_ASSERT_OK(same);
  EXPECT_EQ((*same)->sha256(), Sha256Hex(json));
  const auto more = LoadFiles(
      {{"tokenizer.json", json},
       {"tokenizer_config.json",
        R"({"bos_token": "<f>", "add_bos_token": true, "added_tokens_decoder": {"270": {"content": "<f>", "special": true}}})"}});
  CARREL_ASSERT_OK(more);
  EXPECT_NE((*more)->sha256(), Sha256Hex(json));
  EXPECT_THAT(*(*more)->Encode("<f><e>"), ElementsAre(270, 259));
  EXPECT_EQ((*more)->vocab_size(), 271);
  EXPECT_EQ((*more)->bos_token_id(), 270);
  EXPECT_THAT((*more)->Decode({265}, false),
              StatusIs(absl::StatusCode::kInvalidArgument, "token id 265 is not"));
}

// Gemma 3 has <image_soft_token> = 262144 for a model of 262144 embeddings.
TEST(TokenizerJson, DropTokensFrom_AddedTokensBeyondTheModel_AreText) {
  const auto load = [] {
    return *Load(R"({"added_tokens": [{"id": 259, "content": "<e>", "special": true},
                                      {"id": 260, "content": "<i>", "special": true},
                                      {"id": 300, "content": "<j>", "normalized": true}]})");
  };
  const auto tokenizer = load();
  const std::string text = "a<e><i><j>";
  EXPECT_THAT(*tokenizer->Encode(text), ElementsAre('a', 259, 260, 300));
  tokenizer->DropTokensFrom(1000);
  EXPECT_THAT(*tokenizer->Encode(text), ElementsAre('a', 259, 260, 300));
  tokenizer->DropTokensFrom(260);
  EXPECT_EQ(tokenizer->vocab_size(), 260);
  EXPECT_THAT(*tokenizer->Encode(text), ElementsAre('a', 259, '<', 'i', '>', '<', 'j', '>'));
  EXPECT_THAT(tokenizer->Decode({260}, false),
              StatusIs(absl::StatusCode::kInvalidArgument, "vocab_size 260"));
  // The vocabulary proper is not cut: then tokenizer and model do not belong together.
  const auto whole = load();
  whole->DropTokensFrom(258);
  EXPECT_EQ(whole->vocab_size(), 301);
}

TEST(TokenizerJson, DropTokensFrom_TheFirstOfDocuments_Stays) {
  const auto tokenizer =
      *LoadFiles({{"tokenizer.json", SmallTokenizerJson()},
                  {"tokenizer_config.json", R"({"bos_token": "<e>", "add_bos_token": true})"}});
  tokenizer->DropTokensFrom(259);
  EXPECT_EQ(tokenizer->vocab_size(), 260);
}

TEST(TokenizerJson, DropMissingBytes_HoldsWhereNobodyCounts) {
  const auto tokenizer = *Load(R"({"model": {"vocab": {"!": null}}})");
  EXPECT_THAT(tokenizer->Encode("a!"), StatusIs(absl::StatusCode::kInvalidArgument, "byte 0x21"));
  tokenizer->DropMissingBytes();
  EXPECT_THAT(*tokenizer->Encode("a!"), ElementsAre('a'));
  Tokenizer::Dropped dropped;
  EXPECT_THAT(*tokenizer->Encode("!a", &dropped), ElementsAre('a'));
  EXPECT_EQ(dropped.bytes, 1);
}

// Whatever is a million characters long in such a file.
TEST(TokenizerJson, Load_Errors_AreOfBoundedLength) {
  const std::string huge(1000000, 'z');
  const auto with = [&](std::string edit) { return absl::StrReplaceAll(edit, {{"HUGE", huge}}); };
  const std::string edits[] = {
      R"({"model": {"vocab": {"HUGE": 1999999999}}})",
      R"({"model": {"vocab": {"HUGE": 7}}})",
      R"({"model": {"vocab": {"HUGE": "x"}}})",
      R"({"model": {"merges": ["HUGE"]}})",
      R"({"model": {"merges": [["a", "HUGE"]]}})",
      R"({"model": {"merges": [["\u4e00HUGE", "b"]]}})",
      R"({"model": {"type": "HUGE"}})",
      R"({"model": {"dropout": "HUGE"}})",
      R"({"model": {"continuing_subword_prefix": "HUGE"}})",
      R"({"model": {"vocab": {"!": null}, "unk_token": "HUGE"}})",
      R"({"normalizer": {"type": "HUGE"}})",
      R"({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "HUGE"}, {"type": "ByteLevel"}]}})",
      R"({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split", "behavior": "HUGE",
          "pattern": {"Regex": "a"}}, {"type": "ByteLevel"}]}})",
      R"({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split", "behavior": "Isolated",
          "pattern": {"Regex": "(HUGE"}}, {"type": "ByteLevel"}]}})",
      R"({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split", "behavior": "Isolated",
          "pattern": {"Regex": "HUGE\\b"}}, {"type": "ByteLevel"}]}})",
      R"({"post_processor": {"type": "HUGE"}})",
      R"({"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "HUGE"}}]}})",
      R"({"decoder": {"type": "HUGE"}})",
      R"({"added_tokens": [{"content": "HUGE"}]})",
      R"({"added_tokens": [{"content": "HUGE", "id": 259}, {"content": "HUGE", "id": 260}]})",
      R"({"added_tokens": [{"content": "HUGE", "id": 7}]})",
      R"({"added_tokens": [{"content": "HUGE", "id": "HUGE"}]})"};
  for (const std::string& edit : edits) {
    const auto tokenizer = Load(with(edit));
    EXPECT_FALSE(tokenizer.ok()) << edit;
    EXPECT_LT(tokenizer.status().message().size(), 1000u) << edit;
  }
  const std::string configs[] = {
      R"({"bos_token": "HUGE", "add_bos_token": true})",
      R"({"added_tokens_decoder": {"HUGE": {"content": "x"}}})",
      R"({"added_tokens_decoder": {"259": {"content": "HUGE"}}})",
      R"({"added_tokens_decoder": {"7": {"content": "HUGE"}}})",
      R"({"added_tokens_decoder": {"300": {"content": "<e>"}, "301": {"content": "HUGE", "special": "HUGE"}}})"};
  for (const std::string& config : configs) {
    const auto tokenizer = LoadFiles(
        {{"tokenizer.json", SmallTokenizerJson()}, {"tokenizer_config.json", with(config)}});
    EXPECT_FALSE(tokenizer.ok()) << config;
    EXPECT_LT(tokenizer.status().message().size(), 1000u) << config;
  }
}

// As llama 3 writes it.
constexpr char kTemplate[] = R"({"post_processor": {"type": "Sequence", "processors": [
    {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true},
    {"type": "TemplateProcessing",
     "single": [{"SpecialToken": {"id": "<e>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                {"SpecialToken": {"id": "ab", "type_id": 0}}],
     "pair": [],
     "special_tokens": {"<e>": {"id": "<e>", "ids": [259], "tokens": ["<e>"]},
                        "ab": {"id": "ab", "ids": [256], "tokens": ["ab"]}}}]}})";

TEST(TokenizerJson, Bos_EverySetting_AsDocumented) {
  const auto bos = [](const std::string& edit, const std::string& config) {
    Files files = {{"tokenizer.json", SmallTokenizerJson(edit)}};
    if (!config.empty()) files.emplace_back("tokenizer_config.json", config);
    const auto tokenizer = LoadFiles(files);
    return tokenizer.ok() ? (*tokenizer)->bos_token_id() : -100;
  };
  // Only where add_bos_token or post_processor says so: a bos_token alone is only a name.
  for (const char* config : {"", "{}", R"({"bos_token": null})", R"({"bos_token": "<e>"})",
                             R"({"bos_token": "<e>", "add_bos_token": false})",
                             R"({"bos_token": "<e>", "add_bos_token": null})"}) {
    EXPECT_EQ(bos("{}", config), -1) << config;
  }
  EXPECT_EQ(bos("{}", R"({"bos_token": "ab", "add_bos_token": true})"), 256);
  EXPECT_EQ(bos("{}", R"({"bos_token": {"content": "<e>"}, "add_bos_token": true})"), 259);
  EXPECT_EQ(bos(kTemplate, ""), 259);
  EXPECT_EQ(bos(kTemplate, R"({"bos_token": "ab"})"), 259);
  EXPECT_EQ(bos(kTemplate, R"({"bos_token": "ab", "add_bos_token": true})"), 256);
  EXPECT_EQ(bos(kTemplate, R"({"bos_token": "<e>", "add_bos_token": false})"), -1);
  EXPECT_EQ(bos("{}", R"({"bos_token": "absent", "add_bos_token": true})"), -100);
  EXPECT_EQ(bos("{}", R"({"add_bos_token": true})"), -100);
  EXPECT_EQ(bos("{}", R"({"bos_token": 7})"), -100);
  EXPECT_EQ(bos("{}", R"({"add_bos_token": "yes"})"), -100);
  EXPECT_EQ(bos("{}", "{"), -100);
}

TEST(TokenizerJson, Bos_TemplateThatIsNotRunOrBroken_IsRefused) {
  const auto load = [](const std::string& single, const std::string& special_tokens) {
    return Load(absl::StrCat(R"({"post_processor": {"type": "TemplateProcessing", "single": )",
                             single, R"(, "special_tokens": )", special_tokens, "}}"))
        .status();
  };
  const std::string e = R"({"SpecialToken": {"id": "<e>", "type_id": 0}})";
  const std::string text = R"({"Sequence": {"id": "A", "type_id": 0}})";
  EXPECT_EQ(load("[" + text + "]", "{}"), absl::OkStatus());
  EXPECT_THAT(load("[" + e + "," + e + "," + text + "]", R"({"<e>": {"ids": [259]}})"),
              StatusIs(absl::StatusCode::kUnimplemented, "several tokens"));
  EXPECT_THAT(load("[" + e + "," + text + "]", R"({"<e>": {"ids": [259, 259]}})"),
              StatusIs(absl::StatusCode::kUnimplemented, "several tokens"));
  EXPECT_THAT(load("[" + e + "," + text + "]", R"({"<e>": {"ids": [7000]}})"),
              StatusIs(absl::StatusCode::kInvalidArgument, "id 7000"));
  EXPECT_THAT(load("[" + e + "," + text + "]", "{}"),
              StatusIs(absl::StatusCode::kInvalidArgument, "no ids of \"<e>\""));
  EXPECT_THAT(load("7", "{}"), StatusIs(absl::StatusCode::kInvalidArgument, "single"));
}

TEST(TokenizerJson, Load_NotRun_IsRefusedByName) {
  for (const auto& [edit, name] : std::vector<std::pair<std::string, std::string>>{
           {R"({"model": {"type": "WordPiece"}})", "model.type \"WordPiece\""},
           {R"({"model": {"type": "Unigram"}})", "model.type \"Unigram\""},
           {R"({"model": {"dropout": 0.1}})", "model.dropout 0.1"},
           {R"({"model": {"end_of_word_suffix": "</w>"}})", "model.end_of_word_suffix \"</w>\""},
           {R"({"model": {"continuing_subword_prefix": "##"}})", "continuing_subword_prefix"},
           {R"({"pre_tokenizer": null, "model": {"byte_fallback": true}})", "ByteLevel"},
           {R"({"pre_tokenizer": {"type": "Metaspace"}})", "Metaspace"},
           {R"({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Punctuation"},
                {"type": "ByteLevel", "add_prefix_space": false}], "add_prefix_space": null}})",
            "pre_tokenizer {\"type\":\"Punctuation\"}"},
           {R"({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
                {"type": "ByteLevel", "add_prefix_space": false},
                {"type": "Digits", "individual_digits": true}]}})",
            "after ByteLevel"},
           {R"({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split",
                "pattern": {"Regex": "a$"}, "behavior": "Isolated"},
                {"type": "ByteLevel", "add_prefix_space": false}]}})",
            "the anchor $"},
           {R"({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split",
                "pattern": {"Regex": "a"}, "behavior": "Sideways"},
                {"type": "ByteLevel", "add_prefix_space": false}]}})",
            "behavior Sideways"},
           {R"({"normalizer": {"type": "NFKC"}})", "normalizer {\"type\":\"NFKC\"}"},
           {R"({"post_processor": {"type": "BertProcessing"}})", "BertProcessing"},
           {R"({"decoder": null})", "decoder null"},
           {R"({"decoder": {"type": "WordPiece"}})", "WordPiece"}}) {
    EXPECT_THAT(Load(edit), StatusIs(absl::StatusCode::kUnimplemented, name)) << edit;
    EXPECT_THAT(Load(edit), StatusIs(absl::StatusCode::kUnimplemented, "tokenizer.json")) << edit;
  }
}

TEST(TokenizerJson, Load_Malformed_NamesFileAndField) {
  for (const auto& [edit, name] : std::vector<std::pair<std::string, std::string>>{
           {R"({"model": null})", "model is missing"},
           {R"({"model": {"vocab": {"zz": 256}}})", "id 256 belongs to \"ab\" and to \"zz\""},
           {R"({"model": {"vocab": {"zz": -1}}})", "id -1 is not"},
           {R"({"model": {"vocab": {"zz": 1.5}}})", "id 1.5 is not"},
           {R"({"model": {"vocab": {"zz": "1"}}})", "id \"1\" is not"},
           {R"({"model": {"vocab": {"zz": 16777216}}})", "id 16777216 is not"},
           {R"({"model": {"vocab": {"zz": 18446744073709551615}}})", "id 18446744073709551615"},
           {R"({"model": {"vocab": []}})", "model.vocab is not an object"},
           {R"({"model": {"merges": {}}})", "model.merges is not an array"},
           {R"({"model": {"merges": ["a b c"]}})", "model.merges[0] is \"a b c\""},
           {R"({"model": {"merges": ["ab"]}})", "model.merges[0] is \"ab\""},
           {R"({"model": {"merges": [["a"]]}})", "model.merges[0] is [\"a\"]"},
           {R"({"model": {"merges": ["a zzz"]}})", "\"zzz\" is not in the vocabulary"},
           {R"({"model": {"merges": ["b a"]}})", "\"ba\" is not in the vocabulary"},
           {R"({"model": {"merges": ["\u2581 a"]}})", "byte alphabet"},
           {R"({"model": {"ignore_merges": 1}})", "ignore_merges is 1"},
           {R"({"model": {"vocab": {"Z": null}, "unk_token": "none"}})",
            "unk_token \"none\" is not in model.vocab"},
           {R"({"model": {"unk_token": 7}})", "unk_token is 7"},
           {R"({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": null}})",
            "add_prefix_space is missing"},
           {R"({"added_tokens": {}})", "added_tokens is not an array"},
           {R"({"added_tokens": [{"id": 300}]})", "content is missing"},
           {R"({"added_tokens": [{"content": "x"}]})", "\"x\" has no id"},
           {R"({"added_tokens": [{"id": -2, "content": "x"}]})", "id -2 is not"},
           {R"({"added_tokens": [{"id": 300, "content": "<x>"}, {"id": 300, "content": "<y>"}]})",
            "listed twice"},
           {R"({"added_tokens": [{"id": 300, "content": "ab"}]})",
            "\"ab\" has id 300, in model.vocab 256"},
           {R"({"added_tokens": [{"id": 256, "content": "<x>"}]})",
            "id 256 belongs to the added token"}}) {
    const auto tokenizer = Load(edit);
    EXPECT_THAT(tokenizer, StatusIs(absl::StatusCode::kInvalidArgument, name)) << edit;
    EXPECT_THAT(tokenizer, StatusIs(absl::StatusCode::kInvalidArgument, "tokenizer.json")) << edit;
  }
}

TEST(TokenizerJson, Load_Truncated_NamesByte) {
  const std::string json = SmallTokenizerJson();
  for (const size_t size : {size_t{0}, size_t{1}, json.size() / 2, json.size() - 1}) {
    EXPECT_THAT(LoadFiles({{"tokenizer.json", json.substr(0, size)}}),
                StatusIs(absl::StatusCode::kInvalidArgument, "not valid JSON"));
  }
  EXPECT_THAT(LoadFiles({{"tokenizer.json", "[]"}}),
              StatusIs(absl::StatusCode::kInvalidArgument, "where an object is expected"));
}

TEST(TokenizerJson, Load_DeeplyNested_IsRefused) {
  const std::string deep = std::string(500000, '[') + std::string(500000, ']');
  EXPECT_FALSE(LoadFiles({{"tokenizer.json", deep}}).ok());
  std::string json = SmallTokenizerJson(R"({"normalizer": "HERE"})");
  json.replace(json.find("\"HERE\""), 6, deep);
  EXPECT_THAT(LoadFiles({{"tokenizer.json", json}}),
              StatusIs(absl::StatusCode::kInvalidArgument, "nests deeper than 64"));
}

TEST(TokenizerJson, Load_ByteWithoutToken_FailsOnlyOnThatByte) {
  const auto without = Load(R"({"model": {"vocab": {"Z": null}}})");  // a merge patch: no "Z"
  CARREL_ASSERT_OK(without);
  EXPECT_THAT(*(*without)->Encode("ab"), ElementsAre(256));
  EXPECT_THAT((*without)->Encode("aZ"),
              StatusIs(absl::StatusCode::kInvalidArgument, "no token for byte 0x5a"));
}

// Expected ids are those of Hugging Face tokenizers 0.22.
TEST(TokenizerJson, Encode_ByteWithoutToken_BecomesWhatTheFileSays) {
  const auto encode = [](const std::string& model, const std::string& text) {
    const auto tokenizer = Load(absl::StrCat(
        R"({"model": {"vocab": {"Z": null, "Y": null, "\u0123": null, "<unk>": 300, "<0x5A>": 301,
           "<0xC4>": 302, "<0xA3>": 303}, )",
        model, "}}"));
    return tokenizer.ok() ? *(*tokenizer)->Encode(text) : std::vector<TokenId>();
  };
  const std::string unk = R"("unk_token": "<unk>")";
  EXPECT_THAT(encode(unk, "aZZb Y"), ElementsAre('a', 300, 300, 'b', ' ', 300));
  EXPECT_THAT(encode(unk + R"(, "fuse_unk": true)", "aZYb Y"),
              ElementsAre('a', 300, 'b', ' ', 300));
  EXPECT_THAT(encode(R"("byte_fallback": true)", "aZZb\u00C1"),
              ElementsAre('a', 301, 301, 'b', 0xC3, 302, 303));
  // An unknown byte comes after the substitutes that follow it.
  EXPECT_THAT(encode(unk + R"(, "byte_fallback": true)", "aYZb"), ElementsAre('a', 301, 300, 'b'));
}

TEST(TokenizerJson, Encode_MissingByte_IsRefusedWithItsOffsetOrDropped) {
  for (const std::string nfc : {"", R"("normalizer": {"type": "NFC"}, )"}) {
    const auto tokenizer = Load("{" + nfc + R"("model": {"vocab": {"Z": null, "Y": null}}})");
    CARREL_ASSERT_OK(tokenizer);
    EXPECT_THAT((*tokenizer)->Encode("ab<e>abc aZb"),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         "no token for byte 0x5a, at byte offset 10 of 12"));
    Tokenizer::Dropped dropped;
    // What is left is merged as if the byte had never been there.
    EXPECT_THAT(*(*tokenizer)->Encode("ab<e>aZb aZb Y", &dropped),
                ElementsAre(256, 259, 256, ' ', 256, ' '));
    EXPECT_EQ(dropped.bytes, 3);
    EXPECT_EQ(dropped.first_offset, 6);
    EXPECT_EQ(dropped.first_byte, 'Z');
    EXPECT_THAT(*(*tokenizer)->Encode("Z", &dropped), ElementsAre());
    EXPECT_EQ(dropped.bytes, 4);  // counted on
    EXPECT_EQ(dropped.first_offset, 6);
    Tokenizer::Dropped none;
    EXPECT_THAT(*(*tokenizer)->Encode("ab", &none), ElementsAre(256));
    EXPECT_EQ(none.bytes, 0);
    EXPECT_EQ(none.first_offset, -1);
  }
}

TEST(LoadTokenizer, NotByteLevelBesideModel_UsesModel) {
  const auto tokenizer =
      LoadFiles({{"tokenizer.json", SmallTokenizerJson(R"({"pre_tokenizer": null})")},
                 {"tokenizer.model", SmallSentencePieceModel({"\u2581a"})}});
  CARREL_ASSERT_OK(tokenizer);
  EXPECT_THAT(*(*tokenizer)->Encode("a"), ElementsAre(259));
}

TEST(LoadTokenizer, ByteLevelBesideModel_UsesJson) {
  const auto tokenizer = LoadFiles({{"tokenizer.json", SmallTokenizerJson()},
                                    {"tokenizer.model", SmallSentencePieceModel({"\u2581a"})}});
  CARREL_ASSERT_OK(tokenizer);
  EXPECT_THAT(*(*tokenizer)->Encode("a"), ElementsAre('a'));
}

TEST(LoadTokenizer, NoFile_IsNotFound) {
  EXPECT_THAT(LoadFiles({}), StatusIs(absl::StatusCode::kNotFound, "neither tokenizer.json"));
  EXPECT_THAT(LoadTokenizer("/nonexistent"), StatusIs(absl::StatusCode::kNotFound, "/nonexistent"));
}

// Replaces a random node of the document by a random value.
void Mutate(nlohmann::json& node, std::mt19937_64& rng) {
  nlohmann::json* at = &node;
  while (at->is_structured() && !at->empty() && rng() % 5 != 0) {
    at = &*std::next(at->begin(), static_cast<ptrdiff_t>(rng() % at->size()));
  }
  const nlohmann::json values[] = {nullptr,
                                   true,
                                   -1,
                                   3,
                                   1e300,
                                   uint64_t{1} << 63,
                                   "",
                                   "a b",
                                   "BPE",
                                   "ByteLevel",
                                   nlohmann::json::array(),
                                   nlohmann::json::object(),
                                   {"a", "b"},
                                   {{"type", "Sequence"}}};
  *at = values[rng() % std::size(values)];
}

TEST(LoadTokenizer, MutatedJson_NeverCrashes) {
  std::mt19937_64 rng(TestSeed());
  const auto original = nlohmann::json::parse(SmallTokenizerJson(
      R"({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]},
          "pre_tokenizer": {"type": "Sequence", "add_prefix_space": null, "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "\\s+|[^\\s]+"}, "behavior": "Isolated"},
            {"type": "ByteLevel", "add_prefix_space": true, "use_regex": false}]}})"));
  int loaded = 0, refused = 0;
  for (int round = 0; round < 400; ++round) {
    nlohmann::json document = original;
    for (uint64_t i = rng() % 3 + 1; i > 0; --i) Mutate(document, rng);
    const auto tokenizer = LoadFiles({{"tokenizer.json", document.dump()}});
    if (!tokenizer.ok()) {
      ++refused;
      EXPECT_FALSE(tokenizer.status().message().empty());
      continue;
    }
    ++loaded;
    const auto ids = (*tokenizer)->Encode("ab abc\u00E9<e>\n");
    if (ids.ok()) {
      CARREL_EXPECT_OK((*tokenizer)->Decode(*ids, false));
    }
  }
  EXPECT_GT(loaded, 0);
  EXPECT_GT(refused, 0);
}

TEST(LoadTokenizer, MutatedBytes_NeverCrashes) {
  std::mt19937_64 rng(TestSeed());
  const std::string original = SmallTokenizerJson();
  for (int round = 0; round < 400; ++round) {
    std::string bytes = original;
    for (uint64_t i = rng() % 4 + 1; i > 0; --i)
      bytes[rng() % bytes.size()] = static_cast<char>(rng());
    const auto tokenizer = LoadFiles({{"tokenizer.json", bytes}});
    if (tokenizer.ok()) (void)(*tokenizer)->Encode("ab abc");
  }
}

TEST(Tokenizer, Encode_ManyThreads_GiveTheSame) {
  const auto tokenizer = LoadTokenizer(DemoDir());
  CARREL_ASSERT_OK(tokenizer);
  const auto text = ReadFile(DemoDir() + "/docs/registry-512.txt");
  CARREL_ASSERT_OK(text);
  const auto expected = (*tokenizer)->Encode(*text);
  CARREL_ASSERT_OK(expected);
  std::vector<std::thread> threads;
  std::vector<int> equal(4, 0);
  for (size_t i = 0; i < equal.size(); ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < 5; ++round) {
        const auto ids = (*tokenizer)->Encode(*text);
        equal[i] += ids.ok() && *ids == *expected && *(*tokenizer)->Decode(*ids, false) == *text;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(equal, ElementsAre(5, 5, 5, 5));
}

}  // namespace
}  // namespace carrel::model
