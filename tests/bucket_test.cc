// push, pull, ls, rm, verify and gc on a bucket, as users start them.
#include <filesystem>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/bucket_world.h"

namespace carrel::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::HasSubstr;
using testing::Not;

constexpr int kFailed = 1;
constexpr int kBad = 2;

class BucketCliTest : public StoreTest {
 protected:
  Outcome InBucket(const Args& args, const std::string& secret = "test-secret-0123456789") const {
    return Carrel(Command{.args = args, .environment = BucketEnvironment(endpoint_, secret)});
  }
  json JsonInBucket(Args args) const {
    args.push_back("--json");
    return JsonOf(InBucket(args));
  }
  std::string ContentId(const std::string& store, const std::string& name) const {
    return JsonOf(Carrel({"inspect", name, "--store", store, "--json"}))["content_id"];
  }
  std::string AnswerOf(const std::string& store, const std::string& name) const {
    Args ask = Ask(name);
    std::replace(ask.begin(), ask.end(), store_, store);
    const Outcome outcome = Carrel(ask);
    EXPECT_THAT(outcome, Succeeds());
    return outcome.out;
  }
  void GoThere() {
    const json pushed = JsonInBucket({"push", kKept, kBucketUri, "--store", store_});
    EXPECT_EQ(pushed["content_id"], ContentId(store_, kKept));
    EXPECT_EQ(pushed["sent_bytes"], pushed["bytes"]);
    const json listed = JsonInBucket({"ls", "--store", kBucketUri});
    EXPECT_EQ(listed["contexts"][0]["name"], kKept);
    EXPECT_EQ(listed["contexts"][0]["tokens"], kept_tokens_);
    EXPECT_EQ(JsonInBucket({"verify", "--store", kBucketUri, "--deep"})["contexts"][0]["bytes"],
              pushed["bytes"]);
    EXPECT_EQ(JsonInBucket({"push", kKept, kBucketUri, "--store", store_})["was_there"], true);
    const std::string other = path("other");
    EXPECT_EQ(JsonInBucket({"pull", kKept, kBucketUri, "--store", other, "--as", "mine"})["name"],
              "mine");
    EXPECT_EQ(ContentId(other, "mine"), ContentId(store_, kKept));
    EXPECT_EQ(AnswerOf(other, "mine"), answer_);
    EXPECT_THAT(InBucket({"pull", kKept, kBucketUri, "--store", other}),
                FailsWith(kFailed, Texts{"ALREADY_EXISTS", "is published as mine"}));
    EXPECT_THAT(InBucket({"rm", kKept, "--store", kBucketUri}), Succeeds());
    EXPECT_THAT(InBucket({"rm", kKept, "--store", kBucketUri}),
                FailsWith(kFailed, Texts{"NOT_FOUND", kKept}));
    EXPECT_EQ(JsonInBucket({"ls", "--store", kBucketUri})["contexts"], json::array());
    EXPECT_EQ(JsonInBucket({"gc", "--store", kBucketUri, "--grace", "0s"})["files"], 0);
    ExpectNothingLost();
  }

  kvstore::FakeS3 fake_;
  std::string endpoint_ = fake_.endpoint();
};

TEST_F(BucketCliTest, Context_GoesThereAndComesBack) {
  GoThere();
  EXPECT_EQ(fake_.Objects().size(), 0u);
}

TEST_F(BucketCliTest, OnSeaweed_ContextGoesThereAndComesBack) {
  const auto server = StartSeaweed(path("seaweed"));
  if (server == nullptr) GTEST_SKIP() << "this machine has no weed";
  endpoint_ = server->endpoint();
  GoThere();
}

// Of a server that is running, and into one.
TEST_F(BucketCliTest, BetweenServersAndABucket) {
  const std::string from = "unix:" + SocketPath("a"), to = "unix:" + SocketPath("b");
  const Server a(store_, from), b(path("other"), to);
  const json pushed = JsonInBucket({"push", kKept, kBucketUri, "--server", from, "--as", "theirs"});
  EXPECT_EQ(pushed["name"], "theirs");
  EXPECT_EQ(
      JsonInBucket({"push", kKept, kBucketUri, "--store", store_, "--as", "theirs"})["was_there"],
      true);
  EXPECT_EQ(JsonInBucket({"pull", "theirs", kBucketUri, "--server", to})["content_id"],
            pushed["content_id"]);
  EXPECT_EQ(Carrel(Ask("theirs", {"--server", to})).out, answer_);
}

