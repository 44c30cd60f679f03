#include "kvstore/access/keys_file.h"

#include <sys/stat.h>

#include <set>

#include "absl/strings/escaping.h"
#include "common/checksum.h"
#include "common/file.h"
#include "common/test_util.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;

std::string Hex(const std::string& key) { return Sha256Hex(key); }

TEST(KeysFileTest, EveryField_IsRead) {
  const auto file = ParseKeysFile(absl::StrCat(R"({
    "tenants": [{"name": "acme", "prefix": "acme.", "bytes": 1000, "contexts": 3, "sessions": 2}],
    "keys": [
      {"name": "a", "sha256": [")",
                                               Hex("one"), R"(", ")", Hex("two"),
                                               R"("], "rights": ["list", "open"],
       "contexts": ["acme.*", "b?"], "tenant": "acme", "sessions": 4, "requests_per_second": 2.5,
       "bytes_per_second": 1e6, "expires": "2027-01-31T12:00:00+01:00"},
      {"name": "b", "certificate": "client.example", "rights": "admin"},
      {"name": "c", "uid": 0, "rights": ["delete"]},
      {"name": "d", "anonymous": true, "rights": ["list"]}]})"));
  CARREL_ASSERT_OK(file);
  ASSERT_EQ(file->entries.size(), 4u);
  const AccessEntry& a = file->entries[0];
  EXPECT_EQ(a.name, "a");
  EXPECT_EQ(a.identity.key_sha256,
            (std::vector<std::string>{AccessKeySha256("one"), AccessKeySha256("two")}));
  EXPECT_EQ(a.rights, (Rights{Right::kList, Right::kOpen}));
  EXPECT_EQ(a.contexts, (std::vector<std::string>{"acme.*", "b?"}));
  EXPECT_EQ(a.tenant, "acme");
  EXPECT_EQ(a.limits.sessions, 4);
  EXPECT_EQ(a.limits.requests_per_s, 2.5);
  EXPECT_EQ(a.limits.bytes_per_s, 1e6);
  EXPECT_EQ(a.expires, absl::FromUnixSeconds(1801393200));
  EXPECT_EQ(file->entries[1].identity.certificate, "client.example");
  EXPECT_EQ(file->entries[1].rights, Rights{Right::kAdmin});
  EXPECT_EQ(file->entries[1].expires, absl::InfiniteFuture());
  EXPECT_EQ(file->entries[1].contexts, std::vector<std::string>{"*"});
  EXPECT_EQ(file->entries[2].identity.uid, 0u);
  EXPECT_TRUE(file->entries[3].identity.anonymous);
  ASSERT_EQ(file->tenants.size(), 1u);
  EXPECT_EQ(file->tenants[0].prefix, "acme.");
  EXPECT_EQ(file->tenants[0].max_bytes, 1000);
  EXPECT_EQ(file->tenants[0].max_contexts, 3);
  EXPECT_EQ(file->tenants[0].max_sessions, 2);
}

