// What goes wrong around a store: bits flip, processes are killed, disks fill up, files go missing.
#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

#include "carrel/v1/context.pb.h"
#include "common/file.h"
#include "common/test_util.h"
#include "kvstore/storage/catalog.h"
#include "kvstore/storage/child_process_test_util.h"
#include "kvstore/storage/store.h"
#include "kvstore/storage/store_test_util.h"

namespace carrel::kvstore {
namespace {

namespace fs = std::filesystem;
using absl::StatusCode;

std::unique_ptr<Store> OpenStore(const std::string& folder,
                                 StoreMode mode = StoreMode::kReadWrite) {
  auto store = Store::Open(folder, mode);
  EXPECT_TRUE(store.ok()) << store.status();
  return store.ok() ? *std::move(store) : nullptr;
}

// Files of the database whose names end so, in order.
std::vector<std::string> DbFiles(const std::string& folder, const std::string& extension) {
  std::vector<std::string> paths;
  for (const auto& file : fs::directory_iterator(folder + "/db")) {
    if (file.path().extension() == extension) paths.push_back(file.path().string());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

void FlipBit(const std::string& path, int64_t bit) {
  (void)chmod(path.c_str(), 0600);  // what is published is read-only
  const int fd = open(path.c_str(), O_RDWR);
  char byte = 0;
  ASSERT_EQ(pread(fd, &byte, 1, bit / 8), 1);
  byte = static_cast<char>(byte ^ (1 << (bit % 8)));
  ASSERT_EQ(pwrite(fd, &byte, 1, bit / 8), 1);
  close(fd);
}

// "context #ID: manifest ...", of one whose name nobody knows.
constexpr char kNameless[] = ": manifest: ";

// Reads a context and compares it with what was written, without making that up again each time.
class Oracle {
 public:
  explicit Oracle(const TestContextSpec& spec) : name_(spec.name) {
    for (const SegmentKey& key : TestKeys(spec, ContextId(1))) {
      payloads_[EncodeKey(key)] = TestPayload(spec, key);
    }
  }

  // OK: everything is there and right. Anything that verified and is not right fails the test.
  absl::Status Read(const std::string& folder) const {
    const auto store = Store::Open(folder, StoreMode::kReadOnly);
    if (!store.ok()) return store.status();
    const auto context = (*store)->OpenContext(name_);
    if (!context.ok()) return context.status();
    absl::Status first;
    for (const auto& [bytes, expected] : payloads_) {
      const SegmentKey key = *DecodeKey(bytes);
      const auto segment = (*context)->Segment(key.layer, key.kind, key.kv_head, key.segment);
      absl::Status status = segment.status();
      if (segment.ok()) {
        const absl::string_view payload = (*segment)->payload();
        status = (*segment)->Verify(0, static_cast<int64_t>(payload.size()));
        EXPECT_TRUE(!status.ok() || payload == expected) << DescribeKey(key);
      }
      if (!status.ok()) {
        EXPECT_THAT(std::string(status.message()), testing::HasSubstr(DescribeKey(key)));
      }
      if (first.ok()) first = status;
    }
    return first;
  }

 private:
  const std::string name_;
  std::map<std::string, std::string> payloads_;
};

// RocksDB 7.8 looks at one bit of its properties block before it checks the block: the topmost of the
// last word, which says that the block has a hash index. Debian's build has assertions and aborts.
int64_t BitThatRocksDbTrusts(const std::string& file) {
  const std::string bytes = *ReadFile(file);
  // The properties block ends, with a trailer of 5 bytes, where the metaindex block begins: with 3
  // bytes of lengths and the name of the properties.
  const size_t name = bytes.rfind("rocksdb.properties");
  EXPECT_NE(name, std::string::npos) << file;
  return static_cast<int64_t>(name - 3 - 5) * 8 - 1;
}

TEST(StoreFaultTest, FlippedBit_InAnSst_IsDataLossOrHarmless) {
  const std::string dir = FreshTempDir();
  const std::string folder = dir + "/store";
  const TestContextSpec spec{.head_dim = 64, .tokens = 3000, .segment_tokens = 1024};
  CARREL_ASSERT_OK(PublishTestContext(*OpenStore(folder), dir + "/staging", spec));
  const Oracle oracle(spec);
  CARREL_ASSERT_OK(oracle.Read(folder));
  std::mt19937_64 rng(TestSeed());
  const std::vector<std::string> files = DbFiles(folder, ".sst");
  ASSERT_EQ(files.size(), 4u);
  int lost = 0, harmless = 0;
  for (int round = 0; round < 240; ++round) {
    // The catalog's file is the last. Half of the flips go where RocksDB's own bytes are: the first
    // block's header, and index, properties and footer at the end.
    const std::string& file = files[rng() % files.size()];
    const auto bits = static_cast<int64_t>(fs::file_size(file)) * 8;
    const int64_t region = std::min<int64_t>(bits, round % 4 == 0 ? 64 * 8 : 2048 * 8);
    const auto offset = static_cast<int64_t>(rng() % static_cast<uint64_t>(region));
    const int64_t bit = round % 4 == 0 ? offset
                        : round % 4 == 1
                            ? bits - 1 - offset
                            : static_cast<int64_t>(rng() % static_cast<uint64_t>(bits));
    if (bit == BitThatRocksDbTrusts(file)) continue;
    FlipBit(file, bit);
    const absl::Status status = oracle.Read(folder);
    FlipBit(file, bit);
    if (status.ok()) {
      ++harmless;
      continue;
    }
    ++lost;
    EXPECT_EQ(status.code(), StatusCode::kDataLoss) << file << " bit " << bit << ": " << status;
    const std::string message(status.message());
    EXPECT_TRUE(message.find("context report") != std::string::npos ||
                message.find("context #") != std::string::npos)
        << file << " bit " << bit << ": " << status;
  }
  EXPECT_GT(lost, 60);
  EXPECT_GT(harmless, 10);
  CARREL_EXPECT_OK(oracle.Read(folder));
}

TEST(StoreFaultTest, FlippedBit_InDatabaseFiles_NeverGivesWrongBytes) {
  const std::string dir = FreshTempDir();
  const std::string folder = dir + "/store";
  const TestContextSpec spec{.tokens = 400};
  CARREL_ASSERT_OK(PublishTestContext(*OpenStore(folder), dir + "/staging", spec));
  const Oracle oracle(spec);
  std::mt19937_64 rng(TestSeed());
  std::vector<std::string> files = DbFiles(folder, ".log");
  for (const auto& file : fs::directory_iterator(folder + "/db")) {
    if (file.path().filename().string().rfind("MANIFEST", 0) == 0) {
      files.push_back(file.path().string());
    }
  }
  ASSERT_GE(files.size(), 2u);
  int errors = 0;
  for (int round = 0; round < 120; ++round) {
    const std::string& file = files[rng() % files.size()];
    if (fs::file_size(file) == 0) continue;
    const auto bit = static_cast<int64_t>(rng() % (fs::file_size(file) * 8));
    FlipBit(file, bit);
    errors += oracle.Read(folder).ok() ? 0 : 1;
    FlipBit(file, bit);
  }
  EXPECT_GT(errors, 10);
  CARREL_EXPECT_OK(oracle.Read(folder));
}

TEST(StoreFaultTest, DamagedManifest_IsReportedAndOthersStayReadable) {
  const std::string dir = FreshTempDir();
  const std::string folder = dir + "/store";
  CARREL_ASSERT_OK(PublishTestContext(*OpenStore(folder), dir + "/staging", {.name = "a"}));
  CARREL_ASSERT_OK(PublishTestContext(*OpenStore(folder), dir + "/staging", {.name = "b"}));
  // The one file that holds context a's name.
  for (const std::string& file : DbFiles(folder, ".sst")) {
    const std::string bytes = *ReadFile(file);
    const size_t at = bytes.find("after_rope");
    if (at == std::string::npos) continue;
    FlipBit(file, static_cast<int64_t>(at) * 8);
    break;
  }
  const auto store = OpenStore(folder);
  EXPECT_THAT(store->List(), StatusIs(StatusCode::kDataLoss, kNameless));
  std::vector<absl::Status> unreadable;
  const auto manifests = store->List(&unreadable);
  CARREL_ASSERT_OK(manifests);
  ASSERT_EQ(manifests->size(), 1u);
  EXPECT_EQ((*manifests)[0].name(), "b");
  ASSERT_EQ(unreadable.size(), 1u);
  EXPECT_THAT(unreadable[0], StatusIs(StatusCode::kDataLoss, kNameless));
  CARREL_EXPECT_OK(CheckTestContext(*store, {.name = "b"}));
  EXPECT_THAT(store->OpenContext("a"), StatusIs(StatusCode::kDataLoss, kNameless));
  CARREL_EXPECT_OK(PublishTestContext(*store, dir + "/staging", {.name = "c"}));
  const size_t before = DbFiles(folder, ".sst").size();
  // "context #ID: manifest ..."
  const std::string message(unreadable[0].message());
  const std::string nameless = message.substr(8, message.find(':') - 8);
  EXPECT_EQ(nameless.size(), 33u) << message;
  CARREL_EXPECT_OK(store->Delete(nameless));
  EXPECT_LT(DbFiles(folder, ".sst").size(), before);
  EXPECT_THAT(store->OpenContext("a"), StatusIs(StatusCode::kNotFound, "context a is not in"));
  EXPECT_EQ(store->List()->size(), 2u);
}

TEST(StoreFaultTest, LostCatalog_KeepsTheFiles) {
  const std::string dir = FreshTempDir();
  const std::string folder = dir + "/store";
  CARREL_ASSERT_OK(PublishTestContext(*OpenStore(folder), dir + "/staging", {}));
  const std::vector<std::string> files = DbFiles(folder, ".sst");
  const std::string kept = *ReadFile(files.back());
  fs::remove(files.back());
  {
    const auto store = Store::Open(folder, StoreMode::kReadWrite);
    if (store.ok()) {
      EXPECT_THAT((*store)->List(), StatusIs(StatusCode::kDataLoss, kNameless));
    }
  }
  CARREL_ASSERT_OK(WriteFileAtomically(files.back(), kept));
  CARREL_EXPECT_OK(CheckTestContext(*OpenStore(folder), {}));
}

TEST(StoreFaultTest, LostOrTruncatedLayerFile_IsDataLossNamingContextAndFile) {
  const std::string dir = FreshTempDir();
  const std::string folder = dir + "/store";
  CARREL_ASSERT_OK(PublishTestContext(*OpenStore(folder), dir + "/staging", {}));
  const std::string file = DbFiles(folder, ".sst")[1];
  fs::permissions(file, fs::perms::owner_write, fs::perm_options::add);  // published: read-only
  fs::resize_file(file, fs::file_size(file) - 1);
  EXPECT_THAT(OpenStore(folder)->OpenContext("report"),
              StatusIs(StatusCode::kDataLoss, "context report"));
  EXPECT_THAT(OpenStore(folder)->OpenContext("report"),
              StatusIs(StatusCode::kDataLoss, fs::path(file).filename().string()));
  fs::remove(file);
  EXPECT_THAT(OpenStore(folder)->OpenContext("report"),
              StatusIs(StatusCode::kDataLoss, "file is missing"));
}

// Another layer's rows, or another shard's: right bytes in the wrong place.
TEST(StoreFaultTest, LayerFilesOfOneContext_Swapped_AreRefused) {
  const std::string dir = FreshTempDir();
  const std::string folder = dir + "/store";
  const TestContextSpec spec{.layers = 3};
  CARREL_ASSERT_OK(PublishTestContext(*OpenStore(folder), dir + "/staging", spec));
  const Oracle oracle(spec);
  const std::vector<std::string> files = DbFiles(folder, ".sst");
  int swapped = 0;
  for (size_t a = 0; a < files.size(); ++a) {
    for (size_t b = a + 1; b < files.size(); ++b) {
      fs::rename(files[a], dir + "/aside");
      fs::rename(files[b], files[a]);
      fs::rename(dir + "/aside", files[b]);
      EXPECT_FALSE(oracle.Read(folder).ok()) << files[a] << " and " << files[b];
      fs::rename(files[a], dir + "/aside");
      fs::rename(files[b], files[a]);
      fs::rename(dir + "/aside", files[b]);
      CARREL_EXPECT_OK(oracle.Read(folder));
      ++swapped;
    }
  }
  EXPECT_GE(swapped, 6);
}

TEST(StoreFaultTest, OlderFormatVersions_AreReadUnboundBesideThisOne) {
  const std::string dir = FreshTempDir();
  const std::string folder = dir + "/store";
  for (const char* name : {"first", "second", "third"}) {
    CARREL_ASSERT_OK(PublishTestContext(*OpenStore(folder), dir + "/staging", {.name = name}));
  }
  EXPECT_EQ(*MakeUnbound(folder, "first", 1), ContextId(1));
  EXPECT_EQ(*MakeUnbound(folder, "second", 2), ContextId(2));
  const auto store = OpenStore(folder);
  for (const char* name : {"first", "second", "third"}) {
    CARREL_EXPECT_OK(CheckTestContext(*store, {.name = name}));
  }
  EXPECT_EQ(store->GetManifest("first")->content_id(), "");
  EXPECT_EQ(store->GetManifest("second")->format_version(), 2u);
  EXPECT_NE(store->GetManifest("third")->content_id(), "");
  CARREL_EXPECT_OK(store->Delete("first"));
  CARREL_EXPECT_OK(CheckTestContext(*store, {.name = "second"}));
  CARREL_EXPECT_OK(CheckTestContext(*store, {.name = "third"}));
  EXPECT_EQ(store->List()->size(), 2u);
}

TEST(StoreFaultTest, AnotherFormatVersion_IsFailedPreconditionAndCanBeDeleted) {
  const std::string dir = FreshTempDir();
  const std::string folder = dir + "/store";
  CARREL_ASSERT_OK(PublishTestContext(*OpenStore(folder), dir + "/staging", {.name = "new"}));
  CARREL_ASSERT_OK(PublishTestContext(*OpenStore(folder), dir + "/staging", {}));
  CARREL_ASSERT_OK(EditManifest(folder, "new", [](v1::Manifest& m) { m.set_format_version(7); }));
  const auto store = OpenStore(folder);
  const std::string message =
      "context new has format version 7, this program reads versions 1 to 3";
  EXPECT_THAT(store->List(), StatusIs(StatusCode::kFailedPrecondition, message));
  EXPECT_THAT(store->GetManifest("new"), StatusIs(StatusCode::kFailedPrecondition, message));
  EXPECT_THAT(store->OpenContext("new"), StatusIs(StatusCode::kFailedPrecondition, message));
  EXPECT_THAT(store->OpenContext("none"), StatusIs(StatusCode::kNotFound, "context none"));
  CARREL_EXPECT_OK(CheckTestContext(*store, {}));
  CARREL_EXPECT_OK(store->Delete("new"));
  EXPECT_EQ(store->List()->size(), 1u);
}

// Whoever writes the catalog cannot make a reader allocate, sum or print what he likes.
TEST(StoreFaultTest, HostileManifest_IsDataLossNamingTheField) {
  struct Case {
    const char* field;
    std::function<void(v1::Manifest&)> edit;
  };
  const std::vector<Case> cases = {
      {"layers x kv_heads=",
       [](v1::Manifest& m) { m.set_layers(65534), m.set_kv_heads(4096), m.set_q_heads(4096); }},
      {"layers=70000", [](v1::Manifest& m) { m.set_layers(70000); }},
      {"kv_heads=0", [](v1::Manifest& m) { m.set_kv_heads(0); }},
      {"q_heads=5", [](v1::Manifest& m) { m.set_q_heads(5); }},
      {"head_dim=4097", [](v1::Manifest& m) { m.set_head_dim(4097); }},
      {"tokens=4611686018427387904", [](v1::Manifest& m) { m.set_tokens(int64_t{1} << 62); }},
      {"tokens=-1", [](v1::Manifest& m) { m.set_tokens(-1); }},
      {"segment_tokens=9223372036854775807",
       [](v1::Manifest& m) { m.set_segment_tokens(INT64_MAX); }},
      {"layer_sizes of layer 1: 9223372036854775807",
       [](v1::Manifest& m) {
         m.add_layer_sizes()->set_key_bytes(INT64_MAX / 16);
         m.add_layer_sizes()->set_index_bytes(INT64_MAX);
         m.mutable_layer_sizes(1)->set_layer(1);
       }},
      {"layer_sizes of layer 0: -1",
       [](v1::Manifest& m) { m.add_layer_sizes()->set_value_bytes(-1); }},
      {"layer_sizes=3, must be 0 .. 2",
       [](v1::Manifest& m) {
         for (int i = 0; i < 3; ++i) m.add_layer_sizes();
       }},
      {"head_indexes=5",
       [](v1::Manifest& m) {
         for (int i = 0; i < 5; ++i) m.add_head_indexes();
       }},
      {"segment_digests",
       [](v1::Manifest& m) { m.mutable_segment_digests(1)->mutable_digests()->pop_back(); }},
      {"segment_digests", [](v1::Manifest& m) { m.mutable_segment_digests()->SwapElements(1, 2); }},
      {"context_id of 15 bytes", [](v1::Manifest& m) { m.mutable_context_id()->pop_back(); }},
      {"is that of context id",
       [](v1::Manifest& m) { m.set_context_id(ContextId::Random().Bytes()); }},
      {"context name \"a\\x1b]0;owned\\x07\"",
       [](v1::Manifest& m) { m.set_name("a\x1b]0;owned\x07"); }},
      {"context name \"../b\"", [](v1::Manifest& m) { m.set_name("../b"); }},
      {"context name \"\"", [](v1::Manifest& m) { m.set_name(""); }},
  };
  const std::string dir = FreshTempDir();
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(cases[i].field);
    const std::string folder = absl::StrCat(dir, "/store-", i);
    CARREL_ASSERT_OK(PublishTestContext(*OpenStore(folder), dir + "/staging", {}));
    CARREL_ASSERT_OK(PublishTestContext(*OpenStore(folder), dir + "/staging", {.name = "good"}));
    CARREL_ASSERT_OK(EditManifest(folder, "report", cases[i].edit));
    const auto store = OpenStore(folder);
    std::vector<absl::Status> unreadable;
    EXPECT_EQ(store->List(&unreadable)->size(), 1u);
    ASSERT_EQ(unreadable.size(), 1u);
    EXPECT_THAT(unreadable[0], StatusIs(StatusCode::kDataLoss, cases[i].field));
    EXPECT_EQ(unreadable[0].message().find('\x1b'), absl::string_view::npos);
    EXPECT_EQ(store->OpenContext("report").status().code(), StatusCode::kDataLoss);
    CARREL_EXPECT_OK(CheckTestContext(*store, {.name = "good"}));
  }
}

TEST(StoreFaultTest, TwoContextsOfOneName_AreBothRefusedAndCanBeDeleted) {
  const std::string dir = FreshTempDir();
  const std::string folder = dir + "/store";
  for (const char* name : {"a", "b", "c"}) {
    CARREL_ASSERT_OK(PublishTestContext(*OpenStore(folder), dir + "/staging", {.name = name}));
  }
  CARREL_ASSERT_OK(EditManifest(folder, "b", [](v1::Manifest& m) { m.set_name("a"); }));
  const auto store = OpenStore(folder);
  std::vector<absl::Status> unreadable;
  EXPECT_EQ(store->List(&unreadable)->size(), 1u);
  ASSERT_EQ(unreadable.size(), 2u);
  for (const absl::Status& status : unreadable) {
    EXPECT_THAT(status, StatusIs(StatusCode::kDataLoss, "2 contexts have the name a"));
  }
  EXPECT_THAT(store->OpenContext("a"), StatusIs(StatusCode::kDataLoss, "have the name a"));
  EXPECT_THAT(store->Delete("a"), StatusIs(StatusCode::kDataLoss, "have the name a"));
  CARREL_EXPECT_OK(CheckTestContext(*store, {.name = "c"}));
  const std::string message(unreadable[0].message());
  CARREL_EXPECT_OK(store->Delete(message.substr(8, message.find(':') - 8)));
  EXPECT_EQ(store->List()->size(), 2u) << "the other one is readable again";
  CARREL_EXPECT_OK(CheckTestContext(*store, {.name = "a"}));
}

TEST(StoreFaultTest, CrashBetweenHidingAndFreeing_IsFinishedAtTheNextOpen) {
  const std::string dir = FreshTempDir();
  const std::string folder = dir + "/store";
  CARREL_ASSERT_OK(PublishTestContext(*OpenStore(folder), dir + "/staging", {.name = "gone"}));
  CARREL_ASSERT_OK(PublishTestContext(*OpenStore(folder), dir + "/staging", {.name = "stays"}));
  const size_t files = DbFiles(folder, ".sst").size();
  {
    const auto db = *OpenRocks(folder, StoreMode::kReadWrite);
    const std::vector<CatalogEntry> entries = *ReadCatalog(*db);
    for (const CatalogEntry& entry : entries) {
      if (entry.name != "gone") continue;
      CARREL_ASSERT_OK(HideContext(*db, entry));
    }
  }
  EXPECT_EQ(OpenStore(folder, StoreMode::kReadOnly)->List()->size(), 1u);
  const auto store = OpenStore(folder);
  EXPECT_EQ(store->List()->size(), 1u);
  EXPECT_LT(DbFiles(folder, ".sst").size(), files);
  CARREL_EXPECT_OK(CheckTestContext(*store, {.name = "stays"}));
}

const TestContextSpec kSmall{.layers = 1, .kv_heads = 1, .tokens = 200};

// Publishes and deletes until it is killed; says in a file what it did. Run by the test below.
TEST(StoreFaultChild, DISABLED_PublishesAndDeletes) {
  const std::string dir = ChildFolder();
  if (dir.empty()) GTEST_SKIP() << "runs inside another test";
  const auto store = OpenStore(dir + "/store");
  ASSERT_NE(store, nullptr);
  std::ofstream said(dir + "/said", std::ios::app);
  for (int i = 0;; ++i) {
    TestContextSpec spec = kSmall;
    spec.name = absl::StrCat("c", getpid(), "-", i);
    CARREL_ASSERT_OK(PublishTestContext(*store, dir + "/staging", spec));
    said << "+" << spec.name << std::endl;
    if (i % 2 == 1) {
      said << "?" << spec.name << std::endl;
      CARREL_ASSERT_OK(store->Delete(spec.name));
      said << "-" << spec.name << std::endl;
    }
  }
}

TEST(StoreFaultTest, KillDuringPublishAndDelete_LeavesWholeContextsOrNone) {
  const std::string dir = FreshTempDir();
  std::mt19937_64 rng(TestSeed());
  size_t published = 0;
  for (int round = 0; round < 6; ++round) {
    {
      ChildProcess child("StoreFaultChild.DISABLED_PublishesAndDeletes", dir);
      // Killed somewhere in its work: when it has said so many things, and a little later.
      const auto size = [&] {
        return fs::exists(dir + "/said") ? fs::file_size(dir + "/said") : 0;
      };
      const uintmax_t until = size() + 1 + rng() % 150;
      for (int i = 0; i < 60000 && size() < until; ++i) usleep(1000);
      usleep(static_cast<useconds_t>(rng() % 20000));
      ASSERT_TRUE(child.Kill()) << "the child ended by itself";
    }
    std::set<std::string> must, may;
    std::ifstream said(dir + "/said");
    for (std::string line; std::getline(said, line);) {
      const std::string name = line.substr(1);
      if (line[0] == '+') must.insert(name);
      if (line[0] == '?') must.erase(name), may.insert(name);
      if (line[0] == '-') may.erase(name);
    }
    const auto store = OpenStore(dir + "/store");
    ASSERT_NE(store, nullptr);
    const auto manifests = store->List();
    CARREL_ASSERT_OK(manifests);
    std::set<std::string> there;
    for (const v1::Manifest& manifest : *manifests) {
      TestContextSpec spec = kSmall;
      spec.name = manifest.name();
      CARREL_EXPECT_OK(CheckTestContext(*store, spec));
      there.insert(spec.name);
    }
    for (const std::string& name : must) EXPECT_EQ(there.count(name), 1u) << name << " is lost";
    // Beyond that at most the one that was in the works of each child.
    for (const std::string& name : must) there.erase(name);
    for (const std::string& name : may) there.erase(name);
    EXPECT_LE(there.size(), static_cast<size_t>(round) + 1);
    published = manifests->size();
  }
  EXPECT_GT(published, 0u);
}

TEST(StoreFaultChild, DISABLED_HoldsTheLock) {
  const std::string dir = ChildFolder();
  if (dir.empty()) GTEST_SKIP() << "runs inside another test";
  const auto store = OpenStore(dir + "/store");
  std::ofstream(dir + "/ready") << "y";
  for (;;) pause();
}

TEST(StoreFaultTest, LockedByAnotherProcess_IsFailedPreconditionUntilItIsGone) {
  const std::string dir = FreshTempDir();
  const std::string folder = dir + "/store";
  CARREL_ASSERT_OK(PublishTestContext(*OpenStore(folder), dir + "/staging", {}));
  ChildProcess child("StoreFaultChild.DISABLED_HoldsTheLock", dir);
  ASSERT_TRUE(WaitForFile(dir + "/ready"));
  EXPECT_THAT(Store::Open(folder, StoreMode::kReadWrite),
              StatusIs(StatusCode::kFailedPrecondition,
                       "store " + folder + " is locked by another process"));
  CARREL_EXPECT_OK(CheckTestContext(*OpenStore(folder, StoreMode::kReadOnly), {}));
  EXPECT_TRUE(child.Kill());
  CARREL_EXPECT_OK(CheckTestContext(*OpenStore(folder), {}));
}

// Run by the test below, in a process of its own that may mount a file system.
TEST(StoreFaultChild, DISABLED_FillsADisk) {
  const std::string dir = ChildFolder();
  if (dir.empty()) GTEST_SKIP() << "runs inside another test";
  const std::string disk = dir + "/disk";
  fs::create_directories(disk);
  if (unshare(CLONE_NEWNS) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) {
    std::ofstream(dir + "/result") << "skip";
    return;
  }
  if (mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      mount("none", disk.c_str(), "tmpfs", 0, "size=1m") != 0) {
    std::ofstream(dir + "/result") << "skip";
    return;
  }
  const std::string path = disk + "/a.sst";
  auto writer = SstWriter::Create(path);
  absl::Status status = writer.status();
  for (uint32_t i = 0; status.ok() && i < 8; ++i) {
    status = (*writer)->Add({ContextId(1), 0, Kind::kKeyRows, KvHead(0), i},
                            std::string(300000, 'x'), 2);
  }
  if (status.ok()) status = (*writer)->Finish();
  std::ofstream(dir + "/result.tmp") << status.ToString();
  fs::rename(dir + "/result.tmp", dir + "/result");
}

TEST(StoreFaultTest, DiskFull_IsResourceExhaustedAndNamesThePath) {
  const std::string dir = FreshTempDir();
  ChildProcess child("StoreFaultChild.DISABLED_FillsADisk", dir);
  ASSERT_TRUE(WaitForFile(dir + "/result"));
  const std::string result = *ReadFile(dir + "/result");
  if (result == "skip") GTEST_SKIP() << "may not mount a small file system here";
  EXPECT_THAT(result, testing::StartsWith("RESOURCE_EXHAUSTED: disk full: " + dir + "/disk/a.sst"));
}

// As above. Writes what went wrong, or "ok".
TEST(StoreFaultChild, DISABLED_DeletesOnAFullDisk) {
  const std::string dir = ChildFolder();
  if (dir.empty()) GTEST_SKIP() << "runs inside another test";
  const auto tell = [&](const std::string& result) {
    std::ofstream(dir + "/result.tmp") << result;
    fs::rename(dir + "/result.tmp", dir + "/result");
  };
  const std::string disk = dir + "/disk";
  fs::create_directories(disk);
  if ((unshare(CLONE_NEWNS) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) ||
      mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      mount("none", disk.c_str(), "tmpfs", 0, "size=16m") != 0) {
    return tell("skip");
  }
  {
    auto store = Store::Open(disk + "/store", StoreMode::kReadWrite);
    for (const char* name : {"first", "second"}) {
      TestContextSpec spec;
      spec.name = name;
      if (!store.ok() || !PublishTestContext(**store, disk, spec).ok()) return tell("publish");
    }
  }
  {
    std::ofstream filler(disk + "/filler");
    const std::string block(4096, 'x');
    while (filler.write(block.data(), static_cast<std::streamsize>(block.size())).flush()) {
    }
  }
  // A process that has the store open, and one that must open it first.
  for (const char* name : {"first", "second"}) {
    auto store = Store::Open(disk + "/store", StoreMode::kReadWrite);
    if (!store.ok()) return tell(absl::StrCat("open: ", store.status().ToString()));
    const absl::Status status = (*store)->Delete(name);
    if (!status.ok()) return tell(absl::StrCat("delete ", name, ": ", status.ToString()));
    const auto left = (*store)->List();
    if (!left.ok()) return tell(absl::StrCat("list: ", left.status().ToString()));
    store->reset();
    // What that freed is taken again.
    std::ofstream more(absl::StrCat(disk, "/filler-", name));
    const std::string block(4096, 'x');
    while (more.write(block.data(), static_cast<std::streamsize>(block.size())).flush()) {
    }
  }
  tell("ok");
}

TEST(StoreFaultTest, DiskFull_AContextCanStillBeDeleted) {
  const std::string dir = FreshTempDir();
  ChildProcess child("StoreFaultChild.DISABLED_DeletesOnAFullDisk", dir);
  ASSERT_TRUE(WaitForFile(dir + "/result"));
  const std::string result = *ReadFile(dir + "/result");
  if (result == "skip") GTEST_SKIP() << "may not mount a small file system here";
  EXPECT_EQ(result, "ok");
}

TEST(RocksTest, FromRocks_GivesTheCodeOfTheCause) {
  using rocksdb::Status;
  const auto code = [](const Status& status) { return FromRocks(status, "x").code(); };
  EXPECT_EQ(code(Status::OK()), StatusCode::kOk);
  EXPECT_EQ(code(Status::NoSpace()), StatusCode::kResourceExhausted);
  EXPECT_EQ(code(Status::IOError("While appending to file", "No space left on device")),
            StatusCode::kResourceExhausted);
  EXPECT_EQ(code(Status::IOError("While appending to file", "File too large")),
            StatusCode::kResourceExhausted);
  EXPECT_EQ(code(Status::Corruption("block checksum mismatch")), StatusCode::kDataLoss);
  EXPECT_EQ(code(Status::PathNotFound()), StatusCode::kDataLoss);
  EXPECT_EQ(code(Status::IOError("While mmap read offset 9 larger than file length 5", "/x")),
            StatusCode::kDataLoss);
  EXPECT_EQ(code(Status::IOError("open", "Permission denied")), StatusCode::kPermissionDenied);
  EXPECT_EQ(code(Status::IOError("read", "Input/output error")), StatusCode::kUnavailable);
  EXPECT_EQ(FromRocks(Status::Corruption("why"), "store /s").message(),
            "store /s: Corruption: why");
}

// Resident memory of this process: kB of lines like "RssAnon:   123 kB".
int64_t ResidentKb(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind(field + ":", 0) == 0) return std::stoll(line.substr(field.size() + 1));
  }
  return -1;
}

TEST(StoreMappingTest, OpeningASegmentOf64MiB_DoesNotReadIt) {
#ifdef CARREL_SANITIZED
  GTEST_SKIP() << "sanitizers use memory of their own";
#endif
  const std::string dir = FreshTempDir();
  constexpr int64_t kBytes = int64_t{64} << 20;
  {
    const auto store = OpenStore(dir + "/store");
    const ContextId id = ContextId::Random();
    const std::string file = dir + "/layer.sst";
    auto writer = *SstWriter::Create(file);
    for (uint32_t segment = 0; segment < 2; ++segment) {
      std::string payload(kBytes, static_cast<char>('a' + segment));
      CARREL_ASSERT_OK(
          writer->Add({id, 0, Kind::kKeyRows, KvHead(0), segment}, std::move(payload), 2));
    }
    CARREL_ASSERT_OK(writer->Finish());
    writer.reset();
    CARREL_ASSERT_OK(store->Publish(TestManifest({}, id), {file}));
  }
  const auto store = OpenStore(dir + "/store", StoreMode::kReadOnly);
  const int64_t anonymous = ResidentKb("RssAnon"), mapped = ResidentKb("RssFile");
  ASSERT_GT(anonymous, 0);
  const auto context = *store->OpenContext("report");
  const auto first = *context->Segment(0, Kind::kKeyRows, KvHead(0), 0);
  const auto second = *context->Segment(0, Kind::kKeyRows, KvHead(0), 1);
  CARREL_EXPECT_OK(second->Verify(kBytes / 2, kBytes / 2 + 256));
  EXPECT_EQ(second->payload()[kBytes / 2], 'b');
  EXPECT_EQ(static_cast<int64_t>(first->payload().size()), kBytes);
  EXPECT_LT(ResidentKb("RssAnon") - anonymous, 1024);
  // Pages that the kernel mapped around the touched ones; it may do so in large folios.
  EXPECT_LT(ResidentKb("RssFile") - mapped, 16 << 10);
  EXPECT_FALSE(second->fully_verified());
}

}  // namespace
}  // namespace carrel::kvstore
