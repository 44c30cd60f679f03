// A checkpoint that is written to while a document passes through it: what is published is what the
// checkpoint of its fingerprint computes, or nothing is.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include "absl/time/clock.h"
#include "carrel/v1/context.pb.h"
#include "common/file.h"
#include "common/status.h"
#include "common/test_util.h"
#include "kvstore/storage/store.h"
#include "model/test_models.h"
#include "prefill/prefill.h"

namespace carrel::prefill {
namespace {

namespace fs = std::filesystem;

// Trials of a random test; CARREL_TRIALS for more.
int Trials(int usual) {
  const char* given = std::getenv("CARREL_TRIALS");
  return given == nullptr ? usual : std::atoi(given);
}

class ChangedCheckpointTest : public testing::Test {
 protected:
  void SetUp() override {
    random_.seed(TestSeed());
    folder_ = FreshTempDir();
    model_ = folder_ + "/model";
    fs::copy(std::string(CARREL_SOURCE_DIR) + "/models/demo", model_, fs::copy_options::recursive);
    weights_ = model_ + "/model.safetensors";
    fs::permissions(weights_, fs::perms(0600));
    clean_ = *ReadFile(weights_);
    other_ = clean_;
    // The lowest bits of mantissas, everywhere: a revision.
    for (size_t at = clean_.size() / 20; at + 2 <= other_.size(); at += 64) other_[at] ^= 4;
    for (int i = 0; i < 96; ++i) tokens_.push_back(static_cast<TokenId>(random_() % 2048));
  }

  // As cp does: the file stays the same one.
  void WriteWeights(const std::string& bytes) const {
    const int fd = open(weights_.c_str(), O_WRONLY | O_TRUNC | O_CLOEXEC);
    CARREL_CHECK(fd >= 0);
    const size_t kBlock = std::max<size_t>(1, bytes.size() / 100);
    for (size_t at = 0; at < bytes.size(); at += kBlock) {
      const size_t n = std::min(kBlock, bytes.size() - at);
      CARREL_CHECK(write(fd, bytes.data() + at, n) == static_cast<ssize_t>(n));
    }
    close(fd);
  }

  absl::StatusOr<PrefillReport> RunInto(kvstore::Store& store, const std::string& store_folder,
                                        const std::string& name, kvstore::IndexKind index) {
    ThreadPool pool(1);
    ASSIGN_OR_RETURN(const model::Checkpoint checkpoint, model::LoadCheckpoint(model_, &pool));
    Progress progress(Progress::Mode::kQuiet);
    PrefillConfig config;
    config.store_folder = store_folder;
    config.name = name;
    config.index.kind = index;
    return RunPrefill(config, checkpoint, tokens_, store, &pool, progress);
  }

  struct Published {
    std::string weights_sha256;
    std::vector<std::string> rows;  // of each layer, kind and KV head
    bool operator==(const Published&) const = default;
  };
  static Published Read(const kvstore::Store& store, const std::string& name) {
    const auto context = *store.OpenContext(name);
    const v1::Manifest& manifest = context->manifest();
    Published published;
    for (const auto& field : manifest.fingerprint().fields()) {
      if (field.name() == "weights_sha256") published.weights_sha256 = field.value();
    }
    for (uint32_t layer = 0; layer < manifest.layers(); ++layer) {
      for (const kvstore::Kind kind : {kvstore::Kind::kKeyRows, kvstore::Kind::kValueRows}) {
        for (uint32_t head = 0; head < manifest.kv_heads(); ++head) {
          const auto segment = *context->Segment(static_cast<int32_t>(layer), kind,
                                                 KvHead(static_cast<int32_t>(head)), 0);
          CARREL_EXPECT_OK(segment->Verify(0, static_cast<int64_t>(segment->payload().size())));
          published.rows.emplace_back(segment->payload());
        }
      }
    }
    return published;
  }

  std::mt19937_64 random_;
  std::string folder_, model_, weights_, clean_, other_;
  std::vector<TokenId> tokens_;
};

// Many times on a checkpoint so small that a document passes through it in milliseconds.
class AnyMomentTest : public ChangedCheckpointTest,
                      public testing::WithParamInterface<kvstore::IndexKind> {
 protected:
  static constexpr char kModel[] = R"({"model_type": "llama", "vocab_size": 256,
      "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
      "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
      "max_position_embeddings": 512, "tie_word_embeddings": true})";

  void SetUp() override {
    random_.seed(TestSeed());
    folder_ = FreshTempDir();
    model_ = folder_ + "/model";
    fs::create_directories(model_);
    CARREL_ASSERT_OK(model::WriteRandomModel(model_, kModel, TestSeed()));
    weights_ = model_ + "/model.safetensors";
    clean_ = *ReadFile(weights_);
    other_ = clean_;
    // Low bits of what bf16 keeps of an f32, everywhere: a revision.
    for (size_t at = clean_.size() / 20 / 4 * 4 + 2; at < other_.size(); at += 64) other_[at] ^= 4;
    for (int i = 0; i < 64; ++i) tokens_.push_back(static_cast<TokenId>(random_() % 256));
    store_ = *kvstore::Store::Open(folder_ + "/store", kvstore::StoreMode::kReadWrite);
  }

  // Until the time of a file that was written is settled.
  static void Settle() { absl::SleepFor(absl::Milliseconds(30)); }

