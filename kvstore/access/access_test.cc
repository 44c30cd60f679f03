#include "kvstore/access/access.h"

#include <sys/stat.h>

#include <filesystem>

#include "absl/strings/escaping.h"
#include "absl/time/clock.h"
#include "common/checksum.h"
#include "common/file.h"
#include "common/status.h"
#include "common/test_util.h"
#include "kvstore/access/admission.h"
#include "kvstore/access/kept_name.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;

class AccessTest : public testing::Test {
 protected:
  // Entries without the list around them; %NAME% stands for the SHA-256 of the key NAME.
  void Write(const std::string& keys, const std::string& tenants = "") {
    std::string text = absl::StrCat("{\"tenants\": [", tenants, "], \"keys\": [", keys, "]}");
    for (size_t at; (at = text.find('%')) != std::string::npos;) {
      const size_t end = text.find('%', at + 1);
      text.replace(at, end - at + 1, Sha256Hex(text.substr(at + 1, end - at - 1)));
    }
    CARREL_CHECK(WriteFileAtomically(path_, text).ok());
  }
  std::shared_ptr<Access> Open(absl::Duration interval = absl::Hours(1)) {
    auto access = Access::Create(path_, interval);
    CARREL_EXPECT_OK(access);
    return *std::move(access);
  }
  static Caller WithKey(const std::string& key) { return {.peer = "test", .key = key}; }

  const std::string path_ = FreshTempDir() + "/keys.json";
};

constexpr char kReader[] = R"({"name": "reader", "sha256": "%one%", "rights": ["list", "open"]})";

TEST_F(AccessTest, Caller_IsFoundByWhatHePresents) {
  Write(absl::StrCat(kReader, R"(, {"name": "cert", "certificate": "a.example", "rights": "open"},
                                   {"name": "user", "uid": 7, "rights": "delete"})"));
  const auto access = Open();
  const auto name = [&](const Caller& caller) {
    const auto principal = access->Admit(caller);
    return principal.ok() ? (*principal)->name() : std::string(principal.status().message());
  };
  EXPECT_EQ(name(WithKey("one")), "reader");
  EXPECT_EQ(name({.certificate_names = {"x", "a.example"}}), "cert");
  EXPECT_EQ(name({.local = true, .uid = 7}), "user");
  // A key that is wrong is not made good by what else he has.
  EXPECT_EQ(name({.local = true, .uid = 7, .key = "two"}),
            "the key that was presented is not valid here");
  for (const Caller& caller : {Caller{}, Caller{.local = true}, Caller{.local = true, .uid = 0},
                               Caller{.certificate_names = {"b.example"}}}) {
    const auto refused = access->Admit(caller);
    EXPECT_THAT(refused, StatusIs(StatusCode::kUnauthenticated, "a key is needed here"));
  }
}

TEST_F(AccessTest, Anonymous_IsWhoPresentsNothing) {
  Write(R"({"name": "guest", "anonymous": true, "rights": ["list"]})");
  const auto access = Open();
  EXPECT_EQ((*access->Admit({}))->name(), "guest");
  EXPECT_THAT(access->Admit(WithKey("one")), StatusIs(StatusCode::kUnauthenticated, "not valid"));
}

TEST_F(AccessTest, WithoutKeysFile_LocalMayAllAndOthersRead) {
  const auto access = Access::Open();
  EXPECT_FALSE(access->has_keys());
  const auto rights = [&](const Caller& caller) {
    Rights rights;
    for (const Right right :
         {Right::kList, Right::kOpen, Right::kImport, Right::kDelete, Right::kAdmin}) {
      if ((*access->Admit(caller))->Check(right).ok()) rights.Add(right);
    }
    return rights;
  };
  const Rights reads = {Right::kList, Right::kOpen};
  EXPECT_EQ(rights({.local = true}), Rights::All());
  EXPECT_EQ(rights({}), reads);
  EXPECT_EQ(rights({.certificate_names = {"a"}}), reads);
  EXPECT_EQ((*access->Admit({.certificate_names = {"a"}}))->name(), "certificate a");
  EXPECT_THAT(
      (*access->Admit({}))->Check(Right::kDelete),
      StatusIs(
          StatusCode::kPermissionDenied,
          "no key was presented, and who presents none lacks the right delete (has: list open)"));
  EXPECT_EQ(Access::Open(true)->Admit({}).value()->Check(Right::kDelete), absl::OkStatus());
}

TEST_F(AccessTest, Contexts_AreTheGlobsWithinTheTenant) {
  Write(
      R"({"name": "k", "sha256": "%k%", "rights": "open", "contexts": ["acme.a*", "other*"], "tenant": "acme"},
           {"name": "all", "sha256": "%all%", "rights": "open"})",
      R"({"name": "acme", "prefix": "acme."})");
  const auto access = Open();
  const auto principal = *access->Admit(WithKey("k"));
  EXPECT_TRUE(principal->Sees("acme.abc"));
  EXPECT_FALSE(principal->Sees("acme.b"));
  EXPECT_FALSE(principal->Sees("other"));  // not within the tenant
  EXPECT_FALSE(principal->SeesAll());
  EXPECT_TRUE((*access->Admit(WithKey("all")))->SeesAll());
}

