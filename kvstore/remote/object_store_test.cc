// The client against servers that others wrote: what is signed, asked and understood is right there, or only
// here. Skipped where the machine has neither (object_server.h).
#include <atomic>
#include <filesystem>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/certificate_test_util.h"
#include "common/checksum.h"
#include "common/hmac.h"
#include "common/test_util.h"
#include "kvstore/remote/object_server.h"
#include "kvstore/remote/remote_test_util.h"
#include "kvstore/remote/s3_client.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;
using Kind = ObjectServer::Kind;

// One server of each kind for all tests, which have keys of their own; it ends with the program.
class World {
 public:
  explicit World(Kind kind) : server_(ObjectServer::Start(kind, folder_)) {
    if (server_ == nullptr) return;
    client_ = TestClient(server_->endpoint());
    // An S3 server of its own makes a bucket by PUT of it, which no command of ours does.
    for (int i = 0; i < 50 && !client_->Put("", "").ok(); ++i)
      absl::SleepFor(absl::Milliseconds(200));
  }
  S3Client* client() const { return client_.get(); }
  const std::string& endpoint() const { return server_->endpoint(); }

 private:
  const std::string folder_ = testing::TempDir() + absl::StrCat("carrel_store_", getpid());
  std::unique_ptr<ObjectServer> server_;
  std::unique_ptr<S3Client> client_;
};

class ObjectStoreTest : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    static std::map<Kind, std::unique_ptr<World>>& worlds =
        *new std::map<Kind, std::unique_ptr<World>>;
    static const int removed = std::atexit([] { Worlds(nullptr); });
    (void)removed;
    Worlds(&worlds);
    if (worlds[GetParam()] == nullptr) worlds[GetParam()] = std::make_unique<World>(GetParam());
    world_ = worlds[GetParam()].get();
    if (world_->client() == nullptr) GTEST_SKIP() << "this machine has no such server";
    client_ = world_->client();
  }
  // Remembers them; null: ends them.
  static void Worlds(std::map<Kind, std::unique_ptr<World>>* worlds) {
    static std::map<Kind, std::unique_ptr<World>>* remembered = nullptr;
    if (worlds == nullptr && remembered != nullptr) remembered->clear();
    if (worlds != nullptr) remembered = worlds;
  }
  std::string ReadAll(const std::string& key) {
    const auto bytes = client_->Read(key, 64 << 20);
    return bytes.ok() ? *bytes : bytes.status().ToString();
  }
  World* world_ = nullptr;
  S3Client* client_ = nullptr;
};

TEST_P(ObjectStoreTest, Keys_OfAnySpelling_ComeBackAsTheyWere) {
  std::vector<std::string> keys, found;
  for (const char* spelled : {"a b", "a+b", "a~b", "a:b", "a=b", "a,b", "a@b", "a(b)", "\xc3\xa4",
                              "a%b", "a'b", "a!b", "a&b", "a$b", "a*b"}) {
    keys.push_back(absl::StrCat("spelled/", spelled));
    CARREL_ASSERT_OK(client_->Put(keys.back(), spelled));
    EXPECT_EQ(ReadAll(keys.back()), spelled);
  }
  std::sort(keys.begin(), keys.end());
  CARREL_ASSERT_OK(client_->ForEach("spelled/", [&](const ListedObject& object) {
    found.push_back(object.key);
    return absl::OkStatus();
  }));
  EXPECT_EQ(found, keys);
}

