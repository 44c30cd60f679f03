// Bytes on disk that change after they were verified: what is answered is right, or DataLoss.
#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <thread>

#include "absl/time/clock.h"
#include "carrel/v1/context.pb.h"
#include "common/file.h"
#include "common/status.h"
#include "common/test_random.h"
#include "common/test_util.h"
#include "kvstore/engine/test_context.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {
namespace {

namespace fs = std::filesystem;

// Trials of a random test; CARREL_TRIALS for more.
int Trials(int usual) {
  const char* given = std::getenv("CARREL_TRIALS");
  return given == nullptr ? usual : std::atoi(given);
}

// A file of the store, to be damaged.
class Victim {
 public:
  explicit Victim(const std::string& path) : path_(path), bytes_(*ReadFile(path)) {
    CARREL_CHECK(chmod(path.c_str(), 0600) == 0);
    fd_ = open(path.c_str(), O_RDWR | O_CLOEXEC);
    CARREL_CHECK(fd_ >= 0);
  }
  ~Victim() { close(fd_); }
  Victim(const Victim&) = delete;

  const std::string& path() const { return path_; }
  const std::string& bytes() const { return bytes_; }
  int fd() const { return fd_; }
  // bit < 0: as it was.
  void Flip(size_t at, int bit) const {
    const char byte = static_cast<char>(bit < 0 ? bytes_[at] : bytes_[at] ^ (1 << bit));
    CARREL_CHECK(pwrite(fd_, &byte, 1, static_cast<off_t>(at)) == 1);
  }
  void Truncate(size_t size) const { CARREL_CHECK(ftruncate(fd_, static_cast<off_t>(size)) == 0); }
  void Restore() const {
    CARREL_CHECK(pwrite(fd_, bytes_.data(), bytes_.size(), 0) ==
                 static_cast<ssize_t>(bytes_.size()));
  }

 private:
  const std::string path_, bytes_;
  int fd_ = -1;
};

// Where `bytes` lie in one of the files.
std::pair<const Victim*, size_t> Locate(const std::vector<std::unique_ptr<Victim>>& victims,
                                        const std::string& bytes) {
  for (const auto& victim : victims) {
    const size_t at = victim->bytes().find(bytes);
    if (at != std::string::npos) return {victim.get(), at};
  }
  CARREL_CHECK(false);
}

class ChangedBytesTest : public testing::TestWithParam<IndexKind> {
 protected:
  // summaries are there, so that ATTEND can estimate.
  void Start(EngineConfig config = {}, bool second = false) {
    spdlog::set_level(spdlog::level::err);  // every change is told
    spec_.index.kind = GetParam();
    spec_.shape = {.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 32};
    spec_.tokens = tokens_;
    spec_.summary_rows = 20;
    context_ = std::make_unique<RandomContext>(spec_);
    std::vector<const RandomContext*> contexts = {context_.get()};
    RandomContextSpec other = spec_;
    other.name = "other";
    other.seed = 2;
    if (second) {
      other_ = std::make_unique<RandomContext>(other);
      contexts.push_back(other_.get());
    }
    folder_ = FreshTempDir();
    auto store = MakeStore(folder_, contexts);
    for (const auto& entry : fs::recursive_directory_iterator(folder_ + "/store")) {
      if (entry.path().extension() != ".sst" || entry.file_size() < 20000) continue;
      auto victim = std::make_unique<Victim>(entry.path().string());
      if (second && Holds(*victim, *other_)) continue;
      victims_.push_back(std::move(victim));
    }
    ASSERT_FALSE(victims_.empty());
    absl::SleepFor(absl::Milliseconds(50));  // they are older than a tick
    config.search_threads = 2;
    engine_ = *Engine::Create(config, std::move(store));
  }

  static bool Holds(const Victim& victim, const RandomContext& context) {
    const std::string row(reinterpret_cast<const char*>(context.keys(Layer(0), KvHead(0))), 64);
    const std::string last(reinterpret_cast<const char*>(context.keys(Layer(1), KvHead(0))), 64);
    return victim.bytes().find(row) != std::string::npos ||
           victim.bytes().find(last) != std::string::npos;
  }

