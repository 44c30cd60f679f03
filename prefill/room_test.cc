// What a prefill takes of a disk: what is kept of a short document, what is estimated, what is left when
// there is no room.
#include <sched.h>
#include <sys/mount.h>

#include <filesystem>
#include <fstream>

#include "carrel/v1/context.pb.h"
#include "common/file.h"
#include "common/resource_status.h"
#include "common/test_util.h"
#include "kvstore/index/rows/blob.h"
#include "kvstore/index/rows/stored_queries.h"
#include "kvstore/storage/child_process_test_util.h"
#include "kvstore/storage/store.h"
#include "model/test_models.h"
#include "prefill/job.h"
#include "prefill/prefill.h"
#include "prefill/reindex.h"

namespace carrel::prefill {
namespace {

namespace fs = std::filesystem;
using kvstore::Kind;

const model::Checkpoint& Demo() {
  static const model::Checkpoint* checkpoint =
      new model::Checkpoint(*model::LoadCheckpoint(model::DemoModelDir(), nullptr));
  return *checkpoint;
}

absl::StatusOr<v1::Manifest> Make(const PrefillConfig& config, int64_t n) {
  ASSIGN_OR_RETURN(const auto store,
                   kvstore::Store::Open(config.store_folder, kvstore::StoreMode::kReadWrite));
  static const uint64_t seed = TestSeed();  // the same text for every context of a length
  std::mt19937_64 random(seed);
  std::vector<TokenId> tokens(static_cast<size_t>(n));
  for (TokenId& token : tokens) token = static_cast<TokenId>(random() % 2048);
  ThreadPool pool(1);
  Progress progress(Progress::Mode::kQuiet);
  RETURN_IF_ERROR(RunPrefill(config, Demo(), tokens, *store, &pool, progress).status());
  return store->GetManifest(config.name);
}

class RoomTest : public testing::Test {
 protected:
  void SetUp() override {
    config_.store_folder = FreshTempDir();
    config_.name = "doc";
  }
  // Of the files that the store has now.
  int64_t BytesOfFiles() const {
    int64_t bytes = 0;
    for (const auto& entry : fs::directory_iterator(config_.store_folder + "/db")) {
      if (entry.path().extension() == ".sst") bytes += static_cast<int64_t>(entry.file_size());
    }
    return bytes;
  }
  PrefillConfig config_;
};

TEST_F(RoomTest, Estimate_IsWithinAThirdOfWhatIsStored) {
  int64_t before = 0;
  for (const kvstore::IndexKind kind : {kvstore::IndexKind::kFlat, kvstore::IndexKind::kCode}) {
    for (const int64_t n : {20, 184, 700, 3000}) {
      config_.name = absl::StrCat("doc-", static_cast<int>(kind), "-", n);
      config_.index.kind = kind;
      const auto manifest = Make(config_, n);
      CARREL_ASSERT_OK(manifest);
      const int64_t stored = BytesOfFiles() - before;
      before += stored;
      const int64_t estimated = StoredBytes(*manifest, static_cast<int32_t>(manifest->layers()));
      const double ratio = static_cast<double>(estimated) / static_cast<double>(stored);
      EXPECT_GT(ratio, 1 / 1.3) << config_.name << " " << estimated << " " << stored;
      EXPECT_LT(ratio, 1.3) << config_.name << " " << estimated << " " << stored;
    }
  }
}

TEST_F(RoomTest, ShortDocument_KeepsFewQueriesAndIsMeasuredByAll) {
  for (const auto& [tokens, kept] : {std::pair{10, 10}, {250, 16}, {640, 40}, {5000, 256}}) {
    config_.name = absl::StrCat("doc", tokens);
    const auto manifest = Make(config_, tokens);
    CARREL_ASSERT_OK(manifest);
    EXPECT_EQ(manifest->sampled_queries(), kept);
    const auto store = kvstore::Store::Open(config_.store_folder, kvstore::StoreMode::kReadOnly);
    const auto context = *(*store)->OpenContext(config_.name);
    EXPECT_EQ(kvstore::ReadSampledQueries(*context, Layer(3), KvHead(1))->samples(), kept);
    if (tokens != 250) continue;
    EXPECT_LT(BytesOfFiles(), 2 << 20);  // with doc10
    config_.name = "all-kept";
    config_.sampled_queries = 256;
    const auto all = Make(config_, tokens);
    CARREL_ASSERT_OK(all);
    ASSERT_GT(all->head_fidelity_size(), 0);
    for (int i = 0; i < all->head_fidelity_size(); ++i) {
      EXPECT_EQ(all->head_fidelity(i).SerializeAsString(),
                manifest->head_fidelity(i).SerializeAsString());
    }
    config_.sampled_queries.reset();
  }
}

TEST_F(RoomTest, Reindex_KeepsWhatMoreQueriesMeasured) {
  const auto manifest = Make(config_, 250);
  CARREL_ASSERT_OK(manifest);
  const auto store = kvstore::Store::Open(config_.store_folder, kvstore::StoreMode::kReadWrite);
  ThreadPool pool(1);
  Progress progress(Progress::Mode::kQuiet);
  ReindexConfig reindex;
  reindex.store_folder = config_.store_folder;
  reindex.from = "doc";
  reindex.name = "again";
  reindex.index.kind = kvstore::IndexKind::kCode;
  reindex.summary_rows = config_.summary_rows;
  CARREL_ASSERT_OK(Reindex(reindex, **store, &pool, progress));
  const auto again = (*store)->GetManifest("again");
  CARREL_ASSERT_OK(again);
  ASSERT_EQ(again->head_fidelity_size(), manifest->head_fidelity_size());
  for (int i = 0; i < again->head_fidelity_size(); ++i) {
    EXPECT_EQ(again->head_fidelity(i).SerializeAsString(),
              manifest->head_fidelity(i).SerializeAsString());
  }
  EXPECT_EQ(again->head_statistics_size(), manifest->head_statistics_size());
  const auto summaries = [&](const char* name) {
    const auto context = *(*store)->OpenContext(name);
    return *kvstore::Blob::Open(*context, Layer(2), Kind::kSummaries, KvHead(0))->Read();
  };
  EXPECT_EQ(summaries("again"), summaries("doc"));
  reindex.name = "finer";
  reindex.summary_rows = 16;
  CARREL_ASSERT_OK(Reindex(reindex, **store, &pool, progress));
  EXPECT_EQ((*store)->GetManifest("finer")->head_fidelity_size(),
            manifest->head_fidelity_size());  // measured anew
}

// Run by the test below, in a process of its own that may mount a file system. Writes what went wrong,
// or "ok".
TEST(RoomChild, DISABLED_PrefillsOnASmallDisk) {
  const std::string dir = kvstore::ChildFolder();
  if (dir.empty()) GTEST_SKIP() << "runs inside another test";
  const auto tell = [&](const std::string& result) {
    std::ofstream(dir + "/result.tmp") << result;
    fs::rename(dir + "/result.tmp", dir + "/result");
  };
  const std::string disk = dir + "/disk";
  fs::create_directories(disk);
  if ((unshare(CLONE_NEWNS) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) ||
      mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      mount("none", disk.c_str(), "tmpfs", 0, "size=40m") != 0) {
    return tell("skip");
  }
  PrefillConfig config;
  config.store_folder = disk + "/store";
  config.name = "doc";
  // Somebody else fills the disk after the look at it.
  int asked = 0;
  config.wanted = [&] {
    if (++asked != 4) return true;
    std::ofstream filler(disk + "/filler");
    const std::string block(4096, 'x');
    while (filler.write(block.data(), static_cast<std::streamsize>(block.size())).flush()) {
    }
    return true;
  };
  for (const bool keep : {false, true}) {
    config.keep_when_full = keep;
    asked = 0;
    const absl::Status full = Make(config, 600).status();
    if (!IsDiskFull(full)) return tell(full.ToString());
    fs::remove(disk + "/filler");
    const auto left = kvstore::ListUnfinished(config.store_folder);
    if (!left.ok() || left->empty() == keep) return tell(absl::StrCat("left ", left->size()));
  }
  config.wanted = nullptr;
  if (const auto made = Make(config, 600); !made.ok()) return tell(made.status().ToString());
  // More than there can be room for is refused before anything is made.
  config.name = "large";
  const absl::Status refused = Make(config, 20000).status();
  if (!IsDiskFull(refused)) return tell(refused.ToString());
  const auto left = kvstore::ListUnfinished(config.store_folder);
  tell(left.ok() && left->empty() ? "ok" : "a folder is left");
}

TEST(RoomDiskTest, FullDisk_LeavesNothingUnlessItIsWanted) {
  const std::string dir = FreshTempDir();
  kvstore::ChildProcess child("RoomChild.DISABLED_PrefillsOnASmallDisk", dir);
  ASSERT_TRUE(kvstore::WaitForFile(dir + "/result"));
  const std::string result = *ReadFile(dir + "/result");
  if (result == "skip") GTEST_SKIP() << "may not mount a small file system here";
  EXPECT_EQ(result, "ok");
}

}  // namespace
}  // namespace carrel::prefill
