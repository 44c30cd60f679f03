#include "kvstore/storage/store.h"

#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <thread>

#include "absl/strings/match.h"
#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/test_util.h"
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

std::vector<std::string> Names(const Store& store) {
  std::vector<std::string> names;
  const auto manifests = store.List();
  EXPECT_TRUE(manifests.ok()) << manifests.status();
  if (manifests.ok()) {
    for (const v1::Manifest& manifest : *manifests) names.push_back(manifest.name());
  }
  return names;
}

int64_t BytesOfSstFiles(const std::string& folder) {
  int64_t bytes = 0;
  for (const auto& file : fs::recursive_directory_iterator(folder)) {
    if (file.path().extension() == ".sst") bytes += static_cast<int64_t>(file.file_size());
  }
  return bytes;
}

TEST(StoreTest, Publish_ThenRead_GivesTheBytesAlsoAfterReopening) {
  const std::string dir = FreshTempDir();
  const TestContextSpec spec{.seed = TestSeed()};
  {
    const auto store = OpenStore(dir + "/store");
    CARREL_ASSERT_OK(PublishTestContext(*store, dir + "/staging", spec));
    CARREL_EXPECT_OK(CheckTestContext(*store, spec));
    EXPECT_TRUE(fs::is_empty(dir + "/staging")) << "files are moved";
  }
  CARREL_EXPECT_OK(CheckTestContext(*OpenStore(dir + "/store"), spec));
  CARREL_EXPECT_OK(CheckTestContext(*OpenStore(dir + "/store", StoreMode::kReadOnly), spec));
}

TEST(StoreTest, Folders_AreTheirOwnersAloneWhateverTheUmask) {
  const std::string dir = FreshTempDir();
  const mode_t before = umask(0);
  {
    const auto store = OpenStore(dir + "/store");
    CARREL_EXPECT_OK(PublishTestContext(*store, dir + "/staging", {.tokens = 3000}));
  }
  umask(before);
  const auto mode_of = [](const std::string& path) {
    struct stat info;
    EXPECT_EQ(stat(path.c_str(), &info), 0) << path;
    return info.st_mode & 0777;
  };
  int folders = 0, rows = 0;
  for (const fs::directory_entry& entry : fs::recursive_directory_iterator(dir + "/store")) {
    if (entry.is_directory()) {
      ++folders;
      EXPECT_EQ(mode_of(entry.path().string()), 0700u) << entry.path();
    } else if (entry.path().extension() == ".sst" && entry.file_size() > 50'000) {
      ++rows;
      EXPECT_EQ(mode_of(entry.path().string()) & 0077, 0u) << entry.path();
    }
  }
  EXPECT_EQ(mode_of(dir + "/store"), 0700u);
  EXPECT_GE(folders, 1);
  EXPECT_GE(rows, 1);
  // What somebody decided otherwise stays so.
  ASSERT_EQ(chmod((dir + "/store").c_str(), 0750), 0);
  CARREL_EXPECT_OK(CheckTestContext(*OpenStore(dir + "/store"), {.tokens = 3000}));
  EXPECT_EQ(mode_of(dir + "/store"), 0750u);
}

TEST(StoreTest, List_SeveralContexts_OrderedByName) {
  const std::string dir = FreshTempDir();
  const auto store = OpenStore(dir + "/store");
  EXPECT_THAT(Names(*store), testing::ElementsAre());
  for (const char* name : {"m", "z", "a"}) {
    CARREL_ASSERT_OK(PublishTestContext(*store, dir + "/staging", {.name = name}));
  }
  EXPECT_THAT(Names(*store), testing::ElementsAre("a", "m", "z"));
  CARREL_ASSERT_OK(store->Delete("m"));
  EXPECT_THAT(Names(*store), testing::ElementsAre("a", "z"));
  EXPECT_EQ(store->GetManifest("z")->name(), "z");
  EXPECT_THAT(store->GetManifest("m"), StatusIs(StatusCode::kNotFound, "context m is not in"));
  EXPECT_THAT(store->OpenContext("y"), StatusIs(StatusCode::kNotFound, "context y is not in"));
  EXPECT_THAT(store->Delete("m"), StatusIs(StatusCode::kNotFound, "context m is not in"));
}

