// A context leaves one store and enters another.
#include "kvstore/storage/context_stream.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <random>

#include "absl/strings/escaping.h"
#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/file.h"
#include "common/status.h"
#include "common/test_util.h"
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

std::string ExportAll(const Store& store, const std::string& name) {
  auto from = store.Export(name);
  EXPECT_TRUE(from.ok()) << from.status();
  std::string all;
  while (from.ok()) {
    const auto piece = (*from)->Next();
    EXPECT_TRUE(piece.ok()) << piece.status();
    if (!piece.ok() || piece->empty()) break;
    EXPECT_LE(static_cast<int64_t>(piece->size()), kStreamPieceBytes);
    all.append(piece->data(), piece->size());
  }
  EXPECT_EQ(static_cast<int64_t>(all.size()), (*from)->bytes());
  return all;
}

// Gives `stream` from where the import wants it, in pieces of random sizes.
absl::Status Give(ContextImport& to, absl::string_view stream, std::mt19937_64& rng) {
  while (to.position() < static_cast<int64_t>(stream.size())) {
    const absl::string_view rest = stream.substr(static_cast<size_t>(to.position()));
    RETURN_IF_ERROR(to.Take(rest.substr(0, 1 + rng() % 3000)));
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::Manifest> ImportAll(Store& store, const std::string& name,
                                       absl::string_view stream, std::mt19937_64& rng) {
  ASSIGN_OR_RETURN(const auto to, store.Import(name));
  RETURN_IF_ERROR(Give(*to, stream, rng));
  return to->Publish();
}

std::map<std::string, std::string> FilesBySha(const std::string& folder) {
  std::map<std::string, std::string> files;
  for (const auto& file : fs::directory_iterator(folder + "/db")) {
    if (file.path().extension() != ".sst") continue;
    const std::string bytes = *ReadFile(file.path().string());
    if (bytes.find("after_rope") == std::string::npos) files[Sha256Hex(bytes)] = bytes;
  }
  return files;
}

class ContextStreamTest : public testing::Test {
 protected:
  void SetUp() override {
    CARREL_ASSERT_OK(PublishTestContext(*OpenStore(a_), dir_ + "/staging", spec_));
    stream_ = ExportAll(*OpenStore(a_, StoreMode::kReadOnly), "report");
    content_id_ = OpenStore(a_)->GetManifest("report")->content_id();
  }

  const std::string dir_ = FreshTempDir(), a_ = dir_ + "/a", b_ = dir_ + "/b";
  const TestContextSpec spec_{.tokens = 3000, .segment_tokens = 1024, .seed = TestSeed()};
  std::mt19937_64 rng_{TestSeed()};
  std::string stream_, content_id_;
};

TEST(StreamHeaderTest, KnownHeader_HasGoldenBytes) {
  const StreamHeader header{.name = "doc", .manifest = "bytes", .file_bytes = {7, 258}};
  const std::string bytes = header.Encode();
  EXPECT_EQ(absl::BytesToHexString(bytes),
            "43415252454c4558"
            "01000000"
            "03000000"
            "0500000000000000"
            "02000000"
            "00000000"
            "646f63"
            "6279746573"
            "0700000000000000"
            "0201000000000000"
            "4fdf495119ca9e9f2841fc8bae072b6f4c2d62f502191395ccbb17dd5ba590d8");
  EXPECT_EQ(*StreamHeader::BytesWanted(""), 32);
  EXPECT_EQ(*StreamHeader::BytesWanted(bytes.substr(0, 32)), static_cast<int64_t>(bytes.size()));
  const auto decoded = StreamHeader::Decode(bytes);
  CARREL_ASSERT_OK(decoded);
  EXPECT_EQ(decoded->name, "doc");
  EXPECT_EQ(decoded->manifest, "bytes");
  EXPECT_EQ(decoded->file_bytes, header.file_bytes);
}

// The files of the stream as they are sent ahead: with the SHA-256 behind each.
std::vector<std::string> SlotsOf(const std::string& stream) {
  const auto header_bytes = *StreamHeader::BytesWanted(stream.substr(0, 32));
  const auto header = *StreamHeader::Decode(stream.substr(0, static_cast<size_t>(header_bytes)));
  std::vector<std::string> slots;
  auto at = static_cast<size_t>(header_bytes);
  for (const int64_t bytes : header.file_bytes) {
    const auto slot = static_cast<size_t>(bytes + kStreamDigestBytes);
    slots.push_back(stream.substr(at, slot));
    at += slot;
  }
  return slots;
}

// Gives the bytes of a slot from where the import wants them; `most` of them.
absl::Status GiveAhead(Store& store, ContextId id, int64_t file, const std::string& slot,
                       size_t most = SIZE_MAX) {
  ASSIGN_OR_RETURN(const auto to, store.Import("report"));
  RETURN_IF_ERROR(to->BeginAhead(id, file, static_cast<int64_t>(slot.size()) - kStreamDigestBytes));
  const absl::string_view wanted = absl::string_view(slot).substr(0, most);
  if (to->position() < static_cast<int64_t>(wanted.size())) {
    RETURN_IF_ERROR(to->Take(wanted.substr(static_cast<size_t>(to->position()))));
  }
  EXPECT_EQ(to->position(), static_cast<int64_t>(wanted.size()));
  EXPECT_EQ(to->Publish().status().code(), StatusCode::kFailedPrecondition);
  return absl::OkStatus();
}

TEST_F(ContextStreamTest, FilesSentAhead_AreNotAskedForAgain) {
  const std::vector<std::string> slots = SlotsOf(stream_);
  ASSERT_GE(slots.size(), 2u);
  const ContextId id = *ContextIdOf(*OpenStore(a_)->GetManifest("report"));
  const auto b = OpenStore(b_);
  // Any of them, in any order, one half of a file, and one twice.
  const size_t whole = rng_() % slots.size();
  const size_t half = (whole + 1) % slots.size();
  CARREL_ASSERT_OK(GiveAhead(*b, id, static_cast<int64_t>(whole), slots[whole]));
  CARREL_ASSERT_OK(GiveAhead(*b, id, static_cast<int64_t>(whole), slots[whole]));
  CARREL_ASSERT_OK(
      GiveAhead(*b, id, static_cast<int64_t>(half), slots[half], slots[half].size() / 2));
  EXPECT_TRUE(b->List()->empty());
  const auto to = *b->Import("report");
  int64_t taken = 0;
  while (to->position() < static_cast<int64_t>(stream_.size())) {
    const auto at = static_cast<size_t>(to->position());
    const absl::string_view piece = absl::string_view(stream_).substr(at, 1 + rng_() % 3000);
    CARREL_ASSERT_OK(to->Take(piece));
    // What follows a jump is not taken.
    const int64_t moved = to->position() - static_cast<int64_t>(at);
    taken += std::min<int64_t>(moved, static_cast<int64_t>(piece.size()));
  }
  EXPECT_LE(taken, static_cast<int64_t>(stream_.size() - slots[whole].size() -
                                        slots[half].size() / 2 + 3 * 3000));
  const auto manifest = to->Publish();
  CARREL_ASSERT_OK(manifest);
  EXPECT_EQ(manifest->content_id(), content_id_);
  EXPECT_TRUE(fs::is_empty(b_ + "/importing"));
}

// A process that died when it had published, before or while it removed what it published from.
TEST_F(ContextStreamTest, ImportThatDiedWhenItWasPublished_LeavesNothingBehindTheNextOpening) {
  const std::string importing = b_ + "/importing", kept = dir_ + "/kept";
  const std::string id = ContextIdOf(*OpenStore(a_)->GetManifest("report"))->ToString();
  const ContextId other = ContextId::Random();
  {
    const auto b = OpenStore(b_);
    CARREL_ASSERT_OK(GiveAhead(*b, other, 0, SlotsOf(stream_)[0], 100));
    const auto to = *b->Import("report");
    CARREL_ASSERT_OK(Give(*to, stream_, rng_));
    fs::copy(importing, kept, fs::copy_options::recursive);
    CARREL_ASSERT_OK(to->Publish().status());
  }
  fs::remove_all(kept + "/" + other.ToString());
  fs::copy(kept, importing, fs::copy_options::recursive | fs::copy_options::overwrite_existing);
  fs::copy(kept, importing + "/of-somebody", fs::copy_options::recursive);
  fs::remove_all(importing + "/of-somebody/" + id);  // its lock is left
  CARREL_EXPECT_OK(CheckTestContext(*OpenStore(b_), spec_));
  EXPECT_FALSE(fs::exists(importing + "/" + id));
  EXPECT_FALSE(fs::exists(importing + "/" + id + ".lock"));
  EXPECT_TRUE(fs::is_empty(importing + "/of-somebody"));
  EXPECT_TRUE(fs::exists(importing + "/" + other.ToString())) << "which goes on";
}

TEST_F(ContextStreamTest, FileSentAheadThatIsAnother_IsFoundAndTheNextImportIsRight) {
  const std::vector<std::string> slots = SlotsOf(stream_);
  const ContextId id = *ContextIdOf(*OpenStore(a_)->GetManifest("report"));
  const auto b = OpenStore(b_);
  const auto Sealed = [](std::string bytes) {
    Sha256 sha;
    sha.Update(bytes);
    const auto digest = sha.Finish();
    return bytes.append(reinterpret_cast<const char*>(digest.data()), digest.size());
  };
  // Of another size: asked for again.
  CARREL_ASSERT_OK(GiveAhead(*b, id, 0, Sealed("something else")));
  // Of the same size, by its own SHA-256 right.
  std::string other = slots[1].substr(0, slots[1].size() - kStreamDigestBytes);
  other[other.size() / 2] = static_cast<char>(other[other.size() / 2] ^ 1);
  CARREL_ASSERT_OK(GiveAhead(*b, id, 1, Sealed(other)));
  EXPECT_EQ(ImportAll(*b, "report", stream_, rng_).status().code(), StatusCode::kDataLoss);
  EXPECT_TRUE(b->List()->empty());
  const auto imported = ImportAll(*b, "report", stream_, rng_);
  CARREL_ASSERT_OK(imported);
  EXPECT_EQ(imported->content_id(), content_id_);
}

TEST_F(ContextStreamTest, NoSuchFileAhead_IsRefused) {
  const auto b = OpenStore(b_);
  const ContextId id = ContextId::Random();
  for (const auto& [file, bytes] :
       {std::pair<int64_t, int64_t>{-1, 5}, {kMostStreamFiles, 5}, {0, 0}, {0, -1}}) {
    const auto to = *b->Import("report");
    EXPECT_EQ(to->BeginAhead(id, file, bytes).code(), StatusCode::kInvalidArgument);
  }
  EXPECT_EQ((*b->Import("report"))->BeginAhead(id, 0, int64_t{1} << 60).code(),
            StatusCode::kResourceExhausted);
  // By its SHA-256.
  std::string damaged = SlotsOf(stream_)[1];
  damaged[0] = static_cast<char>(damaged[0] ^ 1);
  EXPECT_EQ(GiveAhead(*b, id, 1, damaged).code(), StatusCode::kDataLoss);
  EXPECT_TRUE(b->List()->empty());
}

TEST_F(ContextStreamTest, ExportThenImport_GivesTheSameFilesAndContentId) {
  {
    const auto b = OpenStore(b_);
    CARREL_ASSERT_OK(PublishTestContext(*b, dir_ + "/staging", {.name = "other"}));
    const auto imported = ImportAll(*b, "", stream_, rng_);
    CARREL_ASSERT_OK(imported);
    EXPECT_EQ(imported->content_id(), content_id_);
    EXPECT_EQ(imported->name(), "report");
    EXPECT_THAT(ImportAll(*b, "", stream_, rng_),
                StatusIs(StatusCode::kAlreadyExists, "context report exists"));
    EXPECT_THAT(ImportAll(*b, "again", stream_, rng_),
                StatusIs(StatusCode::kAlreadyExists, "is published as report"));
    EXPECT_EQ(ExportAll(*b, "report"), stream_) << "also what leaves there";
    EXPECT_FALSE(fs::exists(b_ + "/importing") && !fs::is_empty(b_ + "/importing"));
  }
  const auto b = OpenStore(b_, StoreMode::kReadOnly);
  CARREL_EXPECT_OK(CheckTestContext(*b, spec_));
  CARREL_EXPECT_OK(CheckTestContext(*b, {.name = "other"}));
  EXPECT_EQ(b->GetManifest("report")->content_id(), content_id_);
  const auto there = FilesBySha(b_);
  for (const auto& [sha, bytes] : FilesBySha(a_)) EXPECT_EQ(there.count(sha), 1u);
}

TEST_F(ContextStreamTest, Import_UnderAnotherName_IsTheSameContent) {
  const auto b = OpenStore(b_);
  CARREL_ASSERT_OK(PublishTestContext(*b, dir_ + "/staging", {}));
  EXPECT_THAT(ImportAll(*b, "", stream_, rng_),
              StatusIs(StatusCode::kAlreadyExists, "context report exists"));
  const auto imported = ImportAll(*b, "theirs", stream_, rng_);
  CARREL_ASSERT_OK(imported);
  EXPECT_EQ(imported->content_id(), content_id_);
  TestContextSpec theirs = spec_;
  theirs.name = "theirs";
  CARREL_EXPECT_OK(CheckTestContext(*b, theirs));
  CARREL_EXPECT_OK(CheckTestContext(*b, {}));
  EXPECT_THAT(b->Import("../up"), StatusIs(StatusCode::kInvalidArgument, "context name"));
  EXPECT_THAT(OpenStore(a_, StoreMode::kReadOnly)->Import(""),
              StatusIs(StatusCode::kFailedPrecondition, "read-only"));
}

TEST_F(ContextStreamTest, ExportOfWhatIsUnboundOrDamaged_IsRefused) {
  const std::string c = dir_ + "/c";
  CARREL_ASSERT_OK(PublishTestContext(*OpenStore(c), dir_ + "/staging", {}));
  CARREL_ASSERT_OK(MakeUnbound(c, "report"));
  EXPECT_THAT(OpenStore(c)->Export("report"),
              StatusIs(StatusCode::kFailedPrecondition, "carrel upgrade report"));
  EXPECT_THAT(OpenStore(c)->Export("none"), StatusIs(StatusCode::kNotFound, "none"));
  const std::string row =
      TestPayload(spec_, {{}, 1, Kind::kValueRows, KvHead(1), 1}).substr(5000, 64);
  for (const auto& file : fs::directory_iterator(a_ + "/db")) {
    if (file.path().extension() != ".sst") continue;
    std::string bytes = *ReadFile(file.path().string());
    const size_t at = bytes.find(row);
    if (at == std::string::npos) continue;
    bytes[at + 20] = static_cast<char>(bytes[at + 20] ^ 4);
    CARREL_ASSERT_OK(WriteFileAtomically(file.path().string(), bytes));
  }
  const auto from = *OpenStore(a_)->Export("report");
  absl::Status status;
  for (;;) {
    const auto piece = from->Next();
    status = piece.status();
    if (!piece.ok() || piece->empty()) break;
  }
  EXPECT_THAT(status, StatusIs(StatusCode::kDataLoss, "V rows, layer 1, kv_head 1, segment 1"));
}

// Every flip is found by a digest before anything is visible.
TEST_F(ContextStreamTest, FlippedOrCutStream_IsRefusedAndNothingIsVisible) {
  const auto b = OpenStore(b_);
  for (int round = 0; round < 200; ++round) {
    std::string stream = stream_;
    // Half of the flips go into the header.
    const size_t at = rng_() % (round % 2 == 0 ? 800 : stream.size());
    stream[at] = static_cast<char>(stream[at] ^ (1 << rng_() % 8));
    fs::remove_all(b_ + "/importing");  // what was there already would not be looked at again
    const absl::Status status = ImportAll(*b, "", stream, rng_).status();
    EXPECT_TRUE(absl::IsDataLoss(status) || absl::IsFailedPrecondition(status))
        << "byte " << at << ": " << status;
  }
  for (int round = 0; round < 50; ++round) {
    const absl::string_view cut = absl::string_view(stream_).substr(0, rng_() % stream_.size());
    EXPECT_THAT(ImportAll(*b, "", cut, rng_),
                StatusIs(StatusCode::kDataLoss, "import: the stream ends at "));
  }
  EXPECT_THAT(ImportAll(*b, "", stream_ + "x", rng_),
              StatusIs(StatusCode::kDataLoss, "bytes behind the end of the stream"));
  CARREL_EXPECT_OK(ImportAll(*b, "", stream_, rng_));
  EXPECT_EQ(b->List()->size(), 1u);
  CARREL_EXPECT_OK(CheckTestContext(*b, spec_));
}

// With digests that are right and files that are not those of the manifest.
TEST_F(ContextStreamTest, HostileStream_IsRefused) {
  const auto b = OpenStore(b_);
  const int64_t header_bytes = [&] {
    int64_t wanted = *StreamHeader::BytesWanted(stream_.substr(0, 32));
    return wanted;
  }();
  const StreamHeader header =
      *StreamHeader::Decode(absl::string_view(stream_).substr(0, header_bytes));
  EXPECT_EQ(Sha256Hex(header.manifest), content_id_);
  std::vector<std::string> files;
  for (size_t at = static_cast<size_t>(header_bytes), i = 0; i < header.file_bytes.size(); ++i) {
    files.push_back(stream_.substr(at, static_cast<size_t>(header.file_bytes[i])));
    at += files.back().size() + kStreamDigestBytes;
  }
  const auto stream_of = [](StreamHeader h, const std::vector<std::string>& contents) {
    h.file_bytes.clear();
    for (const std::string& file : contents) {
      h.file_bytes.push_back(static_cast<int64_t>(file.size()));
    }
    std::string all = h.Encode();
    for (const std::string& file : contents) {
      Sha256 sha;
      sha.Update(file);
      const auto digest = sha.Finish();
      all += file + std::string(reinterpret_cast<const char*>(digest.data()), digest.size());
    }
    return all;
  };
  EXPECT_EQ(stream_of(header, files), stream_);
  const auto refused = [&](const StreamHeader& h, const std::vector<std::string>& contents,
                           StatusCode code, const std::string& why) {
    EXPECT_THAT(ImportAll(*b, "", stream_of(h, contents), rng_), StatusIs(code, why));
    EXPECT_EQ(b->List()->size(), 0u);
  };
  // A layer that is missing, twice there, or of another context; a byte that its CRC does not know.
  refused(header, {files[0], files[1]}, StatusCode::kDataLoss, "other segments than its manifest");
  refused(header, {files[0], files[1], files[2], files[2]}, StatusCode::kInvalidArgument,
          "overlap");
  CARREL_ASSERT_OK(PublishTestContext(*OpenStore(a_), dir_ + "/staging", {.name = "z"}));
  const std::string other = ExportAll(*OpenStore(a_), "z");
  const int64_t other_header = *StreamHeader::BytesWanted(other.substr(0, 32));
  const StreamHeader z = *StreamHeader::Decode(absl::string_view(other).substr(0, other_header));
  refused(header,
          {files[0], files[1],
           other.substr(static_cast<size_t>(other_header), static_cast<size_t>(z.file_bytes[0]))},
          StatusCode::kInvalidArgument, "to be published as");
  std::vector<std::string> flipped = files;
  flipped[1][3000] = static_cast<char>(flipped[1][3000] ^ 1);
  refused(header, flipped, StatusCode::kDataLoss, "have CRC");
  StreamHeader edited = header;
  v1::Manifest manifest;
  ASSERT_TRUE(manifest.ParseFromString(header.manifest));
  manifest.set_layers(65534);
  manifest.set_kv_heads(4096);
  manifest.set_q_heads(4096);
  edited.manifest = manifest.SerializeAsString();
  refused(edited, files, StatusCode::kDataLoss, "layers x kv_heads");
  edited.manifest = "not a message";
  refused(edited, files, StatusCode::kDataLoss, "no Manifest");
  edited = header;
  edited.name = "\x1b]0;x";
  refused(edited, files, StatusCode::kInvalidArgument, "context name");
  EXPECT_THAT(ImportAll(*b, "", "a text that is no export at all, and longer than a header", rng_),
              StatusIs(StatusCode::kDataLoss, "does not begin with \"CARRELEX\""));
  CARREL_EXPECT_OK(ImportAll(*b, "", stream_, rng_));
}

// Imports, slowly enough to be killed anywhere, and says when it has begun and when it is done.
TEST(ContextStreamChild, DISABLED_Imports) {
  const std::string dir = ChildFolder();
  if (dir.empty()) GTEST_SKIP() << "runs inside another test";
  const auto b = OpenStore(dir + "/b");
  const std::string stream = *ReadFile(dir + "/stream");
  const auto to = *b->Import("");
  std::ofstream said(dir + "/said", std::ios::app);
  std::ofstream from(dir + "/from", std::ios::app);
  bool begun = false;
  while (to->position() < static_cast<int64_t>(stream.size())) {
    const auto at = static_cast<size_t>(to->position());
    CARREL_ASSERT_OK(to->Take(absl::string_view(stream).substr(at, 4096)));
    if (to->bytes() > 0 && !begun) from << to->position() << std::endl;
    begun = to->bytes() > 0;
    said << "." << std::flush;
  }
  CARREL_ASSERT_OK(to->Publish());
  std::ofstream(dir + "/done") << "y";
  for (;;) pause();
}

TEST_F(ContextStreamTest, KilledAt50Points_LeavesNothingVisibleAndGoesOn) {
  { std::ofstream(dir_ + "/stream", std::ios::binary) << stream_; }
  const uintmax_t steps = stream_.size() / 4096 + 4;
  int killed = 0, resumed = 0, finished = 0;
  while (killed < 50) {
    fs::remove(dir_ + "/said");
    {
      ChildProcess child("ContextStreamChild.DISABLED_Imports", dir_);
      const auto size = [&] {
        return fs::exists(dir_ + "/said") ? fs::file_size(dir_ + "/said") : 0;
      };
      // A few steps further than it was, or anywhere up to the end.
      const uintmax_t until = rng_() % 2 == 0 ? 1 + rng_() % 20 : 1 + rng_() % steps;
      for (int i = 0; i < 60000 && size() < until && !fs::exists(dir_ + "/done"); ++i) usleep(100);
      usleep(static_cast<useconds_t>(rng_() % 3000));
      ASSERT_TRUE(child.Kill()) << "the child ended by itself";
    }
    ++killed;
    const auto b = OpenStore(b_);
    const size_t visible = b->List()->size();
    if (visible == 0) {
      EXPECT_FALSE(fs::exists(dir_ + "/done"));
      continue;
    }
    ++finished;
    CARREL_EXPECT_OK(CheckTestContext(*b, spec_));
    EXPECT_EQ(b->GetManifest("report")->content_id(), content_id_);
    CARREL_ASSERT_OK(b->Delete("report"));
    fs::remove(dir_ + "/done");
  }
  // Where each child went on, once it knew the header.
  std::ifstream from(dir_ + "/from");
  for (int64_t at = 0; from >> at;) resumed += at > 8192 ? 1 : 0;
  EXPECT_GT(resumed, 5);
  const auto b = OpenStore(b_);
  CARREL_ASSERT_OK(ImportAll(*b, "", stream_, rng_));
  CARREL_EXPECT_OK(CheckTestContext(*b, spec_));
  EXPECT_EQ(b->GetManifest("report")->content_id(), content_id_);
  EXPECT_FALSE(fs::exists(b_ + "/importing") && !fs::is_empty(b_ + "/importing"));
  std::printf("%d kills, %d imports went on, %d were complete\n", killed, resumed, finished);
}

}  // namespace
}  // namespace carrel::kvstore
