// export, import and prefill --server that are cut or killed with -9 at random points: nothing half
// done is seen, the same command goes on, and what arrives is what left, to the last bit. A few trials
// of each kind; CARREL_TRIALS=50 for more.
#include <signal.h>

#include <cstdlib>
#include <filesystem>
#include <random>

#include "absl/time/clock.h"
#include "tests/cli_world.h"

namespace carrel::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kFailed = 1;

int Trials(int usual) {
  const char* given = std::getenv("CARREL_TRIALS");
  return given == nullptr ? usual : std::atoi(given);
}

class TransferFaultTest : public StoreTest {
 protected:
  // Of the trials' context in a store, or on a server.
  struct Content {
    std::string content_id, answer, rows, logits;
    bool operator==(const Content&) const = default;
  };

  void SetUp() override {
    StoreTest::SetUp();
    random_.seed(TestSeed());
    other_ = path("other");
    ASSERT_THAT(Carrel(Prefill(kMoved, {"--input", DemoDocument("registry-2k")})), Succeeds());
    right_ = Read({"--store", store_});
    stream_ = path("stream");
    const absl::Time start = absl::Now();
    ASSERT_THAT(Carrel({"export", kMoved, stream_, "--store", store_}), Succeeds());
    export_time_ = absl::Now() - start;
  }

  Content Read(const Args& where) const {
    Content content;
    const std::string rows = path("read.rows"), logits = path("read.logits");
    const json listed = JsonOf(Carrel(With({"ls", "--json"}, where)));
    for (const json& context : listed["contexts"]) {
      if (context["name"] == kMoved) content.content_id = context["content_id"];
    }
    Args ask = {"ask",          "--model", DemoModel(), "--context",        kMoved,
                "--max-tokens", "8",       "--lab",     "logits=" + logits, kQuestion};
    const Outcome asked = Carrel(With(ask, where));
    EXPECT_THAT(asked, Succeeds());
    content.answer = asked.out;
    content.logits = ReadBytes(logits);
    if (where[0] == "--store") {
      EXPECT_THAT(Carrel(With({"inspect", kMoved, "--rows", rows}, where)), Succeeds());
      content.rows = ReadBytes(rows);
    } else {
      content.rows = right_.rows;  // a server shows none
    }
    return content;
  }

  Texts NamesOf(const Args& where) const {
    Texts names;
    const json listed = JsonOf(Carrel(With({"ls", "--json"}, where)));
    for (const json& context : listed["contexts"]) {
      names.push_back(context["name"]);
    }
    return names;
  }

  // Starts the command and kills it after a random part of the time that it usually takes, or a
  // little more; false if it had ended.
  bool KillAtRandom(const Args& args, absl::Duration usual) {
    const auto process = Process::Start({.args = args, .time_limit = absl::Minutes(2)});
    absl::SleepFor(RandomPart(usual));
    const bool running = process->Running();
    process->Signal(SIGKILL);
    process->Wait();
    return running;
  }
  absl::Duration RandomPart(absl::Duration usual) {
    return usual * (static_cast<double>(random_() % 1000) / 900);
  }

  // What is visible of the context is nothing, or all of it.
  bool ExpectNothingHalf(const Args& where, const std::string& content_id) {
    const Texts names = NamesOf(where);
    const bool there = std::find(names.begin(), names.end(), kMoved) != names.end();
    if (there) {
      const json verified = JsonOf(Carrel(With({"verify", kMoved, "--deep", "--json"}, where)));
      EXPECT_EQ(verified["damaged"], 0);
      EXPECT_TRUE(content_id.empty() || verified["contexts"][0]["content_id"] == content_id);
    }
    return there;
  }

  static constexpr char kMoved[] = "moved";
  std::mt19937_64 random_;
  std::string other_, stream_;
  absl::Duration export_time_;
  Content right_;
};

TEST_F(TransferFaultTest, Export_KilledAnywhere_LeavesNoFileThatLooksWhole) {
  const std::string whole = ReadBytes(stream_), file = path("copy");
  int killed = 0;
  const int trials = Trials(5);
  for (int trial = 0; trial < trials; ++trial) {
    killed += KillAtRandom({"export", kMoved, file, "--store", store_}, export_time_) ? 1 : 0;
    if (fs::exists(file)) {
      EXPECT_TRUE(ReadBytes(file) == whole) << "a part of it";
    } else {
      EXPECT_THAT(Carrel({"export", kMoved, file, "--store", store_}), Succeeds());
      EXPECT_TRUE(ReadBytes(file) == whole);
    }
    fs::remove(file);
  }
  std::cout << trials << " exports, " << killed << " killed" << std::endl;
  EXPECT_TRUE(Read({"--store", store_}) == right_);
}

TEST_F(TransferFaultTest, Stream_CutAnywhere_IsRefusedAndGoesOn) {
  const std::string whole = ReadBytes(stream_);
  const int trials = Trials(5);
  for (int trial = 0; trial < trials; ++trial) {
    // Ends in the header now and then.
    size_t cut = random_() % whole.size();
    if (trial % 5 == 4) cut %= 4096;
    SCOPED_TRACE(absl::StrCat("cut at ", cut));
    Command import{.args = {"import", "-", "--store", other_, "--quiet"},
                   .input = whole.substr(0, cut)};
    EXPECT_THAT(Carrel(import), FailsWith(kFailed, Texts{"DATA_LOSS"}));
    EXPECT_FALSE(ExpectNothingHalf({"--store", other_}, right_.content_id));
    if (trial % 2 == 0) continue;  // the next one goes on, from another place
    import.input = whole;
    EXPECT_THAT(Carrel(import), Succeeds());
    EXPECT_TRUE(Read({"--store", other_}) == right_);
    EXPECT_THAT(Carrel({"rm", kMoved, "--store", other_}), Succeeds());
  }
}

