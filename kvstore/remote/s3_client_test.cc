#include "kvstore/remote/s3_client.h"

#include <atomic>
#include <mutex>
#include <thread>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "common/status.h"
#include "common/test_util.h"
#include "kvstore/remote/fake_s3.h"
#include "kvstore/remote/remote_test_util.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

class S3ClientTest : public testing::Test {
 protected:
  std::string ReadAll(const std::string& key) {
    const auto bytes = client_->Read(key, 1 << 20);
    return bytes.ok() ? *bytes : bytes.status().ToString();
  }
  // The first `times` requests are answered so.
  void FailFirst(int times, FakeReply reply) {
    auto left = std::make_shared<std::atomic<int>>(times);
    fake_.Intercept([=](const FakeRequest&) -> std::optional<FakeReply> {
      if ((*left)-- > 0) return reply;
      return std::nullopt;
    });
  }

  FakeS3 fake_;
  std::unique_ptr<S3Client> client_ = TestClient(fake_.endpoint());
};

TEST_F(S3ClientTest, Object_IsPutReadInPartsListedAndRemoved) {
  CARREL_ASSERT_OK(client_->Put("a b/\xc3\xa4+%?&", "0123456789"));
  std::string part;
  const auto info =
      client_->Get("a b/\xc3\xa4+%?&", {.begin = 2, .end = 5}, [&](absl::string_view bytes) {
        part.append(bytes.data(), bytes.size());
        return absl::OkStatus();
      });
  CARREL_ASSERT_OK(info);
  EXPECT_EQ(part, "234");
  EXPECT_EQ(info->size, 10);
  EXPECT_EQ(client_->Head("a b/\xc3\xa4+%?&")->size, 10);
  EXPECT_EQ(client_->List("a")->objects.at(0).key, "a b/\xc3\xa4+%?&");
  CARREL_ASSERT_OK(client_->Remove("a b/\xc3\xa4+%?&"));
  CARREL_ASSERT_OK(client_->Remove("a b/\xc3\xa4+%?&"));
  EXPECT_THAT(client_->Head("a b/\xc3\xa4+%?&"), StatusIs(StatusCode::kNotFound, "404"));
  EXPECT_THAT(client_->Read("none", 9),
              StatusIs(StatusCode::kNotFound, "s3://carrel-test/none: GET"));
}

TEST_F(S3ClientTest, ConditionThatDoesNotHold_LeavesTheObject) {
  const auto etag = client_->Put("k", "one", Condition::Absent());
  CARREL_ASSERT_OK(etag);
  EXPECT_THAT(client_->Put("k", "two", Condition::Absent()),
              StatusIs(StatusCode::kAlreadyExists, "s3://carrel-test/k"));
  EXPECT_THAT(client_->Put("k", "two", Condition::IfMatch("\"x\"")),
              StatusIs(StatusCode::kAborted, "412"));
  EXPECT_THAT(client_->Remove("k", Condition::IfMatch("\"x\"")),
              StatusIs(StatusCode::kAborted, "412"));
  EXPECT_EQ(ReadAll("k"), "one");
  CARREL_EXPECT_OK(client_->Put("k", "two", Condition::IfMatch(*etag)));
  EXPECT_EQ(ReadAll("k"), "two");
}

TEST_F(S3ClientTest, List_GoesThroughAllPages) {
  std::vector<std::string> keys, found;
  for (int i = 0; i < 25; ++i) {
    keys.push_back(absl::StrCat("ls/", 100 + i, "/x"));
    CARREL_ASSERT_OK(client_->Put(keys.back(), "x"));
  }
  std::string token;
  int pages = 0;
  do {
    const auto page = client_->List("ls/", token, 10);
    CARREL_ASSERT_OK(page);
    for (const auto& object : page->objects) found.push_back(object.key);
    token = page->next;
    ++pages;
  } while (!token.empty());
  EXPECT_EQ(found, keys);
  EXPECT_EQ(pages, 3);
}

TEST_F(S3ClientTest, FailuresForNow_AreTriedAgain) {
  CARREL_ASSERT_OK(client_->Put("k", "bytes"));
  for (const int status : {500, 502, 503, 504, 429}) {
    FailFirst(3, {.status = status, .body = "<Error><Code>SlowDown</Code></Error>"});
    EXPECT_EQ(ReadAll("k"), "bytes") << status;
  }
  FailFirst(1000, {.status = 503, .body = "<Error><Code>SlowDown</Code></Error>"});
  EXPECT_THAT(client_->Read("k", 9),
              StatusIs(StatusCode::kUnavailable, "SlowDown (tried 10 times)"));
  FailFirst(1000, {.status = 403, .body = "<Error><Code>AccessDenied</Code></Error>"});
  const int64_t before = fake_.requests();
  EXPECT_THAT(client_->Read("k", 9), StatusIs(StatusCode::kPermissionDenied, "AccessDenied"));
  EXPECT_EQ(fake_.requests(), before + 1);
}