// Layers go while later ones are computed; the folder holds nothing afterwards.
TEST_F(BucketCliTest, Prefill_GoesThere) {
  Args prefill = Prefill("report", {"--staging", path("staging"), "--store", kBucketUri});
  int before = 0;  // files that were there when the last layer was not
  fake_.Intercept([&](const kvstore::FakeRequest& request) -> std::optional<kvstore::FakeReply> {
    if (request.method == "PUT" && absl::StrContains(request.key, "/0000-")) {
      for (const auto& [key, bytes] : fake_.Objects()) before += absl::StrContains(key, ".sst");
    }
    return std::nullopt;
  });
  const json sent = JsonInBucket(prefill);
  fake_.Intercept(nullptr);
  EXPECT_GT(before, 0) << "the token ids are the last file that is known";
  EXPECT_EQ(sent["sent_bytes"], sent["bytes"]);
  EXPECT_EQ(JsonInBucket({"ls", "--store", kBucketUri})["contexts"][0]["content_id"],
            sent["content_id"]);
  EXPECT_EQ(JsonOf(Carrel({"ls", "--store", path("staging"), "--json"}))["contexts"],
            json::array());
  EXPECT_EQ(JsonInBucket({"gc", "--store", kBucketUri, "--grace", "0s"})["files"], 0);
  ASSERT_THAT(InBucket({"pull", "report", kBucketUri, "--store", path("other")}), Succeeds());
  EXPECT_EQ(AnswerOf(path("other"), "report"), answer_);
  EXPECT_THAT(InBucket(prefill), FailsWith(kFailed, Texts{"ALREADY_EXISTS", "names/report"}));
}

TEST_F(BucketCliTest, PrefillThatIsCutOff_ShowsNothing_AndTheSameCommandGoesOn) {
  const Args prefill = Prefill("report", {"--staging", path("staging"), "--store", kBucketUri});
  fake_.Intercept([&](const kvstore::FakeRequest& request) -> std::optional<kvstore::FakeReply> {
    if (request.method == "PUT" && absl::StrContains(request.key, "/manifest")) {
      return kvstore::FakeReply{.status = 403, .body = "not now"};
    }
    return std::nullopt;
  });
  EXPECT_THAT(InBucket(prefill), FailsWith(kFailed, Texts{"the same command goes on"}));
  fake_.Intercept(nullptr);
  EXPECT_EQ(JsonInBucket({"ls", "--store", kBucketUri})["contexts"], json::array());
  const json sent = JsonInBucket(prefill);
  EXPECT_EQ(sent["sent_bytes"], 0);
  EXPECT_EQ(sent["bytes_ahead"], 0);
  ASSERT_THAT(InBucket({"pull", "report", kBucketUri, "--store", path("other")}), Succeeds());
  EXPECT_EQ(AnswerOf(path("other"), "report"), answer_);
}

TEST_F(BucketCliTest, WhatIsDamaged_IsNamedAndNothingIsPublished) {
  ASSERT_THAT(InBucket({"push", kKept, kBucketUri, "--store", store_}), Succeeds());
  std::string key;
  for (const auto& [name, bytes] : fake_.Objects()) {
    if (absl::StrContains(name, "/0003-")) key = name;
  }
  fake_.Change(key, [](std::string& bytes) { bytes[bytes.size() / 3] ^= 8; });
  EXPECT_THAT(InBucket({"verify", kKept, "--store", kBucketUri}), Succeeds());
  const Outcome verified = InBucket({"verify", kKept, "--store", kBucketUri, "--deep"});
  EXPECT_THAT(verified, FailsWith(kFailed, Texts{"1 contexts are damaged"}));
  EXPECT_THAT(verified.out, HasSubstr(key));
  const Outcome pulled = InBucket({"pull", kKept, kBucketUri, "--store", path("other")});
  EXPECT_THAT(pulled, FailsWith(kFailed, Texts{"it is fetched once more", "DATA_LOSS", key,
                                               "fetched twice"}));
  EXPECT_EQ(JsonOf(Carrel({"ls", "--store", path("other"), "--json"}))["contexts"], json::array());
}

