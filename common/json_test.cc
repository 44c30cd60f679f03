#include "common/json.h"

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>
#include <string>

#include "common/test_util.h"

namespace carrel {
namespace {

using nlohmann::json;

std::string Nested(int levels) { return std::string(levels, '[') + "1" + std::string(levels, ']'); }

// What the library's own parser makes of a text, which is right where no bound is passed.
json Theirs(const std::string& text) { return json::parse(text, nullptr, false); }

TEST(ParseJson, WhatTheLibraryTakes_IsTheSameDocument) {
  for (const std::string text :
       {"null", "[]", "{}", "1", "-1", "18446744073709551615", "1.5e3", "\"a\\u00e9\\n\"",
        R"({"a":[1,{"b":[]},{}],"c":{"d":null,"e":[true,false]},"a":2})", " [1 , 2]\n"}) {
    const auto parsed = ParseJson(text, "t");
    CARREL_ASSERT_OK(parsed.status()) << text;
    EXPECT_EQ(*parsed, Theirs(text)) << text;
  }
}

TEST(ParseJson, RandomDocuments_ComeBackAsTheyWere) {
  std::mt19937_64 rng(TestSeed());
  const auto below = [&](uint64_t n) { return rng() % n; };
  const std::function<json(int)> draw = [&](int depth) -> json {
    switch (below(depth > 5 ? 5 : 7)) {
      case 0:
        return nullptr;
      case 1:
        return below(2) == 1;
      case 2:
        return static_cast<int64_t>(rng());
      case 3:
        return static_cast<double>(static_cast<int64_t>(rng())) / 1024;
      case 4: {
        std::string text;
        for (uint64_t n = below(8); n > 0; --n) text += static_cast<char>(1 + below(127));
        return text;
      }
      case 5: {
        json list = json::array();
        for (uint64_t n = below(5); n > 0; --n) list.push_back(draw(depth + 1));
        return list;
      }
      default: {
        json object = json::object();
        for (uint64_t n = below(5); n > 0; --n)
          object["f" + std::to_string(below(9))] = draw(depth + 1);
        return object;
      }
    }
  };
  for (int round = 0; round < 2000; ++round) {
    const json drawn = draw(0);
    const std::string text = DumpJson(drawn);
    const auto parsed = ParseJson(text, "t");
    CARREL_ASSERT_OK(parsed.status()) << text;
    EXPECT_EQ(*parsed, drawn);
    EXPECT_EQ(DumpJson(*parsed), text);
  }
}

TEST(ParseJson, MalformedText_NamesTheByte) {
  for (const std::string text : {"", "{", "[1,]", "nul", "{\"a\":}", "{\"a\" 1}", "NaN", "[1] x",
                                 "\"\xff\"", "\"\\ud800\"", "1e999", "{a:1}", "\x1f\x8b\x08"}) {
    const auto parsed = ParseJson(text, "the body");
    EXPECT_THAT(parsed.status(),
                StatusIs(absl::StatusCode::kInvalidArgument, "the body: not valid JSON at byte"))
        << text;
    EXPECT_LT(parsed.status().message().size(), 300u);
  }
  EXPECT_THAT(ParseJson("[1,]", "f").status(),
              StatusIs(absl::StatusCode::kInvalidArgument, "byte 4: syntax error"));
}

TEST(ParseJson, Depth_AtTheBoundIsTaken_BeyondItIsNamed) {
  CARREL_EXPECT_OK(ParseJson(Nested(64), "f.json").status());
  EXPECT_THAT(ParseJson(Nested(65), "f.json").status(),
              StatusIs(absl::StatusCode::kInvalidArgument, "f.json: JSON nests deeper than 64"));
  std::string mixed;
  for (int i = 0; i < 40; ++i) mixed += "{\"a\":[";
  EXPECT_THAT(ParseJson(mixed, "f").status(),
              StatusIs(absl::StatusCode::kInvalidArgument, "deeper than 64"));
  CARREL_EXPECT_OK(ParseJson("[\"" + std::string(1000, '[') + "\"]", "f").status());
  // Ten million levels end at the 65th.
  EXPECT_FALSE(ParseJson(std::string(10'000'000, '['), "f").ok());
}

TEST(ParseJson, ValuesAndBytes_AreBounded) {
  const JsonBounds bounds = {.bytes = 100, .values = 4};
  CARREL_EXPECT_OK(ParseJson("[1,2,3]", "f", bounds).status());
  EXPECT_THAT(ParseJson("[1,2,3,4]", "f", bounds).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, "more than 4 values"));
  EXPECT_THAT(ParseJson("[[],[],[],[]]", "f", bounds).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, "more than 4 values"));
  EXPECT_THAT(ParseJson(std::string(101, ' '), "f", bounds).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, "101 bytes: must be at most 100"));
}

TEST(ParseJson, ANameTwice_IsRefusedWhereNamesAreUnique) {
  EXPECT_EQ(*ParseJson(R"({"a":1,"a":2})", "f"), json({{"a", 2}}));
  EXPECT_THAT(ParseJson(R"({"a":1,"a":2})", "f", {.unique_names = true}).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, "f: the name \"a\" occurs twice"));
  EXPECT_THAT(ParseJson(R"({"b":{"a":1,"a":2}})", "f", {.unique_names = true}).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, "occurs twice"));
}