// Who gives a short deadline is told soon, whatever one attempt might take.
TEST_F(S3ClientTest, AServerThatSaysNothing_IsGivenUpWithTheDeadline) {
  CARREL_ASSERT_OK(client_->Put("k", "one"));
  std::atomic<bool> given_up{false}, waited_for{false};
  std::atomic<int> inside{0};
  fake_.Intercept([&](const FakeRequest&) -> std::optional<FakeReply> {
    ++inside;
    for (int i = 0; i < 2000 && !given_up; ++i) absl::SleepFor(absl::Milliseconds(10));
    if (!given_up) waited_for = true;
    --inside;
    return std::nullopt;
  });
  S3Config config = TestConfig(fake_.endpoint());
  config.retry.deadline = absl::Seconds(2);
  const auto client = S3Client::Create(config, GivenCredentials(kTestCredentials));
  CARREL_ASSERT_OK(client);
  EXPECT_FALSE((*client)->Read("k", 9).ok());
  given_up = true;
  while (inside > 0) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_FALSE(waited_for);
}

TEST_F(S3ClientTest, ConnectionThatBreaks_GoesOnBehindWhatCame) {
  const std::string bytes(100'000, 'x');
  CARREL_ASSERT_OK(client_->Put("k", bytes + "end"));
  auto cuts = std::make_shared<std::atomic<int>>(3);
  auto ranges = std::make_shared<std::vector<std::string>>();
  fake_.Intercept([=](const FakeRequest& request) -> std::optional<FakeReply> {
    const auto range = request.headers.find("range");
    ranges->push_back(range == request.headers.end() ? "" : range->second);
    if ((*cuts)-- <= 0) return std::nullopt;
    const size_t begin = ranges->size() == 1 ? 0 : std::stoul(range->second.substr(6));
    return FakeReply{
        .status = begin == 0 ? 200 : 206, .body = (bytes + "end").substr(begin), .cut = true};
  });
  std::string got;
  CARREL_ASSERT_OK(client_->Get("k", {}, [&](absl::string_view piece) {
    got.append(piece.data(), piece.size());
    return absl::OkStatus();
  }));
  EXPECT_TRUE(got == bytes + "end") << got.size();
  EXPECT_THAT(*ranges, ElementsAre("", "bytes=50001-", "bytes=75002-", "bytes=87502-"));
}

TEST_F(S3ClientTest, ObjectShorterThanTheRange_IsDataLoss) {
  CARREL_ASSERT_OK(client_->Put("k", "0123"));
  const auto ignore = [](absl::string_view) { return absl::OkStatus(); };
  EXPECT_THAT(client_->Get("k", {.begin = 2, .end = 9}, ignore),
              StatusIs(StatusCode::kDataLoss, "2 came, 7 were expected (the object has 4)"));
  EXPECT_THAT(client_->Get("k", {.begin = 9, .end = 12}, ignore),
              StatusIs(StatusCode::kDataLoss, "ends before byte 9"));
  EXPECT_THAT(client_->Read("k", 3), StatusIs(StatusCode::kResourceExhausted, "more than 3 bytes"));
}

// The reply of an attempt that succeeded was lost.
TEST_F(S3ClientTest, ConditionalPutThatFindsItsOwnBytes_HasSucceeded) {
  auto first = std::make_shared<std::atomic<bool>>(true);
  std::unique_ptr<S3Client> other = TestClient(fake_.endpoint());
  S3Client* const beside = other.get();
  fake_.Intercept([=](const FakeRequest& request) -> std::optional<FakeReply> {
    if (request.method != "PUT" || !first->exchange(false)) return std::nullopt;
    CARREL_CHECK(beside->Put(request.key, request.body).ok());
    return FakeReply{.status = 500};
  });
  CARREL_EXPECT_OK(client_->Put("k", "mine", Condition::Absent()));
  *first = true;
  fake_.Intercept([=](const FakeRequest& request) -> std::optional<FakeReply> {
    if (request.method != "PUT" || !first->exchange(false)) return std::nullopt;
    CARREL_CHECK(beside->Put(request.key, "theirs").ok());
    return FakeReply{.status = 500};
  });
  EXPECT_THAT(client_->Put("l", "mine", Condition::Absent()),
              StatusIs(StatusCode::kAlreadyExists, "s3://carrel-test/l"));
}

TEST_F(S3ClientTest, BytesThatArriveAsOthers_AreRefusedByTheServer) {
  const auto refuse = [](const FakeRequest&) -> std::optional<FakeReply> {
    return FakeReply{.status = 400, .body = "<Error><Code>BadDigest</Code></Error>"};
  };
  fake_.Intercept(refuse);
  EXPECT_THAT(client_->Put("k", "bytes"), StatusIs(StatusCode::kDataLoss, "BadDigest"));
}

TEST_F(S3ClientTest, ClocksThatDiffer_AreNamedWithBothTimes) {
  fake_.Intercept([](const FakeRequest&) -> std::optional<FakeReply> {
    return FakeReply{.status = 403,
                     .body =
                         "<Error><Code>RequestTimeTooSkewed</Code><Message>too large</Message>"
                         "<RequestTime>20261128T000000Z</RequestTime>"
                         "<ServerTime>2026-11-28T09:30:00Z</ServerTime></Error>"};
  });
  const std::string year = absl::FormatTime("%Y-", absl::Now(), absl::UTCTimeZone());
  const auto read = client_->Read("k", 9);
  EXPECT_THAT(read,
              StatusIs(StatusCode::kFailedPrecondition, "2026-11-28T09:30:00Z at the server"));
  EXPECT_THAT(read, StatusIs(StatusCode::kFailedPrecondition, "the clocks differ: it is " + year));
  // A reply to HEAD has no body: its date says it.
  fake_.Intercept([](const FakeRequest&) -> std::optional<FakeReply> {
    return FakeReply{.status = 403, .headers = {{"Date", "Fri, 24 May 2013 00:00:00 GMT"}}};
  });
  EXPECT_THAT(client_->Head("k"),
              StatusIs(StatusCode::kFailedPrecondition, "2013-05-24T00:00:00Z at the server"));
}

TEST_F(S3ClientTest, BucketOfAnotherRegion_IsNamed) {
  fake_.Intercept([](const FakeRequest&) -> std::optional<FakeReply> {
    return FakeReply{.status = 301, .headers = {{"x-amz-bucket-region", "eu-west-1"}}};
  });
  EXPECT_THAT(client_->Head("k"),
              StatusIs(StatusCode::kFailedPrecondition, "in region eu-west-1, not us-east-1"));
}

TEST_F(S3ClientTest, UploadInParts_IsOneObjectOnceItIsComplete) {
  const auto id = client_->BeginUpload("big");
  CARREL_ASSERT_OK(id);
  std::vector<UploadedPart> parts;
  for (int i = 1; i <= 3; ++i) {
    const auto part =
        client_->UploadPart("big", *id, i, std::string(10, static_cast<char>('0' + i)));
    CARREL_ASSERT_OK(part);
    parts.push_back(*part);
  }
  EXPECT_THAT(client_->Head("big"), StatusIs(StatusCode::kNotFound, "big"));
  EXPECT_EQ(client_->ListUploads("b")->at(0).id, *id);
  EXPECT_EQ(client_->ListParts("big", *id)->size(), 3u);
  CARREL_ASSERT_OK(client_->CompleteUpload("big", *id, parts));
  EXPECT_EQ(ReadAll("big"), "111111111122222222223333333333");
  const auto other = client_->BeginUpload("big2");
  CARREL_ASSERT_OK(client_->AbortUpload("big2", *other));
  CARREL_ASSERT_OK(client_->AbortUpload("big2", *other));
  EXPECT_EQ(fake_.open_uploads(), 0);
}

// 200, and then an error: of a completion that took long.
TEST_F(S3ClientTest, CompletionThatFailsLate_IsAnError) {
  const auto id = client_->BeginUpload("big");
  fake_.Intercept([](const FakeRequest&) -> std::optional<FakeReply> {
    return FakeReply{.status = 200, .body = "\n\n<Error><Code>InternalError</Code></Error>"};
  });
  EXPECT_THAT(client_->CompleteUpload("big", *id, {}),
              StatusIs(StatusCode::kUnavailable, "InternalError"));
}

TEST_F(S3ClientTest, EncryptionAtTheServer_IsAskedForWhereBytesAreStored) {
  S3Config config = TestConfig(fake_.endpoint());
  config.encryption = "aws:kms";
  config.encryption_key = "key-id";
  const auto client = S3Client::Create(config, GivenCredentials(kTestCredentials));
  auto seen = std::make_shared<std::vector<std::string>>();
  fake_.Intercept([=](const FakeRequest& request) -> std::optional<FakeReply> {
    const auto it = request.headers.find("x-amz-server-side-encryption-aws-kms-key-id");
    seen->push_back(
        absl::StrCat(request.method, " ", it == request.headers.end() ? "" : it->second));
    return std::nullopt;
  });
  CARREL_EXPECT_OK((*client)->Put("k", "x"));
  CARREL_EXPECT_OK((*client)->BeginUpload("l"));
  CARREL_EXPECT_OK((*client)->Read("k", 9));
  EXPECT_THAT(*seen, ElementsAre("PUT key-id", "POST key-id", "GET "));
}

TEST_F(S3ClientTest, Config_ThatMakesNoSense_IsRefusedByName) {
  const auto refused = [](S3Config config) { return config.Validate(); };
  EXPECT_THAT(refused({.bucket = "A"}), StatusIs(StatusCode::kInvalidArgument, "name \"A\""));
  EXPECT_THAT(refused({.bucket = "abc", .endpoint = "host"}),
              StatusIs(StatusCode::kInvalidArgument, "endpoint"));
  EXPECT_THAT(refused({.bucket = "abc", .endpoint = "http://h/x"}),
              StatusIs(StatusCode::kInvalidArgument, "endpoint"));
  EXPECT_THAT(refused({.bucket = "abc", .region = "x y"}),
              StatusIs(StatusCode::kInvalidArgument, "region"));
  EXPECT_THAT(refused({.bucket = "abc", .encryption = "rot13"}),
              StatusIs(StatusCode::kInvalidArgument, "AES256 or aws:kms"));
}

// The key must be named, for somebody has to find it; what goes with it, nowhere.
TEST_F(S3ClientTest, Secrets_AreInNoMessage) {
  const Credentials temporary{"other-access", "SECRET-of-the-key", "TOKEN-of-the-session"};
  const std::unique_ptr<S3Client> client = TestClient(fake_.endpoint(), temporary);
  std::vector<absl::Status> all;
  const auto collect = [&] {
    all.push_back(client->Read("k", 9).status());
    all.push_back(client->Put("k", "x").status());
    all.push_back(client->Head("k").status());
    all.push_back(client->List("k").status());
    all.push_back(client->BeginUpload("k").status());
    all.push_back(client->Remove("k"));
  };
  collect();
  for (const int status : {400, 401, 403, 404, 409, 412, 500}) {
    fake_.Intercept([=](const FakeRequest& request) -> std::optional<FakeReply> {
      // A server that sends back all that it got, as AWS does of a signature that does not match.
      std::string body = "<Error><Code>ExpiredToken</Code><Message>SECRET-of-the-key ";
      for (const auto& [name, value] : request.headers) absl::StrAppend(&body, value, " ");
      return FakeReply{.status = status,
                       .body = body + "</Message><Token-0>TOKEN-of-the-session</Token-0></Error>"};
    });
    collect();
  }
  int refusals = 0;
  for (const absl::Status& status : all) {
    refusals += status.ok() ? 0 : 1;
    EXPECT_THAT(status.ToString(), Not(HasSubstr("SECRET")));
    EXPECT_THAT(status.ToString(), Not(HasSubstr("TOKEN")));
    EXPECT_THAT(status.ToString(), Not(HasSubstr("SIGNATURE")));
  }
  EXPECT_GT(refusals, 40);
}

TEST_F(S3ClientTest, Cancelled_EndsWaitsAndTransfers) {
  std::atomic<bool> cancelled{false};
  S3Config config = TestConfig(fake_.endpoint());
  config.retry = {
      .first = absl::Seconds(60), .most = absl::Seconds(60), .deadline = absl::Hours(1)};
  const auto client = S3Client::Create(config, GivenCredentials(kTestCredentials), &cancelled);
  FailFirst(1000, {.status = 503});
  std::thread soon([&] {
    absl::SleepFor(absl::Milliseconds(50));
    cancelled = true;
  });
  EXPECT_THAT((*client)->Head("k"), StatusIs(StatusCode::kCancelled, "cancelled"));
  soon.join();
}

TEST_F(S3ClientTest, NoServer_IsUnavailableByName) {
  S3Config config = TestConfig("http://127.0.0.1:1");
  config.retry.attempts = 2;
  const auto client = S3Client::Create(config, GivenCredentials(kTestCredentials));
  EXPECT_THAT((*client)->Head("k"),
              StatusIs(StatusCode::kUnavailable, "http://127.0.0.1:1/carrel-test/k"));
}

}  // namespace
}  // namespace carrel::kvstore
