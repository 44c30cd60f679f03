// Writers that are killed with SIGKILL: nothing half done is ever visible, and the same call goes
// on to exactly the bytes of an undisturbed one.
#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <random>

#include "absl/strings/match.h"
#include "absl/time/clock.h"
#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/usable_cores.h"
#include "kvstore/storage/store.h"
#include "tests/cli_world.h"

namespace carrel::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kFailed = 1;
constexpr char kDocument[] = "registry-2k";
constexpr int kLayers = 8;

// Every segment of a context: what it is -> SHA-256 of its payload.
std::map<std::string, std::string> Segments(const std::string& folder, const std::string& name) {
  std::map<std::string, std::string> digests;
  const auto store = kvstore::Store::Open(folder, kvstore::StoreMode::kReadOnly);
  EXPECT_EQ(store.status(), absl::OkStatus());
  if (!store.ok()) return digests;
  const auto context = (*store)->OpenContext(name);
  EXPECT_EQ(context.status(), absl::OkStatus());
  if (!context.ok()) return digests;
  const v1::Manifest& manifest = (*context)->manifest();
  const auto add = [&](int32_t layer, kvstore::Kind kind, int32_t head) {
    const auto count = (*context)->SegmentCount(layer, kind, KvHead(head));
    EXPECT_EQ(count.status(), absl::OkStatus());
    for (uint32_t i = 0; count.ok() && i < *count; ++i) {
      const auto segment = (*context)->Segment(layer, kind, KvHead(head), i);
      EXPECT_EQ(segment.status(), absl::OkStatus());
      if (!segment.ok()) continue;
      const absl::string_view payload = (*segment)->payload();
      EXPECT_EQ((*segment)->Verify(0, static_cast<int64_t>(payload.size())), absl::OkStatus());
      const kvstore::SegmentKey key{{}, layer, kind, KvHead(head), i};
      digests[kvstore::DescribeKey(key)] = Sha256Hex(payload);
    }
  };
  add(-1, kvstore::Kind::kTokenIds, 0);
  for (int32_t layer = 0; layer < static_cast<int32_t>(manifest.layers()); ++layer) {
    for (int32_t head = 0; head < static_cast<int32_t>(manifest.kv_heads()); ++head) {
      for (const auto kind : {kvstore::Kind::kKeyRows, kvstore::Kind::kValueRows,
                              kvstore::Kind::kSampledQueries, kvstore::Kind::kIndex}) {
        add(layer, kind, head);
      }
    }
    add(layer, kvstore::Kind::kQueryDrift, 0);
  }
  return digests;
}

class PrefillFaultTest : public StoreTest {
 protected:
  std::string staging(const std::string& name) const { return store_ + "/prefill/" + name; }

  // What inspect says, less what depends on when and where a context was made.
  json Manifest(const std::string& store, const std::string& name) const {
    json manifest = JsonOf(Carrel({"inspect", name, "--store", store, "--json"}));
    for (const char* field :
         {"created_unix_s", "prefill_seconds", "context_id", "content_id", "name"}) {
      manifest.erase(field);
    }
    return manifest;
  }

  std::string Rows(const std::string& store, const std::string& name) const {
    const std::string file = path("rows-" + name + ".safetensors");
    EXPECT_THAT(Carrel({"inspect", name, "--store", store, "--rows", file}), Succeeds());
    return ReadBytes(file);
  }

  void ExpectSame(const std::string& store, const std::string& name, const std::string& other_store,
                  const std::string& other) const {
    EXPECT_EQ(Manifest(store, name), Manifest(other_store, other));
    EXPECT_TRUE(Rows(store, name) == Rows(other_store, other)) << "other K or V rows";
    const auto segments = Segments(store, name);
    EXPECT_GE(segments.size(), 1u + kLayers * 2 * 3);
    EXPECT_EQ(segments, Segments(other_store, other));
  }

  // Of the lines of progress so far: how many layers have been computed.
  static int Reported(const std::string& progress) {
    int layers = 0;
    for (int layer = 1; layer <= kLayers; ++layer) {
      if (absl::StrContains(progress, absl::StrCat("layer ", layer, "/", kLayers))) layers = layer;
    }
    return layers;
  }

  // Kills the job as soon as it has reported that many layers, and a while after. False if that
  // was too late: it was published.
  bool KillAfterLayers(const Args& args, int layers, absl::Duration later,
                       const Texts& others = {kKept}) const {
    Command command;
    command.args = args;
    const auto job = Process::Start(command);
    EXPECT_TRUE(WaitUntil([&] { return !job->Running() || Reported(job->err()) >= layers; }));
    absl::SleepFor(later);
    job->Signal(SIGKILL);
    job->Wait();
    return Names() == others;
  }

  void RunKilledAndResumed(const Args& index);
};