TEST(StoreTest, SegmentCount_CountsAndUnknownSegmentsAreNotFound) {
  const std::string dir = FreshTempDir();
  const auto store = OpenStore(dir + "/store");
  CARREL_ASSERT_OK(PublishTestContext(*store, dir + "/staging", {.tokens = 300}));
  CARREL_ASSERT_OK(PublishTestContext(*store, dir + "/staging", {.name = "next"}));
  const auto context = *store->OpenContext("report");
  EXPECT_EQ(*context->SegmentCount(0, Kind::kKeyRows, KvHead(0)), 3u);
  EXPECT_EQ(*context->SegmentCount(1, Kind::kValueRows, KvHead(1)), 3u);
  EXPECT_EQ(*context->SegmentCount(1, Kind::kIndex, KvHead(1)), 0u);
  EXPECT_EQ(*context->SegmentCount(2, Kind::kKeyRows, KvHead(0)), 0u);
  EXPECT_EQ(*context->SegmentCount(-1, Kind::kTokenIds, KvHead(0)), 3u);
  EXPECT_THAT(context->Segment(1, Kind::kKeyRows, KvHead(1), 3),
              StatusIs(StatusCode::kNotFound,
                       "context report: K rows, layer 1, kv_head 1, segment 3: not stored"));
  EXPECT_THAT(context->Segment(-1, Kind::kKeyRows, KvHead(1), 3),
              StatusIs(StatusCode::kInvalidArgument, "layer -1"));
}

TEST(StoreTest, Segment_AskedTwice_IsOneObject) {
  const std::string dir = FreshTempDir();
  const auto store = OpenStore(dir + "/store");
  CARREL_ASSERT_OK(PublishTestContext(*store, dir + "/staging", {}));
  const auto context = *store->OpenContext("report");
  EXPECT_EQ(*context->Segment(0, Kind::kKeyRows, KvHead(0), 0),
            *context->Segment(0, Kind::kKeyRows, KvHead(0), 0));
}

TEST(StoreTest, Expect_Sparse_ReadsTheSameBytesAskedAheadLoadedAndReleased) {
  const std::string dir = FreshTempDir();
  const auto store = OpenStore(dir + "/store");
  // Segments of many chunks, the last of a head shorter.
  const TestContextSpec spec{
      .head_dim = 64, .tokens = 2500, .segment_tokens = 1024, .seed = TestSeed()};
  CARREL_ASSERT_OK(PublishTestContext(*store, dir + "/staging", spec));
  const auto context = *store->OpenContext(spec.name);
  const auto segment = *context->Segment(1, Kind::kKeyRows, KvHead(1), 1);
  EXPECT_FALSE(segment->sparse());
  segment->AskAhead(0, 4096);
  EXPECT_EQ(context->LayerBytesAsked(1), 0);

  context->Expect(FileAccess::kSparse);
  EXPECT_TRUE(segment->sparse());
  const auto bytes = static_cast<int64_t>(segment->payload().size());
  segment->AskAhead(5000, 5001);
  EXPECT_EQ(context->LayerBytesAsked(1), 4096) << "the chunk";
  CARREL_EXPECT_OK(segment->Verify(5000, 5001));
  segment->AskAhead(0, bytes);
  EXPECT_EQ(context->LayerBytesAsked(1), bytes) << "what is verified is not asked for again";
  EXPECT_EQ(context->LayerBytesAsked(0), 0);
  EXPECT_GT(context->LayerBytes(1), 2 * 2 * spec.tokens * spec.head_dim * 2);
  CARREL_EXPECT_OK(CheckTestContext(*context, spec));

  context->Load(1, std::atomic<bool>(false));
  EXPECT_FALSE(segment->sparse());
  EXPECT_FALSE(segment->fully_verified()) << "it came from disk anew";
  EXPECT_EQ(context->LayerBytesAsked(1), 0);
  EXPECT_TRUE((*context->Segment(0, Kind::kKeyRows, KvHead(0), 0))->sparse());
  CARREL_EXPECT_OK(CheckTestContext(*context, spec));

  context->ReleasePages(1);
  EXPECT_TRUE(segment->sparse());
  segment->AskAhead(0, bytes);
  EXPECT_EQ(context->LayerBytesAsked(1), bytes);
  CARREL_EXPECT_OK(CheckTestContext(*context, spec));
}

