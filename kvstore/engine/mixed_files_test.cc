// Files of one store among those of another, as a copy by size, a restore of two backups or storage
// that lags behind leaves them: same names, same sizes, every CRC right. What is asked is answered
// as before or refused; never from the other's rows.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>

#include "carrel/v1/context.pb.h"
#include "common/file.h"
#include "common/test_util.h"
#include "kvstore/engine/test_context.h"
#include "kvstore/storage/sst_blocks.h"
#include "kvstore/storage/store.h"
#include "kvstore/storage/store_test_util.h"

namespace carrel::kvstore {
namespace {

namespace fs = std::filesystem;

// Trials of a random test; CARREL_TRIALS for more.
int Trials(int usual) {
  const char* given = std::getenv("CARREL_TRIALS");
  return given == nullptr ? usual : std::atoi(given);
}

class MixedFilesTest : public testing::Test {
 protected:
  static constexpr AttentionShape kShape = {
      .layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 32};

  // The store that is asked, one of another document, and one of the same context (the id is that
  // of the first) whose rows another revision of the model computed.
  void Make(IndexKind kind, bool bound, int64_t tokens = 300) {
    dir_ = FreshTempDir();
    const ContextId id = ContextId::Random();
    for (int i = 0; i < 3; ++i) {
      RandomContextSpec spec{.shape = kShape, .tokens = tokens, .seed = TestSeed() + uint64_t(i)};
      spec.index.kind = kind;
      spec.index.code_bits = 64;
      spec.summary_rows = 16;
      const RandomContext context(spec);
      const std::string folder = Folder(i);
      {
        const auto store = *Store::Open(folder, StoreMode::kReadWrite);
        CARREL_ASSERT_OK(context.Publish(*store, dir_, i == 1 ? ContextId::Random() : id));
      }
      if (!bound) {
        CARREL_ASSERT_OK(MakeUnbound(folder, spec.name));
      }
      for (const auto& file : fs::directory_iterator(folder + "/db")) {
        if (file.path().extension() == ".sst") files_[i].push_back(file.path().string());
      }
      std::sort(files_[i].begin(), files_[i].end());
      ASSERT_EQ(files_[i].size(), files_[0].size());
      for (const std::string& file : files_[i]) bytes_[i].push_back(*ReadFile(file));
      if (i > 0) continue;
      opening_ = context.Opening();
      for (int32_t layer = 0; layer < kShape.layers; ++layer) {
        for (const Want want : {Want::kRows, Want::kAttend}) {
          QueryRequest request;
          request.layer = Layer(layer);
          request.tokens = 1;
          request.queries = context.Queries(1, TestSeed() + 9);
          request.selection = select::TopK{20};
          request.want = want;
          request.estimate = want == Want::kAttend;
          requests_.push_back(request);
        }
      }
    }
    right_ = Ask(nullptr);
    ASSERT_EQ(right_.size(), requests_.size());
  }

  std::string Folder(int i) const { return absl::StrCat(dir_, "/", i); }

  // The answers of a store that is opened now; of those refused, empty ones and why.
  std::vector<Collected> Ask(absl::Status* refused) const {
    const auto refuse = [&](const absl::Status& status) {
      if (refused != nullptr) refused->Update(status);
      EXPECT_NE(refused, nullptr) << status;
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
      EXPECT_THAT(std::string(status.message()), testing::HasSubstr("context")) << status;
    };
    std::vector<Collected> answers(requests_.size());
    auto store = Store::Open(Folder(0), StoreMode::kReadOnly);
    if (!store.ok()) {
      refused->Update(store.status());
      return answers;
    }
    const auto engine = *Engine::Create({.search_threads = 1}, *std::move(store));
    const auto session = engine->OpenSession(opening_);
    if (!session.ok()) {
      refuse(session.status());
      return answers;
    }
    for (size_t i = 0; i < requests_.size(); ++i) {
      absl::StatusOr<Collected> answer = AskAndCollect(**session, i + 1, requests_[i]);
      if (answer.ok()) {
        answers[i] = *std::move(answer);
      } else {
        refuse(answer.status());
      }
    }
    return answers;
  }

  // Copies bytes as a restore does: another file under the name.
  void Put(size_t file, const std::string& bytes) const {
    CARREL_ASSERT_OK(WriteFileAtomically(files_[0][file], bytes));
  }