TEST_F(BucketCliTest, WhatCannotBe_IsRefusedByName) {
  const auto refused = [&](const Args& args, const Texts& texts, int code = kBad) {
    EXPECT_THAT(InBucket(args), FailsWith(code, texts));
  };
  refused({"push", kKept, "http://b", "--store", store_}, {"\"http://b\"", "s3://BUCKET/PREFIX"});
  refused({"push", kKept, "s3://B", "--store", store_}, {"name \"B\"", "3 to 63"});
  refused({"push", kKept, kBucketUri}, {"--store FOLDER"});
  refused({"push", "none", kBucketUri, "--store", store_}, {"NOT_FOUND", "none", kKept}, kFailed);
  refused({"pull", "none", kBucketUri, "--store", path("other")}, {"NOT_FOUND", "\"none\""},
          kFailed);
  refused({"gc", "--store", store_}, {"must be s3://"});
  refused({"gc", "--store", kBucketUri, "--grace", "soon"}, {"--grace soon", "0s to 8760h"});
  refused({"ls", "--store", store_, "--s3-region", "x"}, {"--s3-region", "needs --store s3://"});
  refused({"ls", "--store", kBucketUri, "--s3-encrypt", "rot13"}, {"AES256 or aws:kms"});
  refused({"ls", "--store", kBucketUri, "--s3-profile", "none"}, {"no credentials for the bucket"},
          kFailed);
  // A bucket is no folder: nothing of that name is made.
  refused({"serve", "--store", kBucketUri, "--listen", "unix:" + SocketPath()}, {"is a bucket"});
  refused({"inspect", kKept, "--store", kBucketUri}, {"is a bucket"});
  refused(Prefill("x", {"--store", kBucketUri}), {"needs --staging FOLDER"});
  refused(Prefill("x", {"--store", kBucketUri, "--staging", "s3://b"}), {"s3://b is a bucket"});
  refused(Prefill("x", {"--store", kBucketUri, "--staging", path("s"), "--server", "unix:x"}),
          {"--server with --store s3://"});
  refused(Prefill("x", {"--staging", path("s")}), {"--staging is of --store s3://"});
  EXPECT_FALSE(fs::exists("s3:"));
}

TEST_F(BucketCliTest, Secrets_AreInNothingThatIsPrinted) {
  static constexpr char kSecret[] = "SECRET-of-the-key";
  const auto expect_none = [&](const Outcome& outcome) {
    EXPECT_THAT(outcome.out + outcome.err, Not(HasSubstr(kSecret)));
  };
  expect_none(InBucket({"push", kKept, kBucketUri, "--store", store_}, kSecret));
  fake_.Intercept([](const kvstore::FakeRequest& request) -> std::optional<kvstore::FakeReply> {
    return kvstore::FakeReply{
        .status = 403,
        .body =
            absl::StrCat("<Error><Code>SignatureDoesNotMatch</Code><Message>",
                         request.headers.at("authorization"), " ", kSecret, "</Message></Error>")};
  });
  for (const Args& args :
       {Args{"push", kKept, kBucketUri, "--store", store_},
        Args{"pull", kKept, kBucketUri, "--store", path("other")},
        Args{"ls", "--store", kBucketUri}, Args{"gc", "--store", kBucketUri},
        Args{"rm", kKept, "--store", kBucketUri}, Args{"verify", "--store", kBucketUri}}) {
    const Outcome outcome = InBucket(args, kSecret);
    EXPECT_THAT(outcome, FailsWith(kFailed, Texts{"UNAUTHENTICATED", "SignatureDoesNotMatch",
                                                  "test-access"}));
    expect_none(outcome);
  }
}

}  // namespace
}  // namespace carrel::cli