TEST(KeysFileTest, WhatIsWrong_IsNamed) {
  const std::string key =
      absl::StrCat(R"("name": "k", "sha256": ")", Hex("k"), R"(", "rights": ["open"])");
  const auto with = [&](const std::string& more) {
    return absl::StrCat(R"({"keys": [{)", key, more, "}]}");
  };
  CARREL_EXPECT_OK(ParseKeysFile(with("")));
  CARREL_EXPECT_OK(ParseKeysFile("{}"));
  const std::pair<std::string, std::string> cases[] = {
      {"", "not valid JSON"},
      {"[]", "where an object is expected"},
      {R"({"key": []})", "\"key\" is unknown"},
      {R"({"keys": {}})", "\"keys\" is no list"},
      {R"({"keys": [1]})", "key 1 is no object"},
      {R"({"keys": [{}]})", "key 1: \"name\" is missing"},
      {with(R"(, "sessons": 1)"), "key 1 (k): \"sessons\" is unknown"},
      {with(R"(, "sessions": -1)"), "\"sessions\" is no whole number"},
      {with(R"(, "sessions": 1.5)"), "\"sessions\" is no whole number"},
      {with(R"(, "requests_per_second": 0)"), "\"requests_per_second\" is no number above 0"},
      {with(R"(, "bytes_per_second": "1")"), "\"bytes_per_second\" is no number above 0"},
      {with(R"(, "expires": "tomorrow")"), "\"expires\" is no time"},
      {with(R"(, "contexts": [])"), "\"contexts\" is empty"},
      {with(R"(, "contexts": [1])"), "\"contexts\" is no list of strings"},
      {with(R"(, "tenant": "t")"), "there is no tenant \"t\""},
      {with(R"(, "uid": 1)"), "exactly one"},
      {with(R"(, "uid": 4294967295)"), "\"uid\" is no whole number"},
      {R"({"keys": [{"name": "k", "rights": ["open"]}]})", "exactly one"},
      {R"({"keys": [{"name": "k", "sha256": "00", "rights": ["open"]}]})", "64 hexadecimal"},
      {R"({"keys": [{"name": "k", "uid": 1}]})", "\"rights\" is missing"},
      {R"({"keys": [{"name": "k", "uid": 1, "rights": ["write"]}]})", "\"write\" is no right"},
      {R"({"keys": [{"name": "a\u001b", "uid": 1, "rights": ["open"]}]})", "control character"},
      {absl::StrCat("{\"keys\": [{", key, "}, {", key, "}]}"), "key \"k\" is there twice"},
      {R"({"keys": [{"name": "a", "uid": 1, "rights": "open"}, {"name": "b", "uid": 1, "rights": "open"}]})",
       "another entry has the same identity"},
      {R"({"tenants": [{"name": "t"}]})", "\"prefix\" is missing"},
      {R"({"tenants": [{"name": "t", "prefix": "a"}, {"name": "u", "prefix": "ab"}]})",
       "they would share contexts"},
      {R"({"tenants": [{"name": "t", "prefix": "a"}, {"name": "t", "prefix": "b"}]})", "twice"},
      {std::string(100000, '['), "nests"},
  };
  for (const auto& [text, why] : cases) {
    EXPECT_THAT(ParseKeysFile(text), StatusIs(StatusCode::kInvalidArgument, why))
        << text.substr(0, 200);
  }
}

TEST(KeysFileTest, FileThatEverybodyMayWrite_IsRefused) {
  const std::string path = FreshTempDir() + "/keys.json";
  CARREL_ASSERT_OK(WriteFileAtomically(path, "{}"));
  CARREL_EXPECT_OK(ReadKeysFile(path));
  ASSERT_EQ(chmod(path.c_str(), 0666), 0);
  EXPECT_THAT(ReadKeysFile(path), StatusIs(StatusCode::kInvalidArgument, "mode 0666"));
  EXPECT_THAT(ReadKeysFile(path + ".none"), StatusIs(StatusCode::kNotFound, "keys file"));
}

TEST(KeysFileTest, Glob_MatchesWholeNames) {
  const std::tuple<const char*, const char*, bool> cases[] = {
      {"*", "", true},           {"*", "a", true},           {"", "", true},
      {"", "a", false},          {"a", "a", true},           {"a", "ab", false},
      {"a*", "a", true},         {"a*", "abc", true},        {"*c", "abc", true},
      {"*c", "abcd", false},     {"a?c", "abc", true},       {"a?c", "ac", false},
      {"*b*", "abc", true},      {"*b*d", "abcbd", true},    {"*ab", "aab", true},
      {"**", "x", true},         {"a*b*c", "aXbYbZc", true}, {"a*b*c", "aXbYbZ", false},
      {"acme.*", "acme", false},
  };
  for (const auto& [glob, name, matches] : cases) {
    EXPECT_EQ(MatchesGlob(glob, name), matches) << glob << " " << name;
  }
}

TEST(KeysFileTest, NewKeys_DifferAndHashAsTheyAreWritten) {
  std::set<std::string> seen;
  for (int i = 0; i < 100; ++i) {
    const std::string key = NewAccessKey();
    EXPECT_EQ(key.size(), 50u) << key;
    EXPECT_TRUE(seen.insert(key).second);
    EXPECT_EQ(absl::BytesToHexString(AccessKeySha256(key)), Sha256Hex(key));
  }
}

}  // namespace
}  // namespace carrel::kvstore