// Quadratic, this would take hours.
TEST(ParseJson, AMillionNames_AreReadInOnePass) {
  std::string text = "{";
  for (int i = 0; i < 1'000'000; ++i) text += "\"t" + std::to_string(i) + "\":0,";
  text.back() = '}';
  const auto parsed = ParseJson(text, "f", {.unique_names = true});
  CARREL_ASSERT_OK(parsed.status());
  EXPECT_EQ(parsed->size(), 1'000'000u);
}

TEST(ParseJsonObject, AnotherType_IsNamed) {
  EXPECT_THAT(
      ParseJsonObject("[1]", "f").status(),
      StatusIs(absl::StatusCode::kInvalidArgument, "f: a JSON array where an object is expected"));
}

TEST(DumpJson, BytesThatAreNoUtf8_AreReplaced) {
  EXPECT_EQ(DumpJson(json("a\xff")), "\"a\xef\xbf\xbd\"");
  EXPECT_EQ(DumpJson(json("\xc3\xa9"), JsonLetters::kAscii), "\"\\u00e9\"");
}

TEST(ShownJson, IsBounded_WhateverTheValue) {
  json list = json::array();
  for (int i = 0; i < 100000; ++i) list.push_back(i);
  EXPECT_EQ(ShownJson(json({1, "a"})), "[1,\"a\"]");
  EXPECT_EQ(ShownJson(json({{"k", {1, nullptr}}})), "{\"k\":[1,null]}");
  EXPECT_LE(ShownJson(list).size(), 83u);
  EXPECT_LE(ShownJson(json(std::string(1 << 20, 'x')), 20).size(), 23u);
  EXPECT_EQ(ShownJson(json("\x1b\xff")), "\"\\u001b\\ufffd\"");
}

TEST(JsonFields, WrongTypes_AreNamedWithValueAndBound) {
  const json object = {{"n", "x"}, {"b", 1}, {"s", {1}}, {"big", UINT64_MAX}, {"nothing", nullptr}};
  const JsonFields fields("", object);
  EXPECT_THAT(fields.Int("n", 0, 9).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, "n=\"x\" is not an integer"));
  EXPECT_THAT(fields.Int("big", 0, 9).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, "is outside [0, 9]"));
  EXPECT_THAT(fields.BoolOr("b", true).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, "b=1 is not true or false"));
  EXPECT_THAT(fields.StringOr("s", "").status(),
              StatusIs(absl::StatusCode::kInvalidArgument, "s=[1] is not a string"));
  EXPECT_THAT(fields.ArrayOr("n").status(),
              StatusIs(absl::StatusCode::kInvalidArgument, "n=\"x\" is not a list"));
  EXPECT_THAT(fields.ObjectOr("s").status(),
              StatusIs(absl::StatusCode::kInvalidArgument, "s=[1] is not an object"));
  EXPECT_THAT(fields.String("nothing").status(),
              StatusIs(absl::StatusCode::kInvalidArgument, "nothing is missing"));
  EXPECT_EQ(*fields.StringOr("nothing", "else"), "else");
  EXPECT_EQ(*fields.ArrayOr("nothing"), nullptr);
  EXPECT_TRUE(fields.IsNull("nothing"));
}

// A name is as somebody wrote it, and may be as long as a file.
TEST(JsonFields, NamesInMessages_AreBoundedAndShowNoControls) {
  const json object = {{std::string(1000000, 'z'), 1}, {"a\x1b[2J", 1}};
  for (const auto& [name, value] : object.items()) {
    const json one = {{name, value}};
    const absl::Status refused = RefuseUnknownFields(JsonFields("f", one), {});
    EXPECT_EQ(refused.code(), absl::StatusCode::kUnimplemented);
    EXPECT_LT(refused.message().size(), 1000u);
    EXPECT_EQ(refused.message().find('\x1b'), absl::string_view::npos);
  }
}

TEST(JsonAt, WhatIsNotThere_IsNull_WhatIsOfAnotherType_TheFallback) {
  const json value = {{"a", {{"b", 3}}}, {"t", "x"}, {"list", {1, "two"}}};
  EXPECT_EQ(JsonInt(JsonAt(value, {"a", "b"})), 3);
  EXPECT_EQ(JsonInt(JsonAt(value, {"list", "0"})), 1);
  EXPECT_EQ(JsonText(JsonAt(value, {"list", "1"})), "two");
  EXPECT_EQ(JsonAt(value, {"list", "2"}), nullptr);
  EXPECT_EQ(JsonAt(value, {"t", "b"}), nullptr);
  EXPECT_EQ(JsonAt(json(5), {"t"}), nullptr);
  EXPECT_EQ(JsonText(JsonAt(value, {"a"}), "none"), "none");
  EXPECT_EQ(JsonNumber(JsonAt(value, {"t"}), 0.5), 0.5);
  EXPECT_TRUE(JsonBool(nullptr, true));
  EXPECT_EQ(JsonInt(JsonAt(json({{"n", UINT64_MAX}}), {"n"}), -1), -1);
}

}  // namespace
}  // namespace carrel