  absl::Status RunAs(const std::string& name) {
    return RunInto(*store_, folder_ + "/store", name, GetParam()).status();
  }
  Published Take(const std::string& name) {
    Published published = Read(*store_, name);
    CARREL_EXPECT_OK(store_->Delete(name));
    return published;
  }
  // Writes the other revision, and perhaps the first again, at any moment of a prefill.
  std::thread WriteAtAnyMoment(absl::Duration usual) {
    const absl::Duration after = usual * (static_cast<double>(random_() % 1100) / 1000);
    const absl::Duration later = usual * (static_cast<double>(random_() % 500) / 1000);
    return std::thread([this, after, later, back = random_() % 2 == 0] {
      absl::SleepFor(after);
      WriteWeights(other_);
      if (!back) return;
      absl::SleepFor(later);
      WriteWeights(clean_);
    });
  }

  std::unique_ptr<kvstore::Store> store_;
};

TEST_P(AnyMomentTest, WrittenTo_NothingWrongIsPublished) {
  CARREL_ASSERT_OK(RunAs("clean"));  // what follows finds all code and pages in memory
  const Published clean = Take("clean");
  const absl::Time start = absl::Now();
  CARREL_ASSERT_OK(RunAs("clean"));
  const absl::Duration usual = absl::Now() - start;
  ASSERT_EQ(Take("clean"), clean);
  WriteWeights(other_);
  Settle();
  CARREL_ASSERT_OK(RunAs("other"));
  const Published other = Take("other");
  ASSERT_NE(clean.weights_sha256, other.weights_sha256);
  // Or rows of both could lie side by side unseen.
  for (size_t i = 0; i < clean.rows.size(); ++i) ASSERT_NE(clean.rows[i], other.rows[i]);
  int published = 0, refused = 0, wrong = 0;
  const int trials = Trials(60);
  for (int trial = 0; trial < trials; ++trial) {
    WriteWeights(clean_);
    Settle();
    const std::string name = absl::StrCat("trial-", trial);
    std::thread writer = WriteAtAnyMoment(usual);
    const absl::Status status = RunAs(name);
    writer.join();
    if (!status.ok()) {
      ++refused;
      // Of a file that is being written the header or the size may not do, either.
      EXPECT_TRUE(absl::IsDataLoss(status) || absl::IsInvalidArgument(status)) << status;
      // Nor does the next run find anything wrong to go on with.
      WriteWeights(clean_);
      Settle();
      const absl::Status again = RunAs(name);
      // Unless the first had taken the other checkpoint for its own.
      if (!again.ok()) {
        EXPECT_EQ(again.code(), absl::StatusCode::kFailedPrecondition) << again;
        continue;
      }
    }
    ++published;
    const Published found = Take(name);
    wrong += found == clean || found == other ? 0 : 1;
  }
  std::cout << trials << " trials: " << refused << " refused, " << published << " published, "
            << wrong << " wrong; a prefill takes " << usual << std::endl;
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(refused, 0);
}

INSTANTIATE_TEST_SUITE_P(Kinds, AnyMomentTest,
                         testing::Values(kvstore::IndexKind::kFlat, kvstore::IndexKind::kCode,
                                         kvstore::IndexKind::kHnsw),
                         [](const auto& param) {
                           return std::string(kvstore::IndexKindName(param.param));
                         });

TEST_F(ChangedCheckpointTest, WrittenTo_SaysSoByName) {
  ThreadPool pool(1);
  const auto checkpoint = model::LoadCheckpoint(model_, &pool);
  CARREL_ASSERT_OK(checkpoint);
  CARREL_EXPECT_OK(checkpoint->CheckUnchanged());
  absl::SleepFor(absl::Milliseconds(30));
  WriteWeights(other_);
  EXPECT_THAT(checkpoint->CheckUnchanged(),
              StatusIs(absl::StatusCode::kDataLoss, "the checkpoint changed while it was read"));
  const auto store = *kvstore::Store::Open(folder_ + "/store", kvstore::StoreMode::kReadWrite);
  Progress progress(Progress::Mode::kQuiet);
  PrefillConfig config;
  config.store_folder = folder_ + "/store";
  config.name = "doc";
  EXPECT_THAT(RunPrefill(config, *checkpoint, tokens_, *store, &pool, progress),
              StatusIs(absl::StatusCode::kDataLoss, "nothing is published"));
  EXPECT_TRUE(store->List()->empty());
}

TEST_F(ChangedCheckpointTest, LinkedOrGivenOtherRights_IsUnchanged) {
  ThreadPool pool(1);
  const auto checkpoint = model::LoadCheckpoint(model_, &pool);
  CARREL_ASSERT_OK(checkpoint);
  absl::SleepFor(absl::Milliseconds(30));
  fs::create_hard_link(weights_, folder_ + "/link");
  CARREL_EXPECT_OK(checkpoint->CheckUnchanged());
  fs::permissions(weights_, fs::perms(0400));
  CARREL_EXPECT_OK(checkpoint->CheckUnchanged());
  // Another file at the path is none of this process's business: it reads the one that it mapped.
  CARREL_ASSERT_OK(WriteFileAtomically(weights_, other_));
  CARREL_EXPECT_OK(checkpoint->CheckUnchanged());
}

TEST_F(ChangedCheckpointTest, Truncated_IsAnErrorAndNoSignal) {
  ThreadPool pool(1);
  const auto checkpoint = model::LoadCheckpoint(model_, &pool);
  CARREL_ASSERT_OK(checkpoint);
  fs::resize_file(weights_, clean_.size() / 2);
  const auto store = *kvstore::Store::Open(folder_ + "/store", kvstore::StoreMode::kReadWrite);
  Progress progress(Progress::Mode::kQuiet);
  PrefillConfig config;
  config.store_folder = folder_ + "/store";
  config.name = "doc";
  EXPECT_THAT(RunPrefill(config, *checkpoint, tokens_, *store, &pool, progress),
              StatusIs(absl::StatusCode::kDataLoss, weights_));
}

}  // namespace
}  // namespace carrel::prefill