TEST_F(TransferFaultTest, Import_KilledAnywhere_GoesOnAndIsTheSame) {
  const Args where = {"--store", other_}, import = {"import", stream_, "--store", other_};
  ASSERT_THAT(Carrel(import), Succeeds());  // makes the store
  ASSERT_THAT(Carrel({"rm", kMoved, "--store", other_}), Succeeds());
  const absl::Time start = absl::Now();
  ASSERT_THAT(Carrel(import), Succeeds());
  const absl::Duration usual = absl::Now() - start;
  ASSERT_THAT(Carrel({"rm", kMoved, "--store", other_}), Succeeds());
  int killed = 0, visible = 0;
  const int trials = Trials(5);
  for (int trial = 0; trial < trials; ++trial) {
    // Up to three times in a row: what is there of an interrupted one is interrupted again.
    bool there = false;
    for (uint64_t kills = 1 + random_() % 3; kills > 0 && !there; --kills) {
      killed += KillAtRandom(import, usual) ? 1 : 0;
      there = ExpectNothingHalf(where, right_.content_id);
    }
    visible += there ? 1 : 0;
    if (!there) {
      EXPECT_THAT(Carrel(import), Succeeds());
    }
    ASSERT_TRUE(Read(where) == right_) << "trial " << trial;
    EXPECT_THAT(Carrel({"rm", kMoved, "--store", other_}), Succeeds());
    EXPECT_TRUE(fs::is_empty(other_ + "/importing"));
  }
  std::cout << trials << " imports, " << killed << " kills, after which " << visible
            << " were visible, wholly" << std::endl;
}

// The client, or the server beneath it.
TEST_F(TransferFaultTest, ImportIntoAServer_EitherKilledAnywhere_GoesOnAndIsTheSame) {
  ASSERT_THAT(Carrel({"prefill", "--model", DemoModel(), "--input", document_, "--store", other_,
                      "--name", "first", "--quiet"}),
              Succeeds());
  const std::string address = "unix:" + SocketPath();
  const Args where = {"--server", address}, import = {"import", stream_, "--server", address};
  auto server = std::make_unique<Server>(other_, address);
  const absl::Time start = absl::Now();
  ASSERT_THAT(Carrel(import), Succeeds());
  const absl::Duration usual = absl::Now() - start;
  int client_kills = 0, server_kills = 0;
  const int trials = Trials(4);
  for (int trial = 0; trial < trials; ++trial) {
    EXPECT_THAT(Carrel({"rm", kMoved, "--server", address}), Succeeds());
    if (random_() % 2 == 0) {
      client_kills += KillAtRandom(import, usual) ? 1 : 0;
    } else {
      const auto client = Process::Start({.args = import, .time_limit = absl::Minutes(2)});
      absl::SleepFor(RandomPart(usual));
      server->process().Signal(SIGKILL);
      server->process().Wait();
      client->Wait();
      ++server_kills;
      server = std::make_unique<Server>(other_, address);
    }
    if (!ExpectNothingHalf(where, right_.content_id)) {
      EXPECT_THAT(Carrel(import), Succeeds());
    }
    ASSERT_TRUE(Read(where) == right_) << "trial " << trial;
    EXPECT_EQ(NamesOf(where), (Texts{"first", kMoved}));
  }
  std::cout << trials << " imports, " << client_kills << " clients and " << server_kills
            << " servers killed" << std::endl;
  server.reset();
  EXPECT_TRUE(Read({"--store", other_}) == right_);
}

TEST_F(TransferFaultTest, PrefillIntoAServer_KilledAnywhere_GoesOnAndAnswersTheSame) {
  ASSERT_THAT(Carrel({"prefill", "--model", DemoModel(), "--input", document_, "--store", other_,
                      "--name", "first", "--quiet"}),
              Succeeds());
  const std::string address = "unix:" + SocketPath(), work = path("work");
  const Args where = {"--server", address};
  const Args prefill = {"prefill", "--model", DemoModel(), "--input", DemoDocument("registry-2k"),
                        "--store", work,      "--name",    kMoved,    "--server",
                        address,   "--quiet"};
  const Server server(other_, address);
  const absl::Time start = absl::Now();
  ASSERT_THAT(Carrel(prefill), Succeeds());
  const absl::Duration usual = absl::Now() - start;
  int killed = 0;
  const int trials = Trials(3);
  for (int trial = 0; trial < trials; ++trial) {
    EXPECT_THAT(Carrel({"rm", kMoved, "--server", address}), Succeeds());
    bool there = false;
    for (uint64_t kills = 1 + random_() % 3; kills > 0 && !there; --kills) {
      killed += KillAtRandom(prefill, usual) ? 1 : 0;
      there = ExpectNothingHalf(where, "");
    }
    if (!there || !NamesOf({"--store", work}).empty()) {
      EXPECT_THAT(Carrel(prefill), Succeeds());
    }
    // Another context each time, of the same rows.
    const Content found = Read(where);
    EXPECT_NE(found.content_id, right_.content_id);
    EXPECT_EQ(found.answer, right_.answer);
    ASSERT_TRUE(found.logits == right_.logits) << "trial " << trial;
    EXPECT_TRUE(NamesOf({"--store", work}).empty());
  }
  std::cout << trials << " prefills, " << killed << " kills" << std::endl;
}

}  // namespace
}  // namespace carrel::cli
