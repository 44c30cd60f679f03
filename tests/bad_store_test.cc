// Stores that are locked, absent, unreachable, damaged or full.
#include <sched.h>
#include <sys/mount.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <random>

#include "absl/strings/match.h"
#include "tests/cli_world.h"

namespace carrel::cli {
namespace {

namespace fs = std::filesystem;

constexpr int kBad = 2;
constexpr int kFailed = 1;

class BadStoreTest : public StoreTest {
 protected:
  // The path of a document that shares no row with the kept one but the first.
  std::string OtherDocument() const {
    return WriteFile("other.txt", ReadBytes(DemoDocument("registry-2k")).substr(3, 600));
  }
};

TEST_F(BadStoreTest, Store_LockedByAServer_RefusesWritersAndServesReaders) {
  const std::string address = "unix:" + SocketPath();
  const Server server(store_, address);
  const Texts message = {"FAILED_PRECONDITION", store_, "locked", "another process"};
  EXPECT_THAT(Carrel(Prefill("new")), FailsWith(kFailed, message));
  EXPECT_THAT(Carrel({"rm", kKept, "--store", store_}), FailsWith(kFailed, message));
  EXPECT_THAT(Carrel({"serve", "--store", store_, "--listen", "unix:" + SocketPath("2")}),
              FailsWith(kFailed, message));
  EXPECT_FALSE(fs::exists(SocketPath("2")));
  ExpectNothingLost();  // beside the server
  EXPECT_EQ(Carrel(Ask(kKept, {"--server", address})).out, answer_);
}

TEST_F(BadStoreTest, Store_LockedByAPrefill_RefusesTheSecondAndTheFirstFinishes) {
  Command first;
  first.args = Prefill("first", {"--input", DemoDocument("registry-2k")});
  const auto running = Process::Start(first);
  ASSERT_TRUE(WaitUntil([&] { return fs::exists(store_ + "/prefill/first/job"); }));
  EXPECT_THAT(Carrel(Prefill("second")),
              FailsWith(kFailed, Texts{"FAILED_PRECONDITION", store_, "locked"}));
  EXPECT_EQ(Names(), Texts{kKept});
  EXPECT_THAT(running->Wait(), Succeeds());
  EXPECT_EQ(Names(), (Texts{"first", kKept}));
  EXPECT_FALSE(fs::exists(store_ + "/prefill/second"));
  EXPECT_THAT(Carrel(Prefill("second")), Succeeds());
}

TEST_F(BadStoreTest, Store_ThatIsNone_IsNamedAndLeftAlone) {
  const std::string absent = path("absent");
  const std::string foreign = path("foreign");
  fs::create_directory(foreign);
  WriteFile("foreign/letter.txt", "not yours");
  const std::string file = WriteFile("file", "no folder");
  for (const std::string& folder : {absent, foreign, file}) {
    for (const Args& args :
         {Args{"ls"}, Args{"inspect", kKept},
          Args{"ask", "--model", DemoModel(), "--context", kKept, "--top-k", "all", "prompt"}}) {
      EXPECT_THAT(Carrel(With(args, {"--store", folder})), FailsWith(kFailed, Texts{folder}));
    }
  }
  EXPECT_FALSE(fs::exists(absent));
  EXPECT_EQ(std::distance(fs::directory_iterator(foreign), fs::directory_iterator()), 1);
  EXPECT_EQ(ReadBytes(file), "no folder");
  EXPECT_THAT(Carrel({"serve", "--store", file, "--listen", "unix:" + SocketPath()}),
              FailsWith(kFailed, Texts{file}));
}

TEST_F(BadStoreTest, Server_Unreachable_IsUnavailableByAddress) {
  for (const std::string& address :
       {"unix:" + path("no.sock"), "unix:" + document_, std::string("127.0.0.1:1")}) {
    const Args commands[] = {
        {"ls", "--server", address},
        {"inspect", kKept, "--server", address},
        {"rm", kKept, "--server", address},
        Ask(kKept, {"--server", address}),
    };
    for (const Args& args : commands) {
      EXPECT_THAT(Carrel(args), FailsWith(kFailed, Texts{"UNAVAILABLE", address}));
    }
  }
  ExpectNothingLost();
}

TEST_F(BadStoreTest, Address_Malformed_IsNamed) {
  for (const char* address : {"nonsense", "unix:", "127.0.0.1:", "127.0.0.1:99999", ":x"}) {
    const Outcome asked = Carrel({"ls", "--server", address});
    EXPECT_NE(asked.exit_code, 0);
    EXPECT_EQ(asked.signal, 0);
    EXPECT_THAT(asked.err, testing::HasSubstr(address));
    const Outcome served = Carrel({"serve", "--store", store_, "--listen", address});
    EXPECT_THAT(served, FailsWith(kBad, Texts{address}));
  }
  const std::string too_long = "unix:" + path(std::string(200, 'x'));
  EXPECT_THAT(Carrel({"serve", "--store", store_, "--listen", too_long}),
              FailsWith(kBad, Texts{too_long}));
  ExpectNothingLost();
}

TEST_F(BadStoreTest, Listen_OnWhatIsNotFree_IsRefusedAndNothingIsReplaced) {
  const std::string file = WriteFile("important", "not a socket");
  EXPECT_THAT(Carrel({"serve", "--store", store_, "--listen", "unix:" + file}),
              FailsWith(kFailed, Texts{file}));
  EXPECT_EQ(ReadBytes(file), "not a socket");

  const std::string address = "unix:" + SocketPath();
  const Server server(store_, address);
  const std::string other = path("other");
  EXPECT_THAT(Carrel(Prefill("theirs", {"--store", other})), Succeeds());
  EXPECT_THAT(Carrel({"serve", "--store", other, "--listen", address}),
              FailsWith(kFailed, Texts{SocketPath()}));
  EXPECT_EQ(Carrel(Ask(kKept, {"--server", address})).out, answer_);
}

TEST_F(BadStoreTest, Remove_ThroughAServer_FreesTheNameAndKeepsTheRest) {
  EXPECT_THAT(Carrel(Prefill("gone")), Succeeds());
  const std::string address = "unix:" + SocketPath();
  {
    const Server server(store_, address);
    EXPECT_THAT(Carrel({"rm", "gone", "--server", address}), Succeeds());
    EXPECT_THAT(Carrel({"rm", "gone", "--server", address}),
                FailsWith(kFailed, Texts{"NOT_FOUND", "gone"}));
    EXPECT_THAT(Carrel(Ask("gone", {"--server", address})),
                FailsWith(kFailed, Texts{"NOT_FOUND", "gone"}));
    EXPECT_EQ(Carrel(Ask(kKept, {"--server", address})).out, answer_);
  }
  ExpectNothingLost();
  EXPECT_THAT(Carrel(Prefill("gone")), Succeeds());
}

// Where the stored bytes stand: segments are not compressed.
struct Place {
  std::string file;
  int64_t offset = -1;
};

std::vector<std::string> SegmentFiles(const std::string& store) {
  std::vector<std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(store)) {
    if (entry.path().extension() == ".sst") files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  return files;
}

Place FindBytes(const std::string& store, absl::string_view wanted) {
  Place place;
  for (const std::string& file : SegmentFiles(store)) {
    const std::string bytes = ReadBytes(file);
    for (size_t at = bytes.find(wanted.data(), 0, wanted.size()); at != std::string::npos;
         at = bytes.find(wanted.data(), at + 1, wanted.size())) {
      EXPECT_EQ(place.offset, -1) << "the row stands twice: " << file << " and " << place.file;
      place = {file, static_cast<int64_t>(at)};
    }
  }
  EXPECT_NE(place.offset, -1) << "the row is in none of the segment files";
  return place;
}

TEST_F(BadStoreTest, StoredSegment_WithAFlippedBit_IsDataLossByNameAndNothingElseIs) {
  constexpr int64_t kSegment = 64;  // rows
  constexpr int kLayer = 3, kHead = 1, kHeadDim = 64;
  ASSERT_THAT(Carrel(Prefill("hurt", {"--input", OtherDocument(), "--segment-tokens",
                                      absl::StrCat(kSegment)})),
              Succeeds());
  const std::string answer = Carrel(Ask("hurt")).out;
  const std::string dump = path("rows.safetensors");
  const Args inspect = {"inspect", "hurt", "--store", store_, "--rows", dump};
  ASSERT_THAT(Carrel(inspect), Succeeds());
  const TensorFile rows = TensorFile::Read(dump);
  std::mt19937_64 rng(TestSeed());
  const int64_t tokens = rows.header["k.0"]["shape"][1];
  // Not the first row: every document begins alike.
  const int64_t row = 1 + static_cast<int64_t>(rng() % static_cast<uint64_t>(tokens - 1));
  const int64_t row_bytes = 2 * kHeadDim;
  for (const char* kind : {"k", "v"}) {
    SCOPED_TRACE(absl::StrCat(kind, " row ", row));
    const absl::string_view tensor = rows.Tensor(absl::StrCat(kind, ".", kLayer));
    const int64_t at = (kHead * tokens + row) * row_bytes;
    const Place place = FindBytes(store_, tensor.substr(static_cast<size_t>(at), row_bytes));
    ASSERT_NE(place.offset, -1);
    const int64_t byte = place.offset + static_cast<int64_t>(rng() % row_bytes);
    const int bit = static_cast<int>(rng() % 8);
    FlipBit(place.file, byte, bit);

    const Texts message = {"DATA_LOSS",
                           "hurt",
                           absl::StrCat("layer ", kLayer),
                           absl::StrCat("kv_head ", kHead),
                           absl::StrCat("segment ", row / kSegment),
                           std::string(kind) == "k" ? "K rows" : "V rows"};
    fs::remove(dump);
    EXPECT_THAT(Carrel(inspect), FailsWith(kFailed, message));
    EXPECT_FALSE(fs::exists(dump)) << "rows that were not verified";
    for (const char* want : {"attend", "rows", "values"}) {
      EXPECT_THAT(Carrel(Ask("hurt", {"--want", want})), FailsWith(kFailed, message));
    }
    // The other context of the store is whole.
    EXPECT_EQ(Carrel(Ask(kKept)).out, answer_);
    FlipBit(place.file, byte, bit);
    EXPECT_EQ(Carrel(Ask("hurt")).out, answer);
  }
}

// Wherever a bit flips: the program says so, or nothing that it prints changes. It never crashes.
TEST_F(BadStoreTest, StoreFile_WithABitFlippedAnywhere_GivesNoOtherRowsAndNoOtherAnswer) {
  std::mt19937_64 rng(TestSeed());
  ASSERT_THAT(Carrel({"rm", kKept, "--store", store_}), Succeeds());
  ASSERT_THAT(Carrel(Prefill(kKept, {"--index", "hnsw", "--sampled-queries", "8"})), Succeeds());
  const std::string dump = path("rows.safetensors");
  const Args inspect = {"inspect", kKept, "--store", store_, "--rows", dump};
  const Args ask = Ask(kKept, {"--top-k", "32"});
  ASSERT_THAT(Carrel(inspect), Succeeds());
  const std::string rows = ReadBytes(dump);
  const std::string answer = Carrel(ask).out;

  std::vector<std::string> files;
  for (const auto& entry : fs::directory_iterator(store_ + "/db")) {
    const std::string name = entry.path().filename();
    const bool holds_data = entry.path().extension() == ".sst" ||
                            entry.path().extension() == ".log" || name == "CURRENT" ||
                            absl::StartsWith(name, "MANIFEST");
    if (holds_data && fs::file_size(entry) > 0) files.push_back(entry.path());
  }
  ASSERT_GE(files.size(), 10u);
  for (int i = 0; i < 16; ++i) {
    const std::string& file = files[rng() % files.size()];
    const int64_t byte = static_cast<int64_t>(rng() % fs::file_size(file));
    const int bit = static_cast<int>(rng() % 8);
    SCOPED_TRACE(absl::StrCat("bit ", bit, " of byte ", byte, " of ", file));
    FlipBit(file, byte, bit);
    const Outcome inspected = Carrel(inspect);
    EXPECT_EQ(inspected.signal, 0) << inspected;
    EXPECT_FALSE(inspected.timed_out);
    if (inspected.exit_code == 0) {
      EXPECT_TRUE(ReadBytes(dump) == rows) << "other rows, without an error";
    } else {
      EXPECT_THAT(inspected.err, testing::HasSubstr("carrel: "));
    }
    const Outcome asked = Carrel(ask);
    EXPECT_EQ(asked.signal, 0) << asked;
    EXPECT_FALSE(asked.timed_out);
    if (asked.exit_code == 0) {
      EXPECT_EQ(asked.out, answer);
    } else {
      EXPECT_THAT(asked.err, testing::HasSubstr("carrel: "));
    }
    FlipBit(file, byte, bit);
  }
  EXPECT_EQ(Carrel(ask).out, answer);
}

TEST_F(BadStoreTest, SegmentFile_TruncatedOrMissing_IsDataLossAndNoCrash) {
  ASSERT_THAT(Carrel(Prefill("hurt", {"--input", OtherDocument()})), Succeeds());
  const std::string dump = path("rows.safetensors");
  ASSERT_THAT(Carrel({"inspect", "hurt", "--store", store_, "--rows", dump}), Succeeds());
  const TensorFile rows = TensorFile::Read(dump);
  const Place place = FindBytes(store_, rows.Tensor("v.5").substr(40 * 128, 128));
  ASSERT_NE(place.offset, -1);
  const std::string whole = ReadBytes(place.file);
  for (const size_t bytes : {whole.size() - 1, whole.size() / 2, size_t{100}, size_t{0}}) {
    WriteBytes(place.file, absl::string_view(whole).substr(0, bytes));
    EXPECT_THAT(Carrel(Ask("hurt")), FailsWith(kFailed, Texts{"DATA_LOSS", "hurt"})) << bytes;
    EXPECT_EQ(Carrel(Ask(kKept)).out, answer_);
  }
  fs::remove(place.file);
  EXPECT_THAT(Carrel(Ask("hurt")), FailsWith(kFailed, Texts{"DATA_LOSS", "hurt"}));
  EXPECT_EQ(Carrel(Ask(kKept)).out, answer_);
  EXPECT_THAT(Carrel({"rm", "hurt", "--store", store_}), Succeeds());
  ExpectNothingLost();
}

TEST_F(BadStoreTest, Disk_FullAtAnyWrite_IsNamedAndTheSameCallGoesOnLater) {
  // A layer of it takes 5 MiB.
  const Args flags = {"--input", DemoDocument("registry-2k"), "--sampled-queries", "2048"};
  const std::string calm = path("calm");
  ASSERT_THAT(Carrel(Prefill("new", With(flags, {"--store", calm}))), Succeeds());

  Command command;
  command.args = Prefill("new", flags);
  command.standard_output = "/dev/null";
  // No file may outgrow this: not even a message fits, a message does, the first hidden states do
  // and a layer's segments do not.
  for (const int64_t bytes : {0, 100, 4000, 200000, 4800000}) {
    SCOPED_TRACE(absl::StrCat("files of at most ", bytes, " bytes"));
    command.max_file_bytes = bytes;
    const Outcome outcome = Carrel(command);
    EXPECT_EQ(outcome.exit_code, kFailed) << outcome;
    if (bytes >= 4000) {
      EXPECT_THAT(outcome, FailsWith(kFailed, Texts{"RESOURCE_EXHAUSTED", store_}));
    }
    ExpectNothingLost();
  }
  command.max_file_bytes = -1;
  EXPECT_THAT(Carrel(command), Succeeds());
  const std::string rows = path("rows.safetensors"), calm_rows = path("calm.safetensors");
  ASSERT_THAT(Carrel({"inspect", "new", "--store", store_, "--rows", rows}), Succeeds());
  ASSERT_THAT(Carrel({"inspect", "new", "--store", calm, "--rows", calm_rows}), Succeeds());
  EXPECT_TRUE(ReadBytes(rows) == ReadBytes(calm_rows));
}

// A file system of this process's own; false, with the reason, where that is not permitted.
bool MountSmallDisk(const std::string& folder, const char* size, std::string& reason) {
  const uid_t uid = getuid();
  if (unshare(CLONE_NEWNS) != 0) {
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) {
      reason = absl::StrCat("unshare: ", std::strerror(errno));
      return false;
    }
    WriteBytes("/proc/self/uid_map", absl::StrCat("0 ", uid, " 1"));
  }
  // What is mounted here stays here.
  if (mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      mount("tmpfs", folder.c_str(), "tmpfs", 0, size) != 0) {
    reason = absl::StrCat("mount: ", std::strerror(errno));
    return false;
  }
  return true;
}

int64_t FreeBytes(const std::string& folder) {
  struct statvfs info;
  EXPECT_EQ(statvfs(folder.c_str(), &info), 0);
  return static_cast<int64_t>(info.f_bavail) * static_cast<int64_t>(info.f_frsize);
}

TEST_F(BadStoreTest, Disk_Full_LosesNothingAndTheSameCallGoesOnWithRoom) {
  const std::string disk = path("disk");
  fs::create_directory(disk);
  std::string reason;
  if (!MountSmallDisk(disk, "size=64m", reason)) {
    GTEST_SKIP() << "no small file system to fill: " << reason;
  }
  const auto Unmount = [&] { umount2(disk.c_str(), MNT_DETACH); };
  store_ = disk + "/store";
  EXPECT_THAT(Carrel(Prefill(kKept)), Succeeds());
  const std::string document = DemoDocument("registry-512");

  // Filled up but for so many bytes. With the first, the job is refused before it starts; with
  // the others it passes that check, and an index or a layer meets the end of the disk.
  const std::string filler = disk + "/filler";
  for (const int64_t room : {int64_t{1} << 20, int64_t{3500000}, int64_t{5000000}}) {
    SCOPED_TRACE(absl::StrCat(room, " bytes free"));
    const int64_t size = FreeBytes(disk) - room;
    ASSERT_GT(size, 0);
    WriteBytes(filler, std::string(static_cast<size_t>(size), 'x'));
    const Outcome outcome =
        Carrel(Prefill("new", {"--input", document, "--sampled-queries", "512"}));
    EXPECT_THAT(outcome, FailsWith(kFailed, Texts{"RESOURCE_EXHAUSTED", store_}));
    ExpectNothingLost();  // also while the disk is full
    fs::remove(filler);
  }
  EXPECT_THAT(Carrel(Prefill("new", {"--input", document, "--sampled-queries", "512"})),
              Succeeds());
  EXPECT_EQ(Names(), (Texts{kKept, "new"}));
  EXPECT_FALSE(fs::exists(store_ + "/prefill/new"));
  EXPECT_EQ(Carrel(Ask("new")).out, answer_);
  Unmount();
}

// Whatever the first is that finds no descriptor: the store, what it embeds, or gRPC, which would abort.
TEST_F(BadStoreTest, TooFewDescriptors_IsAnErrorByName_AndNoAbort) {
  Command command;
  for (int64_t most = 12; most <= 48; most += 2) {
    for (const Args& args : {Args{"ls", "--store", store_}, Args{"verify", "--store", store_},
                             Args{"ls", "--server", "127.0.0.1:1"}}) {
      command.args = args;
      command.max_descriptors = most;
      const Outcome outcome = Carrel(command);
      EXPECT_EQ(outcome.signal, 0) << most << " " << args[0] << outcome;
      EXPECT_THAT(outcome.err, testing::Not(testing::HasSubstr("DATA_LOSS"))) << most;
    }
  }
  ExpectNothingLost();
}

TEST_F(BadStoreTest, StandardOutput_Full_IsAnError) {
  Command command;
  command.standard_output = "/dev/full";
  const Args commands[] = {
      {"ls", "--store", store_},
      {"ls", "--store", store_, "--json"},
      {"inspect", kKept, "--store", store_},
      {"inspect", kKept, "--store", store_, "--json"},
      Ask(kKept),
      Ask(kKept, {"--json"}),
  };
  for (const Args& args : commands) {
    command.args = args;
    const Outcome outcome = Carrel(command);
    EXPECT_THAT(outcome, FailsWith(kFailed, Texts{"standard output"})) << args[0];
  }
  ExpectNothingLost();
}

TEST_F(BadStoreTest, OutputFile_NotWritable_IsNamed) {
  const std::string nowhere = path("nowhere/file.safetensors");
  EXPECT_THAT(Carrel(Ask(kKept, {"--logits", nowhere, "--max-tokens", "1"})),
              FailsWith(kFailed, Texts{nowhere}));
  EXPECT_THAT(Carrel({"inspect", kKept, "--store", store_, "--rows", nowhere}),
              FailsWith(kFailed, Texts{nowhere}));
  ExpectNothingLost();
}

}  // namespace
}  // namespace carrel::cli
