// Contexts of older formats become contexts of this one, or stay what they were.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <random>

#include "carrel/v1/context.pb.h"
#include "common/file.h"
#include "common/test_util.h"
#include "kvstore/storage/child_process_test_util.h"
#include "kvstore/storage/store.h"
#include "kvstore/storage/store_test_util.h"

namespace carrel::kvstore {
namespace {

namespace fs = std::filesystem;
using absl::StatusCode;

constexpr auto kNoProgress = [](double) {};

std::unique_ptr<Store> OpenStore(const std::string& folder,
                                 StoreMode mode = StoreMode::kReadWrite) {
  auto store = Store::Open(folder, mode);
  EXPECT_TRUE(store.ok()) << store.status();
  return store.ok() ? *std::move(store) : nullptr;
}

int64_t SstBytes(const std::string& folder) {
  int64_t bytes = 0;
  for (const auto& file : fs::recursive_directory_iterator(folder)) {
    if (file.path().extension() == ".sst") bytes += static_cast<int64_t>(file.file_size());
  }
  return bytes;
}

TEST(UpgradeTest, OlderContexts_KeepTheirBytesAndGetAContentId) {
  const std::string dir = FreshTempDir();
  const std::string folder = dir + "/store";
  for (const char* name : {"first", "second", "third"}) {
    CARREL_ASSERT_OK(PublishTestContext(*OpenStore(folder), dir + "/staging", {.name = name}));
  }
  CARREL_ASSERT_OK(MakeUnbound(folder, "first", 1));
  CARREL_ASSERT_OK(MakeUnbound(folder, "second", 2));
  {
    const auto store = OpenStore(folder);
    const auto open_before = *store->OpenContext("first");
    std::vector<double> shares;
    CARREL_ASSERT_OK(store->Upgrade("first", [&](double share) { shares.push_back(share); }));
    EXPECT_EQ(shares.back(), 1);
    CARREL_EXPECT_OK(CheckTestContext(*open_before, {.name = "first"}));
    CARREL_EXPECT_OK(CheckTestContext(*store, {.name = "second"}));
    EXPECT_EQ(store->GetManifest("second")->content_id(), "");
    CARREL_ASSERT_OK(store->Upgrade("second", kNoProgress));
    for (const char* name : {"first", "second", "third"}) {
      EXPECT_THAT(store->Upgrade(name, kNoProgress),
                  StatusIs(StatusCode::kFailedPrecondition, "is of format version 3 already"));
    }
    EXPECT_THAT(store->Upgrade("none", kNoProgress), StatusIs(StatusCode::kNotFound, "none"));
  }
  const auto store = OpenStore(folder, StoreMode::kReadOnly);
  EXPECT_EQ(store->List()->size(), 3u);
  for (const char* name : {"first", "second", "third"}) {
    CARREL_EXPECT_OK(CheckTestContext(*store, {.name = name}));
    const v1::Manifest manifest = *store->GetManifest(name);
    EXPECT_EQ(manifest.format_version(), kManifestFormatVersion);
    EXPECT_EQ(manifest.content_id().size(), 64u);
    EXPECT_EQ(manifest.number(), 0u);
  }
  EXPECT_THAT(store->Upgrade("first", kNoProgress),
              StatusIs(StatusCode::kFailedPrecondition, "open read-only"));
}

TEST(UpgradeTest, TheOldFilesAreFreed) {
  const std::string dir = FreshTempDir();
  const std::string folder = dir + "/store";
  CARREL_ASSERT_OK(PublishTestContext(*OpenStore(folder), dir + "/staging", {.tokens = 10000}));
  CARREL_ASSERT_OK(MakeUnbound(folder, "report"));
  const auto store = OpenStore(folder);
  const int64_t before = SstBytes(folder);
  CARREL_ASSERT_OK(store->Upgrade("report", kNoProgress));
  EXPECT_LT(SstBytes(folder), before * 5 / 4);
  EXPECT_TRUE(fs::is_empty(folder + "/publishing"));
  // And the store takes new contexts, under the name too.
  CARREL_ASSERT_OK(store->Delete("report"));
  CARREL_EXPECT_OK(PublishTestContext(*store, dir + "/staging", {.seed = 2}));
  CARREL_EXPECT_OK(CheckTestContext(*store, {.seed = 2}));
}

// Whoever binds a context vouches for it.
TEST(UpgradeTest, DamagedOrIncomplete_IsRefusedAndStaysAsItIs) {
  const std::string dir = FreshTempDir();
  const TestContextSpec spec{.tokens = 2000, .segment_tokens = 1024};
  const struct {
    const char* message;
    std::function<void(v1::Manifest&)> edit;
  } cases[] = {
      {"the manifest has 00", [](v1::Manifest& m) { m.set_token_ids_sha256("00"); }},
      {"K rows, by its manifest there are", [](v1::Manifest& m) { m.set_tokens(2001); }},
      {"layer 1 has 0 bytes of index, by its manifest there are 7",
       [](v1::Manifest& m) {
         m.add_layer_sizes()->set_layer(1);
         m.mutable_layer_sizes(0)->set_index_bytes(7);
       }},
  };
  int i = 0;
  for (const auto& c : cases) {
    const std::string folder = absl::StrCat(dir, "/store-", i++);
    CARREL_ASSERT_OK(PublishTestContext(*OpenStore(folder), dir + "/staging", spec));
    CARREL_ASSERT_OK(MakeUnbound(folder, "report"));
    CARREL_ASSERT_OK(EditManifest(folder, "report", c.edit));
    const auto store = OpenStore(folder);
    const std::string before = store->GetManifest("report")->SerializeAsString();
    EXPECT_THAT(store->Upgrade("report", kNoProgress), StatusIs(StatusCode::kDataLoss, c.message));
    EXPECT_EQ(store->GetManifest("report")->SerializeAsString(), before);
    EXPECT_TRUE(fs::is_empty(folder + "/publishing"));
  }
  const std::string folder = dir + "/store-flip";
  CARREL_ASSERT_OK(PublishTestContext(*OpenStore(folder), dir + "/staging", spec));
  CARREL_ASSERT_OK(MakeUnbound(folder, "report"));
  const std::string row =
      TestPayload(spec, {{}, 1, Kind::kValueRows, KvHead(1), 1}).substr(5000, 64);
  for (const auto& file : fs::directory_iterator(folder + "/db")) {
    if (file.path().extension() != ".sst") continue;
    std::string bytes = *ReadFile(file.path().string());
    const size_t at = bytes.find(row);
    if (at == std::string::npos) continue;
    bytes[at + 20] = static_cast<char>(bytes[at + 20] ^ 4);
    CARREL_ASSERT_OK(WriteFileAtomically(file.path().string(), bytes));
  }
  EXPECT_THAT(OpenStore(folder)->Upgrade("report", kNoProgress),
              StatusIs(StatusCode::kDataLoss, "V rows, layer 1, kv_head 1, segment 1"));
}

TEST(UpgradeChild, DISABLED_Upgrades) {
  const std::string dir = ChildFolder();
  if (dir.empty()) GTEST_SKIP() << "runs inside another test";
  const auto store = OpenStore(dir + "/store");
  std::ofstream said(dir + "/said");
  CARREL_ASSERT_OK(store->Upgrade("report", [&](double share) { said << share << std::endl; }));
  std::ofstream(dir + "/done") << "y";
  for (;;) pause();
}

TEST(UpgradeTest, KilledAnywhere_LeavesTheOldOneOrTheNewOne) {
  const std::string dir = FreshTempDir();
  const std::string folder = dir + "/store";
  const TestContextSpec spec{.layers = 12, .tokens = 2000};
  std::mt19937_64 rng(TestSeed());
  int old_ones = 0;
  for (int round = 0; round < 12; ++round) {
    if (round == 0 || !OpenStore(folder)->GetManifest("report")->content_id().empty()) {
      fs::remove_all(folder);
      CARREL_ASSERT_OK(PublishTestContext(*OpenStore(folder), dir + "/staging", spec));
      CARREL_ASSERT_OK(PublishTestContext(*OpenStore(folder), dir + "/staging", {.name = "kept"}));
      CARREL_ASSERT_OK(MakeUnbound(folder, "report"));
    }
    fs::remove(dir + "/said");
    fs::remove(dir + "/done");
    {
      ChildProcess child("UpgradeChild.DISABLED_Upgrades", dir);
      const auto size = [&] {
        return fs::exists(dir + "/said") ? fs::file_size(dir + "/said") : 0;
      };
      // Some in the middle of the files, some around the swap at the end.
      const uintmax_t until = round % 2 == 0 ? 1 + rng() % 80 : 93;
      for (int i = 0; i < 60000 && size() < until && !fs::exists(dir + "/done"); ++i) usleep(200);
      usleep(static_cast<useconds_t>(rng() % 8000));
      ASSERT_TRUE(child.Kill()) << "the child ended by itself";
    }
    CARREL_EXPECT_OK(CheckTestContext(*OpenStore(folder, StoreMode::kReadOnly), spec));
    const auto store = OpenStore(folder);
    EXPECT_EQ(store->List()->size(), 2u);
    CARREL_EXPECT_OK(CheckTestContext(*store, spec));
    CARREL_EXPECT_OK(CheckTestContext(*store, {.name = "kept"}));
    EXPECT_FALSE(fs::exists(folder + "/publishing") && !fs::is_empty(folder + "/publishing"));
    old_ones += store->GetManifest("report")->content_id().empty() ? 1 : 0;
  }
  EXPECT_GT(old_ones, 0);
}

}  // namespace
}  // namespace carrel::kvstore