void PrefillFaultTest::RunKilledAndResumed(const Args& index) {
  std::mt19937_64 rng(TestSeed());
  const auto below = [&](double limit) {
    return std::uniform_real_distribution<double>(0, limit)(rng);
  };
  const std::string calm = path("calm");
  const Args input = With({"--input", DemoDocument(kDocument)}, index);
  const absl::Time start = absl::Now();
  ASSERT_THAT(Carrel(Prefill("doc", With(input, {"--store", calm}))), Succeeds());
  const absl::Duration whole = absl::Now() - start;

  // Once anywhere, then twice after a layer, later and later.
  const Args args = Prefill("doc", input);
  int layers = 0;
  for (const int wanted : {0, 3, 5}) {
    layers = wanted + (wanted > 0 ? static_cast<int>(rng() % 2) : 0);
    const absl::Duration later = wanted == 0 ? whole * below(0.6) : whole / kLayers * below(1);
    while (!KillAfterLayers(args, layers, later)) {
      std::cout << "published before it was killed: once more" << std::endl;
      ASSERT_THAT(Carrel({"rm", "doc", "--store", store_}), Succeeds());
    }
    ExpectNothingLost();
    EXPECT_TRUE(layers == 0 || fs::exists(staging("doc")));
  }

  const Outcome resumed = Carrel(With(args, {"--json"}));
  ASSERT_THAT(resumed, Succeeds());
  const int done = JsonOf(resumed)["resumed_layers"];
  // When a layer is reported the one before it is being written, with many cores two are, and those before are on disk.
  EXPECT_GE(done, layers - 1 - std::max(1, UsableCores() / 8));
  EXPECT_LE(done, kLayers);
  EXPECT_FALSE(fs::exists(staging("doc")));
  EXPECT_EQ(Names(), (Texts{"doc", kKept}));
  ExpectSame(store_, "doc", calm, "doc");
}

TEST_F(PrefillFaultTest, Flat_KilledAtRandomTimes_ResumesToTheSameBytes) {
  RunKilledAndResumed({"--index", "flat"});
}

TEST_F(PrefillFaultTest, Hnsw_KilledAtRandomTimes_ResumesToTheSameBytes) {
  RunKilledAndResumed({"--index", "hnsw", "--segment-tokens", "512"});
}

TEST_F(PrefillFaultTest, Unpublished_IsNotVisibleToReadersAtAnyTime) {
  Command command;
  command.args = Prefill("doc", {"--input", DemoDocument(kDocument)});
  const auto job = Process::Start(command);
  int looks = 0;
  while (job->Running()) {
    const Texts names = Names();
    if (names != Texts{kKept}) {
      EXPECT_EQ(names, (Texts{"doc", kKept}));
      EXPECT_THAT(Carrel(Ask("doc", {"--max-tokens", "1"})), Succeeds());
      break;
    }
    const Outcome asked = Carrel(Ask("doc", {"--max-tokens", "1"}));
    if (asked.exit_code != 0) {
      EXPECT_THAT(asked, FailsWith(kFailed, Texts{"NOT_FOUND", "doc"}));
    }
    ++looks;
  }
  EXPECT_GE(looks, 1);
  EXPECT_THAT(job->Wait(), Succeeds());
  EXPECT_EQ(Names(), (Texts{"doc", kKept}));
}

TEST_F(PrefillFaultTest, Resume_WithOtherInput_IsRefusedAndRestartBeginsAnew) {
  const Args first = {"--input", DemoDocument(kDocument)};
  ASSERT_TRUE(KillAfterLayers(Prefill("doc", first), 3, absl::ZeroDuration()));
  ASSERT_TRUE(fs::exists(staging("doc")));

  const std::string other = WriteFile("other.txt", ReadBytes(document_) + " And one thing more.");
  ModelCopy model(path("model"));
  model.EditJson("config.json", [](auto& config) { config["rope_theta"] = 10000.0; });
  const struct {
    Args flags;
    const char* message;
  } others[] = {
      {{"--input", other}, "tokens"},
      {With(first, {"--index", "hnsw"}), "hnsw"},
      {With(first, {"--segment-tokens", "1024"}), "segment_tokens"},
      {With(first, {"--model", model.folder()}), "10000"},
  };
  for (const auto& c : others) {
    EXPECT_THAT(Carrel(Prefill("doc", c.flags)),
                FailsWith(kFailed, Texts{"FAILED_PRECONDITION", "doc", "--restart", c.message}));
    EXPECT_TRUE(fs::exists(staging("doc")));
    ExpectNothingLost();
  }
  // Another name is another job.
  EXPECT_THAT(Carrel(Prefill("fresh", {"--input", other})), Succeeds());
  const Outcome restarted = Carrel(Prefill("doc", {"--input", other, "--restart", "--json"}));
  ASSERT_THAT(restarted, Succeeds());
  EXPECT_EQ(JsonOf(restarted)["resumed_layers"], 0);
  EXPECT_FALSE(fs::exists(staging("doc")));
  ExpectSame(store_, "doc", store_, "fresh");
}

