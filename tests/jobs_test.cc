// Jobs in a bucket as people use them: submitted, waited for, cancelled; workers that are stopped and killed in the
// middle of one.
#include <signal.h>

#include <random>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "http_api/http_test_util.h"
#include "serving/jobs/nats_test_server.h"
#include "tests/jobs_world.h"

namespace carrel::cli {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing::Not;

constexpr int kFailed = 1;
constexpr int kBad = 2;

class JobsFaultTest : public JobsTest {
 protected:
  // Two workers; the one that has the job is killed with -9 in its middle.
  void KillAndGoOn();
};

TEST_F(JobsTest, ADocument_IsSubmittedWaitedForAndAsked) {
  const auto worker = StartWorker("work", {"--metrics", "0"});
  const Outcome submitted = Carrel(InBucket(Submit("report", document_, {"--wait"})));
  ASSERT_THAT(submitted, Succeeds());
  const json job = JsonOf(submitted);
  ExpectThere("report", job);
  EXPECT_EQ(job["tokens"], kept_tokens_);
  ASSERT_THAT(Carrel(InBucket({"pull", "report", kBucketUri, "--store", path("other")})),
              Succeeds());
  Args ask = Ask("report");
  std::replace(ask.begin(), ask.end(), store_, path("other"));
  EXPECT_EQ(Carrel(ask).out, answer_) << "as prefill makes it";
  // The same again is the same job; under another name it is refused.
  EXPECT_EQ(JsonOf(Carrel(InBucket(Submit("report", document_))))["id"], job["id"]);
  EXPECT_THAT(Carrel(InBucket(Submit("other", document_))),
              FailsWith(kFailed, Texts{"ALREADY_EXISTS", "\"report\""}));
  EXPECT_THAT(Carrel(InBucket({"job", "cancel", "report", "--remote", kBucketUri})),
              FailsWith(kFailed, Texts{"is done already"}));
  const json listed =
      JsonOf(Carrel(InBucket({"job", "list", "--all", "--remote", kBucketUri, "--json"})));
  ASSERT_EQ(listed["jobs"].size(), 1u);
  EXPECT_EQ(listed["jobs"][0], StatusOf(std::string(job["id"]).substr(0, 12)));
  EXPECT_EQ(Count("/queue/") + Count("/leases/") + Count("/documents/"), 0);
  // What the worker tells.
  const std::string said = worker->err(), before = "metrics on http://";
  const size_t at = said.find(before) + before.size();
  http_api::TestClient client(said.substr(at, said.find("/metrics", at) - at));
  client.Ask("GET", "/metrics");
  const std::string metrics = client.Receive().body;
  EXPECT_THAT(metrics, HasSubstr("\ncarrel_worker_jobs_done_total 1\n"));
  EXPECT_THAT(metrics, HasSubstr("\ncarrel_worker_queue 0\n"));
  worker->Signal(SIGTERM);
  const Outcome ended = worker->Wait();
  EXPECT_THAT(ended, Succeeds());
  EXPECT_THAT(ended.err, HasSubstr("carrel worker: stopped"));
  EXPECT_THAT(ended.err, Not(HasSubstr("test-secret")));
}

TEST_F(JobsTest, WaitingJobs_AreTakenByPriority_AndCancelled) {
  for (int i = 0; i < 3; ++i) {
    const std::string name = absl::StrCat("n", i);
    const std::string text = WriteFile(name, absl::StrCat("Text number ", i, "."));
    ASSERT_THAT(Carrel(InBucket(Submit(name, text, {"--priority", absl::StrCat(i)}))), Succeeds());
  }
  const Outcome cancelled =
      Carrel(InBucket({"job", "cancel", "n1", "--remote", kBucketUri, "--json"}));
  ASSERT_THAT(cancelled, Succeeds());
  EXPECT_EQ(JsonOf(cancelled)["state"], "cancelled");
  const Outcome listed = Carrel(InBucket({"job", "list", "--remote", kBucketUri}));
  EXPECT_THAT(listed, Succeeds());
  EXPECT_LT(listed.out.find(" n2 "), listed.out.find(" n0 "));
  EXPECT_THAT(listed.out, Not(HasSubstr(" n1 ")));
  EXPECT_THAT(Carrel(InBucket({"job", "status", "n1", "--wait", "--remote", kBucketUri})),
              FailsWith(kFailed, Texts{"CANCELLED", "was cancelled"}));
  const auto worker = StartWorker("work");
  EXPECT_TRUE(WaitForState("n0", "done"));
  ExpectThere("n2", StatusOf("n2"));
  const std::string said = worker->err();
  EXPECT_LT(said.find("n2: taken"), said.find("n0: taken"));
}

TEST_F(JobsTest, ARunningJob_IsCancelled_AndLeavesNothing) {
  const auto worker = StartWorker("work");
  ASSERT_THAT(Carrel(InBucket(Submit("long", DemoDocument("registry-8k")))), Succeeds());
  ASSERT_TRUE(WaitForState("long", "running"));
  ASSERT_THAT(Carrel(InBucket({"job", "cancel", "long", "--remote", kBucketUri})), Succeeds());
  EXPECT_TRUE(WaitUntil([&] { return absl::StrContains(worker->err(), "long: cancelled"); }));
  EXPECT_EQ(Count("names/") + Count("contexts/") + Count("/leases/") + Count("/documents/"), 0);
  // The next job is done all the same.
  EXPECT_THAT(Carrel(InBucket(Submit("short", document_, {"--wait"}))), Succeeds());
}

TEST_F(JobsTest, AWorkerThatIsStopped_GivesItsJobToAnother) {
  auto first = StartWorker("a");
  ASSERT_THAT(Carrel(InBucket(Submit("report", DemoDocument("registry-8k")))), Succeeds());
  ASSERT_TRUE(WaitForState("report", "running"));
  first->Signal(SIGTERM);
  const Outcome ended = first->Wait();
  EXPECT_THAT(ended, Succeeds());
  EXPECT_THAT(ended.err, HasSubstr("report: given back"));
  EXPECT_EQ(StatusOf("report")["state"], "queued");
  EXPECT_EQ(StatusOf("report")["tries"], 0);
  const auto second = StartWorker("b");
  ASSERT_TRUE(WaitForState("report", "done"));
  ExpectThere("report", StatusOf("report"));
  EXPECT_EQ(StatusOf("report")["tries"], 1);
}

void JobsFaultTest::KillAndGoOn() {
  std::mt19937_64 random(TestSeed());
  std::unique_ptr<Process> workers[] = {StartWorker("a"), StartWorker("b")};
  int killed = 0;
  for (int i = 0; i < 4 && killed < 1; ++i) {
    const std::string name = absl::StrCat("report", i);
    const std::string text =
        WriteFile(name, absl::StrCat(i, ReadBytes(DemoDocument("registry-8k"))));
    ASSERT_THAT(Carrel(InBucket(Submit(name, text))), Succeeds());
    const auto has = [&](const std::unique_ptr<Process>& one) {
      return absl::StrContains(one->err(), name + ": taken");
    };
    ASSERT_TRUE(WaitUntil([&] { return has(workers[0]) || has(workers[1]); }));
    absl::SleepFor(absl::Milliseconds(random() % 1500));
    const int holder = has(workers[0]) ? 0 : 1;
    const bool in_the_middle = !absl::StrContains(workers[holder]->err(), name + ": done");
    workers[holder]->Signal(SIGKILL);
    workers[holder]->Wait();
    killed += in_the_middle ? 1 : 0;
    ASSERT_TRUE(WaitForState(name, "done"));
    const json job = StatusOf(name);
    ExpectThere(name, job);
    EXPECT_TRUE(!in_the_middle || job["tries"] == 2) << job;
    EXPECT_TRUE(!in_the_middle || has(workers[1 - holder]));
    // It goes on with what it has of the job, if there is one again.
    workers[holder] = StartWorker(holder == 0 ? "a" : "b");
  }
  EXPECT_GE(killed, 1);
}

TEST_F(JobsFaultTest, AWorkerThatIsKilled_LosesNoJob_AndNoneIsDoneTwice) {
  KillAndGoOn();
  EXPECT_EQ(Count("/queue/") + Count("/leases/"), 0);
  EXPECT_EQ(Count("/manifest"), Count("/names/"));
  EXPECT_EQ(Count("/results/"), Count("/records/"));
}

TEST_F(JobsFaultTest, OnSeaweed_AWorkerThatIsKilled_LosesNoJob) {
  const auto server = StartSeaweed(path("seaweed"));
  if (server == nullptr) GTEST_SKIP() << "this machine has no weed";
  endpoint_ = server->endpoint();
  KillAndGoOn();
}

TEST_F(JobsTest, WhatCannotSucceed_IsADeadLetterWithItsReason) {
  const auto worker = StartWorker("work");
  const std::string text = WriteFile("taken.txt", "Something else.");
  ASSERT_THAT(Carrel(InBucket(Submit("first", text, {"--wait"}))), Succeeds());
  EXPECT_THAT(Carrel(InBucket(Submit("first", document_))),
              FailsWith(kFailed, Texts{"ALREADY_EXISTS", "\"first\""}));
  const std::string long_text = WriteFile("long.txt", [&] {
    std::string all;
    for (int i = 0; i < 18; ++i) all += ReadBytes(DemoDocument("registry-8k"));
    return all;
  }());
  const Outcome dead = Carrel(InBucket(Submit("long", long_text, {"--wait"})));
  EXPECT_THAT(dead, FailsWith(kFailed, Texts{"was given up after 1 tries", "max_position"}));
  EXPECT_EQ(JsonOf(dead)["state"], "dead");
  EXPECT_EQ(Count("/dead/"), 1);
}

TEST_F(JobsTest, NATS_WakesAWorkerThatLooksRarely) {
  const auto server = serving::NatsServer::Start();
  if (server == nullptr) GTEST_SKIP() << "this machine has no nats-server";
  const auto worker = StartWorker("work", {"--poll", "1h", "--nats", server->url()});
  absl::SleepFor(absl::Milliseconds(500));
  const Outcome done =
      Carrel(InBucket(Submit("report", document_, {"--wait", "--nats", server->url()})));
  ASSERT_THAT(done, Succeeds());
  ExpectThere("report", JsonOf(done));
  // Nobody rings; but who submits is told, and the job is there.
  server->Kill();
  const std::string text = WriteFile("second.txt", "Something else.");
  const Outcome quiet = Carrel(InBucket(Submit("second", text, {"--nats", server->url()})));
  EXPECT_THAT(quiet, Succeeds());
  EXPECT_THAT(quiet.err, HasSubstr("workers find the job when they look next"));
  server->Restart();  // who connects again looks
  EXPECT_TRUE(WaitForState("second", "done"));
}

TEST_F(JobsTest, WrongUsage_IsNamed) {
  const auto worker = [&](const Args& more) { return Carrel(InBucket(With({"worker"}, more))); };
  const Args good = {"--remote", kBucketUri, "--model", DemoModel(), "--work", path("work")};
  EXPECT_THAT(worker({}), FailsWith(kBad, Texts{"--remote"}));
  EXPECT_THAT(worker({"--remote", kBucketUri}), FailsWith(kBad, Texts{"--model"}));
  EXPECT_THAT(worker({"--remote", kBucketUri, "--model", DemoModel()}),
              FailsWith(kBad, Texts{"--work"}));
  EXPECT_THAT(worker(With(good, {"--lease", "1s"})), FailsWith(kBad, Texts{"5s to 1h"}));
  EXPECT_THAT(worker(With(good, {"--poll", "soon"})), FailsWith(kBad, Texts{"--poll soon"}));
  EXPECT_THAT(worker(With(good, {"--nats", "http://x"})), FailsWith(kBad, Texts{"nats://HOST"}));
  EXPECT_THAT(worker(With(good, {"--nats-credentials", "x"})), FailsWith(kBad, Texts{"--nats"}));
  EXPECT_THAT(worker(With(good, {"--model", path("../demo"), "--model", DemoModel()})),
              FailsWith(kFailed, Texts{"demo"}));
  EXPECT_THAT(Carrel(InBucket(Submit("a/b", document_))), FailsWith(kBad, Texts{"a/b"}));
  EXPECT_THAT(Carrel(InBucket(Submit("a", path("none")))), FailsWith(kFailed, Texts{"none"}));
  EXPECT_THAT(Carrel(InBucket(Submit("a", document_, {"--priority", "10"}))),
              FailsWith(kBad, Texts{"10"}));
  EXPECT_THAT(Carrel(InBucket({"job", "status", "none", "--remote", kBucketUri})),
              FailsWith(kFailed, Texts{"NOT_FOUND", "none"}));
  EXPECT_EQ(fake_.Objects().size(), 0u);
}

}  // namespace
}  // namespace carrel::cli
