// What: a bucket, workers that take its jobs, and people who submit them, for tests of the program.
#pragma once

#include <algorithm>
#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "tests/bucket_world.h"

namespace carrel::cli {

class JobsTest : public StoreTest {
 protected:
  Command InBucket(const Args& args) const {
    return {
        .args = args, .environment = BucketEnvironment(endpoint_), .time_limit = absl::Minutes(10)};
  }
  std::unique_ptr<Process> StartWorker(const std::string& work, const Args& more = {}) {
    Args args = {"worker", "--remote", kBucketUri, "--model", DemoModel(), "--work", path(work)};
    if (std::find(more.begin(), more.end(), "--poll") == more.end()) {
      args = With(args, {"--poll", "200ms"});
    }
    auto process = Process::Start(InBucket(With(args, With({"--lease", "5s"}, more))));
    EXPECT_TRUE(WaitUntil([&] {
      return absl::StrContains(process->err(), "ready for jobs") || !process->Running();
    })) << process->err();
    return process;
  }
  Args Submit(const std::string& name, const std::string& input, const Args& more = {}) const {
    return With({"job", "submit", "--remote", kBucketUri, "--model", "demo", "--name", name,
                 "--input", input, "--json"},
                more);
  }
  nlohmann::json StatusOf(const std::string& what) const {
    return JsonOf(Carrel(InBucket({"job", "status", what, "--remote", kBucketUri, "--json"})));
  }
  bool WaitForState(const std::string& what, const std::string& state) const {
    return WaitUntil([&] { return StatusOf(what)["state"] == state; }, absl::Minutes(8));
  }
  // In the bucket there is one context of the name, as a job says; it answers as the store's.
  void ExpectThere(const std::string& name, const nlohmann::json& job) {
    EXPECT_EQ(job["state"], "done") << job;
    const nlohmann::json listed =
        JsonOf(Carrel(InBucket({"ls", "--store", kBucketUri, "--json"})))["contexts"];
    int found = 0;
    for (const nlohmann::json& context : listed) {
      if (context["name"] != name) continue;
      ++found;
      EXPECT_EQ(context["content_id"], job["content_id"]);
    }
    EXPECT_EQ(found, 1);
    const nlohmann::json verified =
        JsonOf(Carrel(InBucket({"verify", name, "--store", kBucketUri, "--deep", "--json"})));
    EXPECT_EQ(verified["damaged"], 0) << verified;
  }
  int Count(const std::string& part) const {
    int count = 0;
    for (const auto& [key, bytes] : fake_.Objects()) count += absl::StrContains(key, part) ? 1 : 0;
    return count;
  }

  kvstore::FakeS3 fake_;
  std::string endpoint_ = fake_.endpoint();
};

}  // namespace carrel::cli