// What the manifest as it is stored hashes to; nothing that the store adds counts.
TEST(StoreTest, ContentId_NamesTheContentAndNotTheName) {
  const std::string dir = FreshTempDir();
  const auto store = OpenStore(dir + "/store");
  const ContextId id = ContextId::Random();
  CARREL_ASSERT_OK(store->Publish(TestManifest({}, id), *WriteTestFiles({}, id, dir + "/staging")));
  const v1::Manifest first = *store->GetManifest("report");
  EXPECT_EQ(first.content_id().size(), 64u);
  v1::Manifest stored = first;
  stored.clear_name();
  stored.clear_content_id();
  EXPECT_EQ(first.content_id(), Sha256Hex(stored.SerializeAsString()));
  EXPECT_EQ((*store->OpenContext("report"))->manifest().content_id(), first.content_id());
  CARREL_ASSERT_OK(store->Delete("report"));
  // The same context under another name, though the manifest comes with what the store adds.
  v1::Manifest renamed = first;
  renamed.set_name("other");
  renamed.set_content_id("not so");
  CARREL_ASSERT_OK(store->Publish(renamed, *WriteTestFiles({}, id, dir + "/staging")));
  EXPECT_EQ(store->GetManifest("other")->content_id(), first.content_id());
  CARREL_ASSERT_OK(store->Delete("other"));
  // One bit in one row.
  CARREL_ASSERT_OK(
      store->Publish(TestManifest({}, id), *WriteTestFiles({.seed = 2}, id, dir + "/staging")));
  EXPECT_NE(store->GetManifest("report")->content_id(), first.content_id());
}

TEST(StoreTest, Publish_TakenName_IsAlreadyExistsAndKeepsBoth) {
  const std::string dir = FreshTempDir();
  const auto store = OpenStore(dir + "/store");
  CARREL_ASSERT_OK(PublishTestContext(*store, dir + "/staging", {.seed = 1}));
  const ContextId id = ContextId::Random();
  const auto files = *WriteTestFiles({.seed = 2}, id, dir + "/staging");
  EXPECT_THAT(store->Publish(TestManifest({.seed = 2}, id), files),
              StatusIs(StatusCode::kAlreadyExists, "context report exists"));
  CARREL_EXPECT_OK(CheckTestContext(*store, {.seed = 1}));
  // The refused one can still be published under another name.
  CARREL_ASSERT_OK(store->Publish(TestManifest({.name = "other", .seed = 2}, id), files));
  CARREL_EXPECT_OK(CheckTestContext(*store, {.name = "other", .seed = 2}));
}

TEST(StoreTest, Publish_WrongFilesOrManifest_IsRefusedByName) {
  const std::string dir = FreshTempDir();
  const auto store = OpenStore(dir + "/store");
  const ContextId id = ContextId::Random();
  const ContextId other = ContextId::Random();
  const auto files = *WriteTestFiles({}, id, dir + "/staging");
  const auto publish = [&](auto edit, std::vector<std::string> paths) {
    v1::Manifest manifest = TestManifest({}, id);
    edit(manifest);
    return store->Publish(manifest, paths);
  };
  const auto as_is = [](v1::Manifest&) {};
  EXPECT_THAT(publish(as_is, {}), StatusIs(StatusCode::kInvalidArgument, "no SST files"));
  EXPECT_THAT(publish(as_is, {files[0], files[1], files[1]}),
              StatusIs(StatusCode::kInvalidArgument, "overlap"));
  EXPECT_THAT(publish(as_is, {dir + "/absent.sst"}), StatusIs(StatusCode::kNotFound, "absent.sst"));
  EXPECT_THAT(publish([&](v1::Manifest& m) { m.set_context_id(other.Bytes()); }, files),
              StatusIs(StatusCode::kInvalidArgument,
                       absl::StrCat("of context #", id.ToString(), ", to be published as #",
                                    other.ToString())));
  EXPECT_THAT(publish([](v1::Manifest& m) { m.set_context_id("77"); }, files),
              StatusIs(StatusCode::kDataLoss, "context_id of 2 bytes (3737), must be 16"));
  EXPECT_THAT(publish([](v1::Manifest& m) { m.set_name(""); }, files),
              StatusIs(StatusCode::kInvalidArgument, "context name \"\" is not 1 to 128"));
  EXPECT_THAT(publish([](v1::Manifest& m) { m.set_name("#1"); }, files),
              StatusIs(StatusCode::kInvalidArgument, "context name \"#1\" is not"));
  EXPECT_THAT(publish([](v1::Manifest& m) { m.set_name("a\nb"); }, files),
              StatusIs(StatusCode::kInvalidArgument, "a\\nb"));
  EXPECT_THAT(publish([](v1::Manifest& m) { m.set_name(std::string(256, 'x')); }, files),
              StatusIs(StatusCode::kInvalidArgument, "xxx...\" is not 1 to 128"));
  EXPECT_THAT(publish([](v1::Manifest& m) { m.set_name("\x1b]0;x"); }, files),
              StatusIs(StatusCode::kInvalidArgument, "\\x1b]0;x"));
  EXPECT_THAT(publish([](v1::Manifest& m) { m.set_kv_dtype("\xff\xfe"); }, files),
              StatusIs(StatusCode::kInvalidArgument, "UTF-8"));
  EXPECT_THAT(publish([](v1::Manifest& m) { m.set_format_version(9); }, files),
              StatusIs(StatusCode::kInvalidArgument, "format_version=9"));
  EXPECT_THAT(Names(*store), testing::ElementsAre());
  CARREL_ASSERT_OK(publish(as_is, files));
  EXPECT_THAT(publish([](v1::Manifest& m) { m.set_name("b"); }, files),
              StatusIs(StatusCode::kAlreadyExists,
                       absl::StrCat("context #", id.ToString(), " is published as report")));
}