  std::shared_ptr<Session> Open(const RandomContext& context) {
    auto session = engine_->OpenSession(context.Opening());
    EXPECT_TRUE(session.ok()) << session.status();
    return session.ok() ? *session : nullptr;
  }

  // One of a few requests; the same number gives the same.
  QueryRequest Request(int i) const {
    static constexpr Want kWants[] = {Want::kIds,    Want::kRows,   Want::kValues,
                                      Want::kAttend, Want::kAttend, Want::kRows};
    QueryRequest request;
    request.layer = Layer(i % 2);
    request.want = kWants[i / 2 % 6];
    request.tokens = 2;
    request.queries = context_->Queries(2, static_cast<uint64_t>(i), 2);
    request.selection = select::TopK{i / 12 % 2 == 0 ? 12 : 100};
    if (i % 12 == 10) request.selection = select::All();
    request.estimate = request.want == Want::kAttend && i % 12 < 8;
    return request;
  }
  static constexpr int kRequests = 24;

  absl::StatusOr<Collected> Answer(Session& session, int i, uint64_t id) {
    return AskAndCollect(session, id, Request(i));
  }

  // With every chunk verified and every index loaded.
  std::vector<Collected> CleanAnswers(Session& session) {
    std::vector<Collected> clean;
    for (int i = 0; i < kRequests; ++i) {
      auto answer = Answer(session, i, 1);
      EXPECT_TRUE(answer.ok()) << answer.status();
      clean.push_back(answer.ok() ? *std::move(answer) : Collected());
    }
    return clean;
  }

  void FlipAfterTheyWereVerified();
  void FlipWhileOthersAsk();