// Whatever its globs, and whatever its name: a file makes nobody the machine's owner.
TEST_F(AccessTest, WhatAKeyKeeps_IsItsOwn_ToSeeAndToAdd) {
  Write(R"({"name": "alice", "sha256": "%alice%", "rights": ["list", "import"]},
           {"name": "bob", "sha256": "%bob%", "rights": ["list", "import"]},
           {"name": "local", "sha256": "%local%", "rights": ["list", "import"]})");
  const auto access = Open();
  const std::string kept = KeptName("", "alice", Sha256Hex("tokens"));
  Admission admission(access, nullptr);
  for (const char* key : {"alice", "bob", "local"}) {
    const bool hers = std::string(key) == "alice";
    EXPECT_EQ((*access->Admit(WithKey(key)))->Sees(kept), hers) << key;
    auto visit = admission.Admit(WithKey(key), "ContextService.Import");
    CARREL_ASSERT_OK(visit);
    EXPECT_EQ(visit->AllowNew(kept).ok(), hers) << key;
    CARREL_EXPECT_OK(visit->AllowNew("another"));
  }
  const auto without_keys = Access::Open();
  EXPECT_TRUE((*without_keys->Admit({.local = true}))->Sees(kept));
  EXPECT_FALSE((*without_keys->Admit({}))->Sees(kept));
}

// Whose words they are nobody knows any more.
TEST_F(AccessTest, WhatIsKeptOfNobodyInParticular_IsThereForAdministrators) {
  Write(R"({"name": "all", "sha256": "%all%", "rights": ["list", "open", "import", "delete"]},
           {"name": "admin", "sha256": "%admin%", "rights": ["list", "admin"]},
           {"name": "narrow", "sha256": "%narrow%", "rights": ["admin"], "contexts": "a-*"})");
  const auto access = Open();
  const std::string nobodys = KeptName("", "", Sha256Hex("tokens")),
                    alices = KeptName("", "alice", Sha256Hex("tokens"));
  Admission admission(access, nullptr);
  for (const char* key : {"all", "admin", "narrow"}) {
    const auto who = *access->Admit(WithKey(key));
    EXPECT_EQ(who->Sees(nobodys), std::string(key) == "admin") << key;
    EXPECT_FALSE(who->Sees(alices)) << key;
  }
  auto visit = admission.Admit(WithKey("all"), "ContextService.Import");
  CARREL_ASSERT_OK(visit);
  EXPECT_FALSE(visit->AllowNew(nobodys).ok());
  const auto without_keys = Access::OpenWithToken("token");
  EXPECT_TRUE((*without_keys->Admit({.local = true}))->Sees(nobodys));
  EXPECT_TRUE((*without_keys->Admit(WithKey("token")))->Sees(nobodys));
  EXPECT_FALSE((*without_keys->Admit({}))->Sees(nobodys));
}

TEST_F(AccessTest, FileThatChanges_IsFollowedByWhoIsThereAlready) {
  Write(kReader);
  const auto access = Open(absl::Milliseconds(1));
  const auto reader = *access->Admit(WithKey("one"));
  CARREL_EXPECT_OK(reader->Check(Right::kOpen));
  // A second key beside the first, and fewer rights.
  Write(R"({"name": "reader", "sha256": ["%one%", "%two%"], "rights": ["list"]})");
  while (access->generation() < 2) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(*access->Admit(WithKey("two")), reader);
  EXPECT_THAT(reader->Check(Right::kOpen),
              StatusIs(StatusCode::kPermissionDenied, "lacks the right open"));
  // A broken file changes nothing.
  CARREL_ASSERT_OK(WriteFileAtomically(path_, "{\"keys\": [}"));
  while (access->failed_reloads() < 1) absl::SleepFor(absl::Milliseconds(1));
  CARREL_EXPECT_OK(access->Admit(WithKey("two")));
  // And a file that is gone does not, either.
  std::filesystem::remove(path_);
  while (access->failed_reloads() < 2) absl::SleepFor(absl::Milliseconds(1));
  CARREL_EXPECT_OK(access->Admit(WithKey("one")));
  Write("");
  while (access->generation() < 3) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_THAT(reader->Check(Right::kList),
              StatusIs(StatusCode::kUnauthenticated, "key reader was withdrawn"));
  EXPECT_THAT(access->Admit(WithKey("one")), StatusIs(StatusCode::kUnauthenticated, "not valid"));
}