TEST_F(PrefillFaultTest, StagedFile_Damaged_IsComputedAgain) {
  std::mt19937_64 rng(TestSeed());
  const Args args = Prefill("doc", {"--input", DemoDocument("registry-512")});
  ASSERT_THAT(Carrel(Prefill("calm", {"--input", DemoDocument("registry-512")})), Succeeds());
  ASSERT_TRUE(KillAfterLayers(args, 4, absl::ZeroDuration(), {"calm", kKept}));
  ASSERT_TRUE(fs::exists(staging("doc")));
  for (const auto& file : fs::directory_iterator(staging("doc"))) {
    const std::string name = file.path().filename();
    if (name.rfind("hidden-", 0) == 0) {
      FlipBit(file.path(), static_cast<int64_t>(rng() % file.file_size()), 3);
    }
  }
  ASSERT_THAT(Carrel(args), Succeeds());
  ExpectSame(store_, "doc", store_, "calm");
}

// What a kill between publication and the end of the job leaves behind: the context, and its
// staging folder.
TEST_F(PrefillFaultTest, StagingOfAPublishedContext_DoesNoHarm) {
  const std::string saved = path("saved");
  const Args args = Prefill("doc", {"--input", DemoDocument("registry-512")});
  ASSERT_TRUE(KillAfterLayers(args, 3, absl::ZeroDuration()));
  ASSERT_TRUE(fs::exists(staging("doc")));
  fs::copy(staging("doc"), saved, fs::copy_options::recursive);
  ASSERT_THAT(Carrel(args), Succeeds());
  fs::create_directories(store_ + "/prefill");
  fs::copy(saved, staging("doc"), fs::copy_options::recursive);

  ASSERT_EQ(Names(), (Texts{"doc", kKept}));
  const std::string rows = Rows(store_, "doc");
  EXPECT_THAT(Carrel(args), FailsWith(kFailed, Texts{"ALREADY_EXISTS", "doc"}));
  EXPECT_TRUE(Rows(store_, "doc") == rows);
  // The same name and document again, and a name that was used by another.
  EXPECT_THAT(Carrel({"rm", "doc", "--store", store_}), Succeeds());
  ExpectNothingLost();
  EXPECT_THAT(Carrel(args), Succeeds());
  EXPECT_TRUE(Rows(store_, "doc") == rows);
  EXPECT_FALSE(fs::exists(staging("doc")));
  EXPECT_EQ(Names(), (Texts{"doc", kKept}));
}

TEST_F(PrefillFaultTest, Remove_KilledAtRandomTimes_LeavesAllOrNothing) {
  std::mt19937_64 rng(TestSeed());
  const Args prefill = Prefill("doc", {"--segment-tokens", "64"});
  ASSERT_THAT(Carrel(prefill), Succeeds());
  const auto segments = Segments(store_, "doc");
  Command command;
  command.args = {"rm", "doc", "--store", store_};
  const absl::Time start = absl::Now();
  ASSERT_THAT(Carrel(command), Succeeds());
  const absl::Duration whole = absl::Now() - start;
  int kept = 0;
  for (int kill = 0; kill < 8; ++kill) {
    if (Names() == Texts{kKept}) {
      ASSERT_THAT(Carrel(prefill), Succeeds());
    }
    const auto removal = Process::Start(command);
    absl::SleepFor(whole * std::uniform_real_distribution<double>(0.2, 1)(rng));
    removal->Signal(SIGKILL);
    removal->Wait();
    const Texts names = Names();
    if (names.size() == 1) {
      ExpectNothingLost();
    } else {
      ASSERT_EQ(names, (Texts{"doc", kKept}));
      EXPECT_EQ(Segments(store_, "doc"), segments);
      ++kept;
    }
  }
  std::cout << kept << " of 8 removals were too late to happen" << std::endl;
  // The space comes back, at the latest when a writer opens the store: if the last removal was
  // killed after it had hidden the context, this one finds nothing to remove, and frees its files.
  const bool there = Names().size() == 2;
  const Outcome last = Carrel(command);
  if (there) {
    EXPECT_THAT(last, Succeeds());
  } else {
    EXPECT_THAT(last, FailsWith(kFailed, Texts{"NOT_FOUND", "doc"}));
  }
  ExpectNothingLost();
  // What is left of the context is no file of its size.
  const int64_t rows_of_a_layer = kept_tokens_ * 2 * 64 * 2 * 2;
  int64_t large = 0;
  for (const auto& file : fs::recursive_directory_iterator(store_)) {
    if (file.path().extension() == ".sst" &&
        static_cast<int64_t>(file.file_size()) > rows_of_a_layer) {
      ++large;
    }
  }
  EXPECT_EQ(large, kLayers) << "files of the context that is still there";
}

}  // namespace
}  // namespace carrel::cli