  // One segment of a file, or the value alone under the key that stands there, by the donor's.
  std::string WithSegmentOf(int donor, size_t file, bool with_key) {
    std::string bytes = bytes_[0][file];
    const std::string end(kKeyBytes + 1, '\xff');
    const SstEntries here = WalkToKey(bytes, end), there = WalkToKey(bytes_[donor][file], end);
    EXPECT_EQ(here.entries.size(), there.entries.size());
    if (here.entries.empty() || there.entries.size() != here.entries.size()) return bytes;
    const size_t i = rng_() % here.entries.size();
    const SstEntry &to = here.entries[i], &from = there.entries[i];
    if (to.value.size() != from.value.size()) return bytes;
    bytes.replace(static_cast<size_t>(to.value.data() - bytes.data()), from.value.size(),
                  std::string(from.value));
    const auto key = static_cast<size_t>(to.key.data() - bytes.data());
    if (with_key) bytes.replace(key, from.key.size(), std::string(from.key));
    return bytes;
  }

  struct Counts {
    int refused = 0, right = 0, wrong = 0;  // trials
  };

  // What is mixed: all files, one, some, or one segment of one.
  Counts Mix(int trials) {
    Counts counts;
    for (int trial = 0; trial < trials; ++trial) {
      const int donor = 1 + static_cast<int>(rng_() % 2);
      const uint64_t what = rng_() % 6;
      const size_t one = rng_() % files_[0].size();
      std::vector<size_t> changed;
      for (size_t file = 0; file < files_[0].size(); ++file) {
        // The last one brought the manifest: "all" is the layers of the other store.
        const bool chosen = what == 0   ? file + 1 < files_[0].size()
                            : what == 1 ? rng_() % 2 == 0
                                        : file == one;
        if (!chosen) continue;
        Put(file, what < 4 ? bytes_[donor][file] : WithSegmentOf(donor, file, what == 5));
        changed.push_back(file);
      }
      absl::Status refused;
      const std::vector<Collected> answers = Ask(&refused);
      bool wrong = false;
      for (size_t i = 0; i < answers.size(); ++i) {
        wrong = wrong || (!answers[i].heads.empty() && answers[i].heads != right_[i].heads);
      }
      ++(wrong ? counts.wrong : refused.ok() ? counts.right : counts.refused);
      for (const size_t file : changed) Put(file, bytes_[0][file]);
    }
    absl::Status refused;
    const std::vector<Collected> answers = Ask(&refused);
    CARREL_EXPECT_OK(refused);
    for (size_t i = 0; i < answers.size(); ++i) EXPECT_EQ(answers[i].heads, right_[i].heads);
    return counts;
  }

  void ExpectNoneWrong(IndexKind kind, int64_t tokens = 300, int usual = 350) {
    Make(kind, /*bound=*/true, tokens);
    if (HasFatalFailure()) return;
    const int trials = Trials(usual);
    const Counts counts = Mix(trials);
    EXPECT_EQ(counts.wrong, 0);
    EXPECT_GT(counts.refused, trials / 2);
    std::printf("%d trials: %d refused, %d right (nothing that was mixed was read), %d wrong\n",
                trials, counts.refused, counts.right, counts.wrong);
  }

  std::mt19937_64 rng_{TestSeed()};
  std::string dir_;
  std::vector<std::string> files_[3], bytes_[3];
  OpenRequest opening_;
  std::vector<QueryRequest> requests_;
  std::vector<Collected> right_;
};

TEST_F(MixedFilesTest, Flat_IsRightOrRefused) { ExpectNoneWrong(IndexKind::kFlat); }
TEST_F(MixedFilesTest, FlatScannedInInt8_IsRightOrRefused) {
  ExpectNoneWrong(IndexKind::kFlat, 1300, 60);
}
TEST_F(MixedFilesTest, Code_IsRightOrRefused) { ExpectNoneWrong(IndexKind::kCode); }
TEST_F(MixedFilesTest, Hnsw_IsRightOrRefused) { ExpectNoneWrong(IndexKind::kHnsw); }

// What binding is for: the same trials on a store of format version 2.
TEST_F(MixedFilesTest, UnboundStore_GivesTheOthersRows) {
  Make(IndexKind::kFlat, /*bound=*/false);
  ASSERT_FALSE(HasFatalFailure());
  EXPECT_GT(Mix(40).wrong, 5);
}

}  // namespace
}  // namespace carrel::kvstore
