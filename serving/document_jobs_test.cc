#include "serving/document_jobs.h"

#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "common/test_util.h"

namespace carrel::serving {
namespace {

DocumentJobs::Job NewJob(const std::string& name) {
  auto job = std::make_shared<DocumentJob>();
  job->document.name = name;
  return job;
}

TEST(DocumentJobsTest, AreReadInTheirOrder_AndListedUntilTheyAreRemoved) {
  DocumentJobs jobs;
  for (const char* name : {"b", "a", "c"}) jobs.Add(NewJob(name));
  EXPECT_EQ(jobs.waiting(), 3);
  jobs.Remove("a");
  jobs.Remove("none");
  const auto first = jobs.Next();
  EXPECT_EQ(first->document.name, "b");
  EXPECT_EQ(first->document.state, DocumentState::kPrefilling);
  EXPECT_EQ(jobs.Find("b"), first);
  EXPECT_EQ(jobs.Find("a"), nullptr);
  EXPECT_EQ(jobs.waiting(), 1);
  const auto again = NewJob("c");  // the name's first one waits no more
  jobs.Add(again);
  EXPECT_EQ(jobs.Next(), again);
  EXPECT_EQ(jobs.waiting(), 0);
  EXPECT_EQ(jobs.all().size(), 2u);
}

TEST(DocumentJobsTest, OfThoseThatFailed_SoManyAreRemembered) {
  DocumentJobs jobs;
  for (int i = 0; i < 5; ++i) {
    const auto job = NewJob(absl::StrCat("failed-", i));
    job->Fail(absl::DataLossError("planted"));
    jobs.Add(job);
  }
  jobs.Add(NewJob("waits"));
  EXPECT_EQ(jobs.waiting(), 1);  // what has failed is not read
  EXPECT_THAT(jobs.DropFailures(3), testing::ElementsAre("failed-3", "failed-4"));
  EXPECT_THAT(jobs.DropFailures(3), testing::ElementsAre());
  EXPECT_EQ(jobs.all().size(), 4u);
}

TEST(DocumentJobsTest, WatchersAreToldUntilTheyHaveSeenEnough_OrItFails) {
  const auto job = NewJob("a");
  std::string told;
  job->watchers.push_back([&](const Document&) {
    told += "1";
    return false;
  });
  job->watchers.push_back([&](const Document&) -> bool {
    told += "2";
    throw std::runtime_error("planted");
  });
  job->watchers.push_back([&](const Document& now) {
    told += now.error.ok() ? "3" : "failed";
    return true;
  });
  job->Tell();
  job->Tell();
  EXPECT_EQ(told, "1233");
  job->Fail(absl::DataLossError("planted"));
  EXPECT_TRUE(job->failed());
  job->Tell();
  EXPECT_EQ(told, "1233failed");
}

}  // namespace
}  // namespace carrel::serving