  int64_t tokens_ = 900;
  RandomContextSpec spec_;
  std::unique_ptr<RandomContext> context_, other_;
  std::string folder_;
  std::vector<std::unique_ptr<Victim>> victims_;
  std::unique_ptr<Engine> engine_;
};

void ChangedBytesTest::FlipAfterTheyWereVerified() {
  Start();
  const auto session = Open(*context_);
  const std::vector<Collected> clean = CleanAnswers(*session);
  std::mt19937_64 random(TestSeed());
  int refused = 0, wrong = 0;
  const int trials = Trials(15);
  for (int trial = 0; trial < trials; ++trial) {
    const Victim& victim = *victims_[random() % victims_.size()];
    const size_t at = random() % victim.bytes().size();
    victim.Flip(at, static_cast<int>(random() % 8));
    for (int asked = 0; asked < 4; ++asked) {
      const int i = static_cast<int>(random() % kRequests);
      const auto answer = Answer(*session, i, 1);
      if (answer.ok()) {
        wrong += answer->heads == clean[i].heads ? 0 : 1;
      } else {
        EXPECT_EQ(answer.status().code(), absl::StatusCode::kDataLoss) << answer.status();
        ++refused;
      }
    }
    victim.Flip(at, -1);
    const int i = static_cast<int>(random() % kRequests);
    const auto answer = Answer(*session, i, 1);
    ASSERT_TRUE(answer.ok()) << "after the damage was undone: " << answer.status();
    wrong += answer->heads == clean[i].heads ? 0 : 1;
  }
  std::cout << trials << " flips: " << refused << " answers refused" << std::endl;
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(refused, 0);
}

TEST_P(ChangedBytesTest, FlippedAfterTheyWereVerified_NoAnswerIsWrong) {
  FlipAfterTheyWereVerified();
}

void ChangedBytesTest::FlipWhileOthersAsk() {
  Start();
  const std::vector<Collected> clean = CleanAnswers(*Open(*context_));
  std::atomic<bool> done{false};
  std::atomic<int64_t> wrong{0}, right{0}, refused{0};
  std::vector<std::thread> askers;
  std::mt19937_64 random(TestSeed());
  for (int t = 0; t < 3; ++t) {
    askers.emplace_back([&, seed = random()] {
      std::mt19937_64 mine(seed);
      const auto session = Open(*context_);
      for (uint64_t id = 1; session != nullptr && !done; ++id) {
        const int i = static_cast<int>(mine() % kRequests);
        const auto answer = Answer(*session, i, id);
        ++(!answer.ok() ? refused : answer->heads == clean[i].heads ? right : wrong);
      }
    });
  }
  for (int trial = 0; trial < Trials(10); ++trial) {
    const Victim& victim = *victims_[random() % victims_.size()];
    const size_t at = random() % victim.bytes().size();
    for (const int bit : {static_cast<int>(random() % 8), -1}) {
      victim.Flip(at, bit);
      absl::SleepFor(absl::Milliseconds(static_cast<int>(random() % 60)));
    }
  }
  done = true;
  for (std::thread& asker : askers) asker.join();
  std::cout << right << " right, " << refused << " refused" << std::endl;
  EXPECT_EQ(wrong, 0);
  EXPECT_GT(right, 0);
}

TEST_P(ChangedBytesTest, FlippedWhileOthersAsk_NoAnswerIsWrong) { FlipWhileOthersAsk(); }

// Zones that are scanned in 8 bits, of which a copy is kept.
class ScannedBytesTest : public ChangedBytesTest {
 protected:
  ScannedBytesTest() { tokens_ = 2400; }
};

TEST_P(ScannedBytesTest, FlippedAfterTheyWereVerified_NoAnswerIsWrong) {
  FlipAfterTheyWereVerified();
}

TEST_P(ScannedBytesTest, FlippedWhileOthersAsk_NoAnswerIsWrong) { FlipWhileOthersAsk(); }

// A key that no search returns is damaged: only the scan could tell.
TEST_P(ScannedBytesTest, KeyThatIsKept_DamagedIsDataLossAndUndoneIsAsBefore) {
  Start();
  const auto session = Open(*context_);
  const std::vector<Collected> clean = CleanAnswers(*session);
  const int64_t kept = engine_->Statistics().index_bytes();
  EXPECT_GT(kept, 0);
  for (const Position row : {Position{5}, Position{1000}, Position{2300}}) {
    const auto* key = context_->keys(Layer(0), KvHead(1)) + row * spec_.shape.head_dim;
    const auto [victim, at] = Locate(victims_, std::string(reinterpret_cast<const char*>(key), 64));
    victim->Flip(at + 1, 6);
    EXPECT_THAT(Answer(*session, 0, 1), StatusIs(absl::StatusCode::kDataLoss, "K rows"));
    victim->Flip(at + 1, -1);
    const auto answer = Answer(*session, 0, 1);
    CARREL_ASSERT_OK(answer);
    EXPECT_EQ(answer->heads, clean[0].heads);
    EXPECT_EQ(engine_->Statistics().index_bytes(), kept);
  }
}

class ScrubTest : public ChangedBytesTest {};

// A write through a mapping bears no time of its own: scrubbing finds it.
TEST_P(ScrubTest, FlippedWithoutATime_ScrubbingFindsItAndReadsAreDataLoss) {
  Start({.scrub_bytes_per_s = int64_t{1} << 30});
  const auto session = Open(*context_);
  const std::vector<Collected> clean = CleanAnswers(*session);
  const std::string rows(reinterpret_cast<const char*>(context_->values(Layer(0), KvHead(1))), 128);
  const auto [victim, at] = Locate(victims_, rows);
  char* mapped = static_cast<char*>(
      mmap(nullptr, victim->bytes().size(), PROT_READ | PROT_WRITE, MAP_SHARED, victim->fd(), 0));
  ASSERT_NE(mapped, MAP_FAILED);
  mapped[at] = victim->bytes()[at];  // its page is dirty and has its time
  (void)Answer(*session, 8, 1);
  const auto passes = [&] { return engine_->Statistics().scrub_passes(); };
  const auto await_passes = [&](int64_t wanted) {
    for (int i = 0; i < 3000 && passes() < wanted; ++i) absl::SleepFor(absl::Milliseconds(10));
    ASSERT_GE(passes(), wanted);
  };
  await_passes(passes() + 1);
  EXPECT_EQ(engine_->Statistics().scrub_failures(), 0);
  mapped[at] ^= 0x10;
  await_passes(passes() + 2);
  EXPECT_GT(engine_->Statistics().scrub_failures(), 0);
  EXPECT_GT(engine_->Statistics().scrubbed_bytes(), 0);
  QueryRequest all = Request(6);
  all.layer = Layer(0);
  all.selection = select::All();
  all.estimate = false;
  const auto answer = AskAndCollect(*session, 1, all);
  // Row 0 is the decoder's own; its chunk holds rows of the zone, too.
  EXPECT_THAT(answer, StatusIs(absl::StatusCode::kDataLoss, "CRC"));
  munmap(mapped, victim->bytes().size());
}

TEST_P(ChangedBytesTest, TruncatedUnderLoad_ThatContextIsDataLossAndTheOtherLives) {
  Start({}, /*second=*/true);
  std::mt19937_64 random(TestSeed());
  const std::vector<Collected> clean = CleanAnswers(*Open(*context_));
  const std::vector<Collected> other_clean = CleanAnswers(*Open(*other_));
  for (int trial = 0; trial < Trials(3); ++trial) {
    std::atomic<bool> done{false};
    std::atomic<int64_t> wrong{0}, refused{0}, other_failed{0};
    std::vector<std::thread> askers;
    for (int t = 0; t < 3; ++t) {
      const bool of_other = t == 2;
      askers.emplace_back([&, seed = random(), of_other] {
        std::mt19937_64 mine(seed);
        const auto session = Open(of_other ? *other_ : *context_);
        for (uint64_t id = 1; session != nullptr && !done; ++id) {
          const int i = static_cast<int>(mine() % kRequests);
          const auto answer = Answer(*session, i, id);
          const auto& expected = (of_other ? other_clean : clean)[i].heads;
          if (answer.ok()) {
            wrong += answer->heads == expected ? 0 : 1;
          } else if (of_other || answer.status().code() != absl::StatusCode::kDataLoss) {
            ++other_failed;
          } else {
            ++refused;
          }
        }
      });
    }
    absl::SleepFor(absl::Milliseconds(20));
    const Victim& victim = *victims_[random() % victims_.size()];
    victim.Truncate(random() % 3 == 0 ? 0 : random() % victim.bytes().size());
    absl::SleepFor(absl::Milliseconds(60));
    // On a busy machine a request may take longer than that.
    for (int i = 0; i < 3000 && refused == 0; ++i) absl::SleepFor(absl::Milliseconds(10));
    done = true;
    for (std::thread& asker : askers) asker.join();
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(other_failed, 0);
    EXPECT_GT(refused, 0);
    const auto session = engine_->OpenSession(context_->Opening());
    EXPECT_THAT(session, StatusIs(absl::StatusCode::kDataLoss, victim.path()));
    victim.Restore();
    EXPECT_EQ(CleanAnswers(*Open(*context_))[trial % kRequests].heads,
              clean[trial % kRequests].heads);
  }
  EXPECT_GT(engine_->Statistics().files_damaged(), 0);
}

TEST_P(ChangedBytesTest, Published_FilesAreReadOnly) {
  spec_.index.kind = GetParam();
  const RandomContext context(spec_);
  const std::string folder = FreshTempDir();
  const auto store = MakeStore(folder, {&context});
  int files = 0;
  for (const auto& entry : fs::recursive_directory_iterator(folder + "/store")) {
    if (entry.path().extension() != ".sst" || entry.file_size() < 20000) continue;
    EXPECT_EQ(entry.status().permissions() & fs::perms(0222), fs::perms::none) << entry.path();
    ++files;
  }
  EXPECT_GT(files, 0);
}

INSTANTIATE_TEST_SUITE_P(Kinds, ChangedBytesTest,
                         testing::Values(IndexKind::kFlat, IndexKind::kCode, IndexKind::kHnsw,
                                         IndexKind::kInt8),
                         [](const auto& info) { return std::string(IndexKindName(info.param)); });
INSTANTIATE_TEST_SUITE_P(Kinds, ScannedBytesTest, testing::Values(IndexKind::kFlat));
INSTANTIATE_TEST_SUITE_P(Kinds, ScrubTest, testing::Values(IndexKind::kFlat));

}  // namespace
}  // namespace carrel::kvstore