TEST_P(ObjectStoreTest, Conditions_HoldOrRefuse) {
  const auto etag = client_->Put("cond", "one", Condition::Absent());
  CARREL_ASSERT_OK(etag);
  EXPECT_THAT(client_->Put("cond", "two", Condition::Absent()),
              StatusIs(StatusCode::kAlreadyExists, "cond"));
  EXPECT_EQ(ReadAll("cond"), "one");
  EXPECT_THAT(
      client_->Put("cond", "two", Condition::IfMatch("\"00000000000000000000000000000000\"")),
      StatusIs(StatusCode::kAborted, "cond"));
  CARREL_EXPECT_OK(client_->Put("cond", "two", Condition::IfMatch(*etag)));
  EXPECT_EQ(ReadAll("cond"), "two");
  CARREL_EXPECT_OK(client_->Remove("cond"));
  CARREL_EXPECT_OK(client_->Put("cond", "three", Condition::Absent()));
}

TEST_P(ObjectStoreTest, RangesAndPages) {
  std::string bytes(100'000, 'x');
  bytes.replace(5'000, 3, "abc");
  CARREL_ASSERT_OK(client_->Put("range", bytes));
  std::string part;
  const auto info =
      client_->Get("range", {.begin = 4'999, .end = 5'004}, [&](absl::string_view piece) {
        part.append(piece.data(), piece.size());
        return absl::OkStatus();
      });
  CARREL_ASSERT_OK(info);
  EXPECT_EQ(part, "xabcx");
  EXPECT_EQ(info->size, 100'000);
  EXPECT_LT(absl::AbsDuration(info->server_time - absl::Now()), absl::Minutes(1));
  EXPECT_THAT(client_->Get("range", {.begin = 200'000, .end = 200'001},
                           [](absl::string_view) { return absl::OkStatus(); }),
              StatusIs(StatusCode::kDataLoss, "ends before"));
  for (int i = 0; i < 25; ++i)
    CARREL_ASSERT_OK(client_->Put(absl::StrCat("page/", 100 + i, "/x"), "x"));
  std::vector<std::string> found;
  std::string token;
  int pages = 0;
  do {
    const auto page = client_->List("page/", token, 10);
    CARREL_ASSERT_OK(page);
    for (const auto& object : page->objects) found.push_back(object.key);
    token = page->next;
    ++pages;
  } while (!token.empty() && pages < 9);
  EXPECT_EQ(found.size(), 25u);
  EXPECT_TRUE(std::is_sorted(found.begin(), found.end()));
  EXPECT_EQ(pages, 3);
}

TEST_P(ObjectStoreTest, Upload_InParts_CanBeLookedAtCompletedAndAborted) {
  const std::string first(5 << 20, 'a'), second(1000, 'b');
  const auto id = client_->BeginUpload("parts");
  CARREL_ASSERT_OK(id);
  const auto one = client_->UploadPart("parts", *id, 1, first);
  const auto two = client_->UploadPart("parts", *id, 2, second);
  CARREL_ASSERT_OK(one);
  CARREL_ASSERT_OK(two);
  EXPECT_THAT(client_->Head("parts"), StatusIs(StatusCode::kNotFound, "parts"));
  const auto listed = client_->ListParts("parts", *id);
  CARREL_ASSERT_OK(listed);
  ASSERT_EQ(listed->size(), 2u);
  EXPECT_EQ(listed->at(1).size, 1000);
  EXPECT_TRUE(listed->at(1).etag.find(Md5Hex(second)) != std::string::npos ||
              listed->at(1).sha256 == two->sha256)
      << "nothing tells which bytes a part has: " << listed->at(1).etag;
  const auto uploads = client_->ListUploads("parts");
  CARREL_ASSERT_OK(uploads);
  EXPECT_EQ(uploads->size(), 1u);
  CARREL_ASSERT_OK(client_->CompleteUpload("parts", *id, {*one, *two}));
  EXPECT_TRUE(ReadAll("parts") == first + second);
  const auto other = client_->BeginUpload("parts2");
  CARREL_ASSERT_OK(client_->AbortUpload("parts2", *other));
  EXPECT_THAT(client_->ListParts("parts2", *other), StatusIs(StatusCode::kNotFound, "parts2"));
}

TEST_P(ObjectStoreTest, Races_OfTwentyConditionalPuts_HaveOneWinner) {
  if (GetParam() == Kind::kMoto) GTEST_SKIP() << "races are not asked of moto";
  for (int round = 0; round < 3; ++round) {  // a round takes SeaweedFS some seconds
    const std::string key = absl::StrCat("race/", round);
    std::atomic<int> won{0};
    std::atomic<int> winner{-1};
    std::vector<std::thread> threads;
    for (int i = 0; i < 20; ++i) {
      threads.emplace_back([&, i] {
        const auto put = client_->Put(key, absl::StrCat("by ", i), Condition::Absent());
        if (put.ok()) {
          ++won;
          winner = i;
        } else {
          EXPECT_THAT(put, StatusIs(StatusCode::kAlreadyExists, "PreconditionFailed"));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(won, 1);
    EXPECT_EQ(ReadAll(key), absl::StrCat("by ", winner.load()));
  }
}

TEST_P(ObjectStoreTest, WrongSecretsUnknownKeysAndReaders_AreRefusedByName) {
  if (GetParam() == Kind::kMoto) GTEST_SKIP() << "moto knows no credentials";
  const auto refused = [&](const Credentials& credentials) {
    const auto put = TestClient(world_->endpoint(), credentials)->Put("k", "x");
    EXPECT_EQ(put.status().ToString().find("SECRET"), std::string::npos);
    return put.status();
  };
  EXPECT_THAT(refused({"test-access", "SECRET-that-is-wrong"}),
              StatusIs(StatusCode::kUnauthenticated, "SignatureDoesNotMatch"));
  EXPECT_THAT(refused({"nobody", "SECRET"}),
              StatusIs(StatusCode::kUnauthenticated, "InvalidAccessKeyId"));
  EXPECT_THAT(refused({"reader-access", "reader-secret-0123456789"}),
              StatusIs(StatusCode::kPermissionDenied, "AccessDenied"));
  CARREL_ASSERT_OK(client_->Put("readable", "x"));
  CARREL_EXPECT_OK(TestClient(world_->endpoint(), {"reader-access", "reader-secret-0123456789"})
                       ->Read("readable", 9));
}

TEST_P(ObjectStoreTest, Tls_WithItsAuthorityAndWithout) {
  const std::string folder = FreshTempDir();
  const TestAuthority authority;
  TestAuthority::Write(folder, authority.Issue({.common_name = "store", .dns = "localhost"}),
                       authority.certificate());
  const TlsFiles files{folder + "/certificate.pem", folder + "/key.pem", folder + "/ca.pem"};
  const auto server = ObjectServer::Start(GetParam(), folder + "/store", &files);
  ASSERT_NE(server, nullptr);
  S3Config config = TestConfig(server->endpoint());
  config.ca_file = files.ca;
  const auto client = S3Client::Create(config, GivenCredentials(kTestCredentials));
  for (int i = 0; i < 50 && !(*client)->Put("", "").ok(); ++i)
    absl::SleepFor(absl::Milliseconds(200));
  CARREL_ASSERT_OK((*client)->Put("k", "over TLS"));
  EXPECT_EQ(*(*client)->Read("k", 100), "over TLS");
  EXPECT_THAT(TestClient(server->endpoint())->Read("k", 100),
              StatusIs(StatusCode::kPermissionDenied, "TLS: "));
  config.ca_file = folder + "/none.pem";
  EXPECT_THAT((*S3Client::Create(config, GivenCredentials(kTestCredentials)))->Read("k", 100),
              StatusIs(StatusCode::kPermissionDenied, "none.pem"));
}

INSTANTIATE_TEST_SUITE_P(Servers, ObjectStoreTest, testing::Values(Kind::kSeaweed, Kind::kMoto),
                         [](const auto& info) {
                           return info.param == Kind::kSeaweed ? "Seaweed" : "Moto";
                         });

}  // namespace
}  // namespace carrel::kvstore