TEST(StoreTest, Delete_WhileOpen_FreesTheDiskAndKeepsTheMappingReadable) {
  const std::string dir = FreshTempDir();
  const TestContextSpec spec{.tokens = 5000};
  auto store = OpenStore(dir + "/store");
  CARREL_ASSERT_OK(PublishTestContext(*store, dir + "/staging", spec));
  auto context = *store->OpenContext("report");
  auto segment = *context->Segment(1, Kind::kValueRows, KvHead(0), 2);
  const int64_t before = BytesOfSstFiles(dir + "/store");
  CARREL_ASSERT_OK(store->Delete("report"));
  EXPECT_LT(BytesOfSstFiles(dir + "/store"), before / 4);
  EXPECT_THAT(Names(*store), testing::ElementsAre());
  CARREL_EXPECT_OK(CheckTestContext(*context, spec));
  CARREL_ASSERT_OK(PublishTestContext(*store, dir + "/staging", {.name = "report", .seed = 9}));
  CARREL_EXPECT_OK(CheckTestContext(*context, spec));
  CARREL_EXPECT_OK(CheckTestContext(*store, {.name = "report", .seed = 9}));
  // A segment alone keeps its bytes, also after the context and the store were let go.
  context.reset();
  store.reset();
  CARREL_EXPECT_OK(segment->Verify(0, static_cast<int64_t>(segment->payload().size())));
  EXPECT_EQ(segment->payload(), TestPayload(spec, {{}, 1, Kind::kValueRows, KvHead(0), 2}));
}

TEST(StoreTest, Delete_FreesTheDiskAndLeavesOthers) {
  const std::string dir = FreshTempDir();
  const auto store = OpenStore(dir + "/store");
  CARREL_ASSERT_OK(PublishTestContext(*store, dir + "/staging", {.name = "a"}));
  const int64_t before = BytesOfSstFiles(dir + "/store");
  CARREL_ASSERT_OK(PublishTestContext(*store, dir + "/staging", {.name = "b", .tokens = 20000}));
  CARREL_ASSERT_OK(store->Delete("b"));
  EXPECT_EQ(BytesOfSstFiles(dir + "/store"), before);  // its record in the catalog, too
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {  // nor do pages stay behind its back
    EXPECT_FALSE(absl::StrContains(line, dir) && absl::StrContains(line, "(deleted)")) << line;
  }
  CARREL_EXPECT_OK(CheckTestContext(*store, {.name = "a"}));
}

TEST(StoreTest, Open_ReadOnlyWithoutAStore_IsNotFoundAndCreatesNothing) {
  const std::string dir = FreshTempDir();
  EXPECT_THAT(Store::Open(dir + "/none", StoreMode::kReadOnly),
              StatusIs(StatusCode::kNotFound, dir + "/none holds no store"));
  EXPECT_FALSE(fs::exists(dir + "/none"));
}

TEST(StoreTest, Open_FolderIsAFile_NamesIt) {
  const std::string dir = FreshTempDir();
  std::ofstream(dir + "/file") << "x";
  const auto store = Store::Open(dir + "/file", StoreMode::kReadWrite);
  EXPECT_FALSE(store.ok());
  EXPECT_THAT(std::string(store.status().message()), testing::HasSubstr(dir + "/file"));
}