TEST_F(AccessTest, AVisit_IsAllowedUntilItsKeyOrItsContextIsWithdrawn) {
  const auto write = [&](const std::string& contexts) {
    Write(absl::StrCat(R"({"name": "k", "sha256": "%k%", "rights": "open", "contexts": ")",
                       contexts, "\"}, ", kReader));
  };
  write("a-*");
  const auto access = Open();
  Admission admission(access, nullptr);
  const auto visit = [&](const std::string& context) {
    auto made = admission.Admit(WithKey("k"), "POST /v1/completions");
    CARREL_EXPECT_OK(made);
    CARREL_EXPECT_OK(made->Allow("POST /v1/completions", context));
    return *std::move(made);
  };
  const Visit seen = visit("a-1"), unseen = visit("b-1"), of_none = visit("");
  for (const Visit* one : {&seen, &unseen, &of_none}) CARREL_EXPECT_OK(one->StillAllowed());
  write("c-*");
  CARREL_ASSERT_OK(access->Reload());
  EXPECT_THAT(seen.StillAllowed(),
              StatusIs(StatusCode::kPermissionDenied, "the context was withdrawn"));
  CARREL_EXPECT_OK(unseen.StillAllowed());  // is told NotFound, as before
  CARREL_EXPECT_OK(of_none.StillAllowed());
  Write(kReader);
  CARREL_ASSERT_OK(access->Reload());
  for (const Visit* one : {&seen, &unseen, &of_none}) {
    EXPECT_EQ(one->StillAllowed().code(), StatusCode::kPermissionDenied);
  }
}

TEST_F(AccessTest, Expiry_EndsTheKey) {
  Write(R"({"name": "k", "sha256": "%k%", "rights": "open", "expires": "2027-01-01T00:00:00Z"})");
  const auto principal = *Open()->Admit(WithKey("k"));
  const absl::Time end = absl::FromUnixSeconds(1798761600);
  CARREL_EXPECT_OK(principal->Check(Right::kOpen, end - absl::Milliseconds(1)));
  EXPECT_THAT(principal->Check(Right::kOpen, end),
              StatusIs(StatusCode::kUnauthenticated, "key k expired at 2027-01-01"));
}

TEST_F(AccessTest, Sessions_AreBoundedPerKeyAndPerTenant) {
  Write(R"({"name": "a", "sha256": "%a%", "rights": "open", "sessions": 2, "tenant": "t"},
           {"name": "b", "sha256": "%b%", "rights": "open", "tenant": "t"})",
        R"({"name": "t", "prefix": "t.", "sessions": 3})");
  const auto access = Open();
  const auto a = *access->Admit(WithKey("a")), b = *access->Admit(WithKey("b"));
  auto one = a->TakeSession(), two = a->TakeSession();
  CARREL_ASSERT_OK(one);
  CARREL_ASSERT_OK(two);
  EXPECT_THAT(a->TakeSession(),
              StatusIs(StatusCode::kResourceExhausted, "key a: 2 sessions are open (sessions=2)"));
  auto three = b->TakeSession();
  CARREL_ASSERT_OK(three);
  EXPECT_THAT(b->TakeSession(), StatusIs(StatusCode::kResourceExhausted,
                                         "tenant t: 3 sessions are open (sessions=3)"));
  CARREL_ASSERT_OK(access->Reload());  // what is open stays counted
  EXPECT_FALSE(b->TakeSession().ok());
  *one = nullptr;
  CARREL_EXPECT_OK(b->TakeSession());
  EXPECT_EQ(a->counts().sessions, 1);
  EXPECT_EQ(a->turn(), b->turn());
}

TEST_F(AccessTest, Turns_AreTheKeysOwnWithoutATenant) {
  Write(
      R"({"name": "a", "sha256": "%a%", "rights": "open"}, {"name": "b", "sha256": "%b%", "rights": "open"})");
  const auto access = Open();
  const auto a = *access->Admit(WithKey("a")), b = *access->Admit(WithKey("b"));
  EXPECT_NE(a->turn(), b->turn());
  EXPECT_EQ(a->turn(), (*access->Admit(WithKey("a")))->turn());
}

TEST(RateLimitTest, Spending_IsPaidBackAtTheRate) {
  RateLimit limit;
  const absl::Time start = absl::FromUnixSeconds(1000);
  EXPECT_EQ(limit.Spend(1e12, start), absl::ZeroDuration());  // no rate, no bound
  limit.SetRate(10);
  EXPECT_EQ(limit.Spend(10, start), absl::ZeroDuration());  // a second's worth at once
  EXPECT_EQ(limit.Spend(5, start), absl::Milliseconds(500));
  EXPECT_EQ(limit.Spend(0, start + absl::Milliseconds(300)), absl::Milliseconds(200));
  EXPECT_EQ(limit.Spend(0, start + absl::Milliseconds(500)), absl::ZeroDuration());
  EXPECT_EQ(limit.Spend(11, start + absl::Hours(1)), absl::Milliseconds(100));  // no more is saved
  EXPECT_EQ(limit.Spend(0, start), absl::Milliseconds(100));  // the clock went back
}

}  // namespace
}  // namespace carrel::kvstore
