// What: a bucket of this process with jobs in it, a clock that a test sets, and somebody who makes small contexts
//       instead of prefilling. Tests only.
// Ownership: the bucket outlives the runner, which outlives what it prepares.
#pragma once

#include <atomic>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/status.h"
#include "common/test_util.h"
#include "kvstore/remote/push.h"
#include "kvstore/remote/remote_test_util.h"
#include "kvstore/storage/context_stream.h"
#include "kvstore/storage/store_test_util.h"
#include "serving/jobs/worker.h"

namespace carrel::serving {

// Any thread reads it, the test sets it.
class TestClock {
 public:
  absl::Time Now() const { return absl::FromUnixMillis(ms_); }
  void Advance(absl::Duration by) { ms_ += absl::ToInt64Milliseconds(by); }
  Clock clock() const {
    return [this] { return Now(); };
  }

 private:
  std::atomic<int64_t> ms_{1'800'000'000'000};
};

// Makes a context of a job's document (its bytes are taken as token ids), and pushes it.
class FakeRunner final : public JobRunner {
 public:
  FakeRunner(const kvstore::Bucket& bucket, const std::string& folder,
             std::vector<std::string> models)
      : bucket_(bucket), folder_(folder), models_(std::move(models)) {
    auto store = kvstore::Store::Open(folder + "/store", kvstore::StoreMode::kReadWrite);
    CARREL_CHECK(store.ok());
    store_ = *std::move(store);
  }

  bool Fits(const JobRecord& record) const override {
    for (const std::string& model : models_) {
      if (model == record.model) return true;
    }
    return false;
  }
  absl::StatusOr<std::unique_ptr<PreparedJob>> Prepare(const JobRecord& record,
                                                       std::string document) override {
    if (prepare != nullptr) RETURN_IF_ERROR(prepare(record));
    return std::make_unique<Prepared>(*this, record, Sha256Hex(document));
  }
  void Forget(const JobRecord& record) override { forgotten.push_back(record.name); }

  // What happens before a context is made; what it returns ends the try. Null: nothing.
  std::function<absl::Status(const JobRecord&, const JobControl&)> compute;
  std::function<absl::Status(const JobRecord&)> prepare;
  // Between the context's files and its manifest.
  std::function<void()> before_publish;
  std::vector<std::string> ran, forgotten;  // names, in order

 private:
  class Prepared final : public PreparedJob {
   public:
    Prepared(FakeRunner& runner, JobRecord record, std::string sha)
        : runner_(runner), record_(std::move(record)), sha_(std::move(sha)) {}
    std::string token_ids_sha256() const override { return sha_; }
    std::vector<std::pair<std::string, std::string>> fingerprint() const override {
      return {{"weights_sha256", record_.model}};
    }
    absl::StatusOr<JobResult> Run(const JobControl& control) override {
      return runner_.Run(record_, sha_, control);
    }

   private:
    FakeRunner& runner_;
    const JobRecord record_;
    const std::string sha_;
  };

  absl::StatusOr<JobResult> Run(const JobRecord& record, const std::string& sha,
                                const JobControl& control) {
    ran.push_back(record.name);
    if (compute != nullptr) RETURN_IF_ERROR(compute(record, control));
    RETURN_IF_ERROR(control.still());
    const std::string name = absl::StrCat("made-", ++made_);
    const kvstore::TestContextSpec spec{.name = name, .layers = 1, .tokens = 40, .seed = made_};
    const kvstore::ContextId id = kvstore::ContextId::Random();
    v1::Manifest manifest = kvstore::TestManifest(spec, id);
    manifest.set_token_ids_sha256(sha);
    auto& field = *manifest.mutable_fingerprint()->add_fields();
    field.set_name("weights_sha256");
    field.set_value(record.model);
    const std::string staging = absl::StrCat(folder_, "/", name);
    ASSIGN_OR_RETURN(const auto paths, kvstore::WriteTestFiles(spec, id, staging));
    RETURN_IF_ERROR(store_->Publish(manifest, paths));
    ASSIGN_OR_RETURN(const auto from, store_->Export(name));
    kvstore::PushOptions options;
    options.still = [&] {
      if (before_publish != nullptr) before_publish();
      return control.still();
    };
    ASSIGN_OR_RETURN(const kvstore::Pushed pushed,
                     kvstore::PushContext(
                         bucket_, *from, record.name, [](int64_t, int64_t) {}, options));
    return JobResult{.content_id = pushed.content_id,
                     .context_id = id.ToString(),
                     .bytes = pushed.bytes,
                     .tokens = spec.tokens,
                     .was_there = pushed.was_there};
  }

  const kvstore::Bucket& bucket_;
  const std::string folder_;
  const std::vector<std::string> models_;
  std::unique_ptr<kvstore::Store> store_;
  uint64_t made_ = 0;
};
}  // namespace carrel::serving