TEST(StoreTest, ReadOnly_WhileAWriterHasIt_ReadsAndRefusesWrites) {
  const std::string dir = FreshTempDir();
  const auto writer = OpenStore(dir + "/store");
  CARREL_ASSERT_OK(PublishTestContext(*writer, dir + "/staging", {}));
  CARREL_ASSERT_OK(PublishTestContext(*writer, dir + "/staging", {.name = "gone"}));
  CARREL_ASSERT_OK(writer->Delete("gone"));
  const auto reader = OpenStore(dir + "/store", StoreMode::kReadOnly);
  EXPECT_THAT(Names(*reader), testing::ElementsAre("report"));
  CARREL_EXPECT_OK(CheckTestContext(*reader, {}));
  EXPECT_THAT(reader->Delete("report"),
              StatusIs(StatusCode::kFailedPrecondition, "open read-only"));
  EXPECT_THAT(reader->Publish(TestManifest({}, ContextId::Random()), {}),
              StatusIs(StatusCode::kFailedPrecondition, "open read-only"));
}

TEST(StoreTest, Open_LockedByThisProcess_IsFailedPrecondition) {
  const std::string dir = FreshTempDir();
  const std::string folder = dir + "/store";
  {
    const auto store = OpenStore(folder);
    EXPECT_THAT(Store::Open(folder, StoreMode::kReadWrite),
                StatusIs(StatusCode::kFailedPrecondition,
                         "store " + folder + " is locked by this process"));
  }
  EXPECT_TRUE(Store::Open(folder, StoreMode::kReadWrite).ok());
}

TEST(StoreTest, ManyThreads_ReadWhileOthersPublishAndDelete) {
  const std::string dir = FreshTempDir();
  const auto store = OpenStore(dir + "/store");
  const TestContextSpec spec{.layers = 1, .tokens = 600};
  CARREL_ASSERT_OK(PublishTestContext(*store, dir + "/staging", spec));
  const auto shared = *store->OpenContext("report");
  std::vector<std::thread> threads;
  std::atomic<int> failures = 0;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 5; ++i) {
        if (!CheckTestContext(*store, spec).ok() || !CheckTestContext(*shared, spec).ok() ||
            !store->List().ok()) {
          ++failures;
        }
      }
    });
  }
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      TestContextSpec own = spec;
      own.name = absl::StrCat("own-", t);
      for (int i = 0; i < 5; ++i) {
        if (!PublishTestContext(*store, absl::StrCat(dir, "/staging-", t), own).ok() ||
            !CheckTestContext(*store, own).ok() || !store->Delete(own.name).ok()) {
          ++failures;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
  EXPECT_THAT(Names(*store), testing::ElementsAre("report"));
}

TEST(SstWriterTest, Add_WrongKeys_AreInvalidArgument) {
  const std::string dir = FreshTempDir();
  auto writer = *SstWriter::Create(dir + "/a.sst");
  const SegmentKey key{ContextId(1), 4, Kind::kKeyRows, KvHead(2), 3};
  EXPECT_THAT(writer->Add({ContextId(1), -1, Kind::kManifest}, "x", 255),
              StatusIs(StatusCode::kInvalidArgument, "by Publish"));
  CARREL_ASSERT_OK(writer->Add(key, "x", 2));
  EXPECT_THAT(writer->Add(key, "x", 2), StatusIs(StatusCode::kInvalidArgument, "must follow"));
  SegmentKey before = key;
  before.segment = 2;
  EXPECT_THAT(writer->Add(before, "x", 2), StatusIs(StatusCode::kInvalidArgument, "segment 2"));
  SegmentKey stranger = key;
  stranger.context = ContextId(2);
  EXPECT_THAT(writer->Add(stranger, "x", 2), StatusIs(StatusCode::kInvalidArgument, "not #2"));
  SegmentKey invalid = key;
  invalid.layer = -1;
  EXPECT_THAT(writer->Add(invalid, "x", 2), StatusIs(StatusCode::kInvalidArgument, "a.sst"));
  CARREL_EXPECT_OK(writer->Finish());
}

TEST(SstWriterTest, Finish_WithoutSegments_IsInvalidArgument) {
  const std::string dir = FreshTempDir();
  EXPECT_THAT((*SstWriter::Create(dir + "/a.sst"))->Finish(),
              StatusIs(StatusCode::kInvalidArgument, "no segments"));
}

TEST(SstWriterTest, Create_InAMissingFolder_NamesThePath) {
  const std::string path = FreshTempDir() + "/none/a.sst";
  const auto writer = SstWriter::Create(path);
  EXPECT_FALSE(writer.ok());
  EXPECT_THAT(std::string(writer.status().message()), testing::HasSubstr(path));
}

}  // namespace
}  // namespace carrel::kvstore
