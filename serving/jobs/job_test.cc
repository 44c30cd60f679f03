// Records, leases and ends as JSON: back as they were, and nothing else is taken for them.
#include "serving/jobs/job.h"

#include <random>

#include "absl/strings/match.h"
#include "absl/strings/str_replace.h"
#include "common/checksum.h"
#include "common/test_util.h"

namespace carrel::serving {
namespace {

using absl::StatusCode;

JobRecord Record() {
  JobRecord job{.name = "report",
                .model = "demo",
                .document_sha256 = Sha256Hex("text"),
                .document_bytes = 4,
                .raw = true,
                .drop_missing = true,
                .index = "code",
                .priority = 7,
                .attempt = 3,
                .owner = "anna",
                .tenant = "lab",
                .expected_bytes = 1000,
                .submitted = absl::FromUnixMillis(1'800'000'000'123)};
  job.id = JobIdOf(job);
  return job;
}

TEST(JobTest, Record_ComesBackAsItWas) {
  JobRecord job = Record();
  auto back = JobRecord::Decode(job.Encode(), "s3://b/x");
  CARREL_ASSERT_OK(back);
  EXPECT_EQ(back->Encode(), job.Encode());
  job.form = DocumentForm::kTokens;
  job.fingerprint = Sha256Hex("model");
  job.raw = job.drop_missing = false;
  job.id = JobIdOf(job);
  back = JobRecord::Decode(job.Encode(), "s3://b/x");
  CARREL_ASSERT_OK(back);
  EXPECT_EQ(back->Encode(), job.Encode());
}

TEST(JobTest, Id_IsOfDocumentModelOptionsAndAttempt) {
  const JobRecord job = Record();
  const auto changed = [&](const std::function<void(JobRecord&)>& change) {
    JobRecord other = job;
    change(other);
    return JobIdOf(other) != job.id;
  };
  EXPECT_TRUE(changed([](JobRecord& j) { j.document_sha256 = Sha256Hex("other"); }));
  EXPECT_TRUE(changed([](JobRecord& j) { j.model = "other"; }));
  EXPECT_TRUE(changed([](JobRecord& j) { j.fingerprint = Sha256Hex("other"); }));
  EXPECT_TRUE(changed([](JobRecord& j) { j.index = "flat"; }));
  EXPECT_TRUE(changed([](JobRecord& j) { j.raw = false; }));
  EXPECT_TRUE(changed([](JobRecord& j) { j.drop_missing = false; }));
  EXPECT_TRUE(changed([](JobRecord& j) { j.form = DocumentForm::kTokens; }));
  EXPECT_TRUE(changed([](JobRecord& j) { j.attempt = 4; }));
  EXPECT_FALSE(changed([](JobRecord& j) { j.name = "other"; }));
  EXPECT_FALSE(changed([](JobRecord& j) { j.owner = "other"; }));
  EXPECT_FALSE(changed([](JobRecord& j) { j.priority = 0; }));
}

TEST(JobTest, Record_OfAnotherKind_IsRefusedByName) {
  const std::string good = Record().Encode();
  const auto decode = [&](const std::string& from, const std::string& to) {
    const std::string bad = absl::StrReplaceAll(good, {{from, to}});
    EXPECT_NE(bad, good) << from;
    return JobRecord::Decode(bad, "s3://b/jobs/records/x").status();
  };
  EXPECT_THAT(decode("\"report\"", "\"a/b\""), StatusIs(StatusCode::kDataLoss, "a/b"));
  EXPECT_THAT(decode("\"report\"", "\"other\""), StatusIs(StatusCode::kOk, ""));
  EXPECT_THAT(decode("\"demo\"", "\"omed\""), StatusIs(StatusCode::kDataLoss, "it says it is"));
  EXPECT_THAT(decode("\"priority\":7", "\"priority\":10"), StatusIs(StatusCode::kDataLoss, "10"));
  EXPECT_THAT(decode("\"priority\":7", "\"priority\":\"x\""),
              StatusIs(StatusCode::kDataLoss, "s3://b/jobs/records/x: priority"));
  EXPECT_THAT(decode("\"version\":1", "\"version\":2"),
              StatusIs(StatusCode::kFailedPrecondition, "version 2"));
  EXPECT_THAT(decode("\"version\":1", "\"verzion\":1"), StatusIs(StatusCode::kDataLoss, "version"));
  EXPECT_THAT(decode("\"index\":\"code\"", "\"index\":\"hnsw\""),
              StatusIs(StatusCode::kDataLoss, "flat, int8, code or auto"));
  EXPECT_THAT(decode("\"form\":\"text\"", "\"form\":\"tokens\""),
              StatusIs(StatusCode::kDataLoss, "fingerprint"));
  EXPECT_THAT(decode("\"document_bytes\":4", "\"document_bytes\":2000000000"),
              StatusIs(StatusCode::kDataLoss, "document_bytes"));
  EXPECT_THAT(JobRecord::Decode("", "s3://b/x"), StatusIs(StatusCode::kDataLoss, "s3://b/x"));
  EXPECT_THAT(JobRecord::Decode("[]", "s3://b/x"), StatusIs(StatusCode::kDataLoss, "s3://b/x"));
  EXPECT_THAT(JobRecord::Decode(std::string(1 << 20, ' '), "s3://b/x"),
              StatusIs(StatusCode::kDataLoss, "s3://b/x"));
}

TEST(JobTest, LeaseAndEnd_ComeBackAsTheyWere) {
  const JobLease lease{.worker = "w-1",
                       .tries = 2,
                       .until = absl::FromUnixMillis(1'800'000'000'000),
                       .progress = 0.25,
                       .where = "layer 3 of 8",
                       .reason = "INTERNAL: \"x\"\n"};
  const auto lease_back = JobLease::Decode(lease.Encode(), "l");
  CARREL_ASSERT_OK(lease_back);
  EXPECT_EQ(lease_back->Encode(), JobLease::Decode(lease_back->Encode(), "l")->Encode());
  EXPECT_EQ(lease_back->tries, 2);
  EXPECT_EQ(lease_back->progress, 0.25);
  EXPECT_FALSE(absl::StrContains(lease_back->reason, "\n")) << "it is shown to people";
  for (const JobState state : {JobState::kDone, JobState::kCancelled, JobState::kDead}) {
    const JobEnd end{.state = state,
                     .content_id = Sha256Hex("c"),
                     .context_id = std::string(32, 'a'),
                     .bytes = 5,
                     .tokens = 6,
                     .reason = "because",
                     .worker = "w",
                     .tries = 3,
                     .ended = absl::FromUnixMillis(1'800'000'000'000)};
    const auto back = JobEnd::Decode(end.Encode(), "e");
    CARREL_ASSERT_OK(back);
    EXPECT_EQ(back->Encode(), end.Encode());
  }
  EXPECT_THAT(JobEnd::Decode(R"({"version":1,"state":"running"})", "e"),
              StatusIs(StatusCode::kDataLoss, "running"));
  EXPECT_THAT(JobEnd::Decode(R"({"version":1,"state":"done"})", "e"),
              StatusIs(StatusCode::kDataLoss, "content_id"));
}

// Whatever lies there: a job as it was, or an error that names it.
TEST(JobTest, ObjectsWithRandomChanges_AreTheSameJobOrRefused) {
  std::mt19937_64 random(TestSeed());
  const std::string good = Record().Encode();
  const std::string pieces[] = {"{",     "}",       "[", "\"", "null", "-1",
                                "1e999", "\\ud800", ":", ",",  "true"};
  int taken = 0, refused = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string text = good;
    for (uint64_t edits = 1 + random() % 3; edits > 0; --edits) {
      const size_t at = random() % text.size();
      switch (random() % 4) {
        case 0:
          text[at] = static_cast<char>(random());
          break;
        case 1:
          text.erase(at, random() % 20);
          break;
        case 2:
          text.insert(at, pieces[random() % std::size(pieces)]);
          break;
        default:
          text.insert(at, text.substr(random() % text.size(), random() % 30));
      }
      if (text.empty()) text = " ";
    }
    const auto read = JobRecord::Decode(text, "s3://b/x");
    if (read.ok()) {
      EXPECT_EQ(JobIdOf(*read), read->id);
      ++taken;
      continue;
    }
    EXPECT_THAT(read, testing::AnyOf(StatusIs(StatusCode::kDataLoss, "s3://b/x"),
                                     StatusIs(StatusCode::kFailedPrecondition, "s3://b/x")));
    ++refused;
    (void)JobLease::Decode(text, "l");
    (void)JobEnd::Decode(text, "e");
  }
  EXPECT_GT(refused, 1000);
  std::cout << taken << " taken, " << refused << " refused" << std::endl;
}

}  // namespace
}  // namespace carrel::serving
