// The kvstore process that dies or is told to stop while decoders ask, and many decoders at once.
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>

#include "absl/time/clock.h"
#include "tests/cli_world.h"

namespace carrel::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr int kFailed = 1;

class ServeTest : public StoreTest {
 protected:
  void SetUp() override {
    StoreTest::SetUp();
    socket_ = SocketPath();
    address_ = "unix:" + socket_;
  }

  // An ask that goes on for a while: at a high temperature the end of the text is as likely as
  // any other token. Returned once it has printed something.
  struct Generating {
    std::unique_ptr<Process> process;
    Args flags;  // beside where the store is
  };
  Generating StartGenerating(int tokens) const {
    for (int seed = 1; seed <= 20; ++seed) {
      Generating ask;
      ask.flags = {"--temperature",    "100",          "--seed",
                   absl::StrCat(seed), "--max-tokens", absl::StrCat(tokens),
                   "--ignore-eos"};
      Command command;
      command.args = Ask(kKept, With(ask.flags, {"--server", address_, "--retry-for", "0"}));
      ask.process = Process::Start(command);
      const bool generating =
          WaitUntil([&] { return !ask.process->Running() || ask.process->out().size() > 20; });
      if (generating && ask.process->Running()) return ask;
      std::cout << "seed " << seed << " ended early" << std::endl;
    }
    ADD_FAILURE() << "no ask kept generating";
    return {};
  }

  std::string socket_, address_;
};

TEST_F(ServeTest, Killed_AClientFailsAtOnceAndARestartedServerAnswersAsBefore) {
  auto server = std::make_unique<Server>(store_, address_);
  const std::string before = Carrel(Ask(kKept, {"--server", address_})).out;
  EXPECT_EQ(before, answer_);
  const Generating ask = StartGenerating(20000);
  ASSERT_NE(ask.process, nullptr);
  server->process().Signal(SIGKILL);
  const absl::Time killed = absl::Now();
  const Outcome outcome = ask.process->Wait();
  EXPECT_THAT(outcome, FailsWith(kFailed, Texts{"UNAVAILABLE"}));
  EXPECT_THAT(Carrel(Ask(kKept, {"--server", address_})),
              FailsWith(kFailed, Texts{"UNAVAILABLE", address_}));
  std::cout << "both clients knew after " << absl::Now() - killed << std::endl;
  server->process().Wait();

  // The dead process left its socket behind: that is no obstacle.
  server = std::make_unique<Server>(store_, address_);
  EXPECT_EQ(Carrel(Ask(kKept, {"--server", address_})).out, before);
  ExpectNothingLost();
}

// The decoder goes on at the same token, with whichever server is there.
TEST_F(ServeTest, KilledAgainAndAgain_AnEvalsAnswersAreThoseOfAnUndisturbedOne) {
  ASSERT_THAT(Carrel(Prefill("doc", {"--input", DemoDocument("registry-512")})), Succeeds());
  Args eval = {"eval",
               "--model",
               DemoModel(),
               "--context",
               "doc",
               "--questions",
               DemoModel() + "/docs/registry-512.questions.jsonl",
               "--threads",
               "1",
               "--prefetch",
               "speculative",
               "--top-k",
               "48",
               "--json"};
  for (int i = 0; i < 6; ++i) {  // long enough for several kills
    eval = With(eval, {"--also", "doc=" + DemoModel() + "/docs/registry-512.questions.jsonl"});
  }
  const json undisturbed = JsonOf(Carrel(With(eval, {"--store", store_})));
  auto server = std::make_unique<Server>(store_, address_);
  Command command;
  command.args = With(eval, {"--server", address_});
  command.time_limit = absl::Minutes(4);
  const std::unique_ptr<Process> asking = Process::Start(command);
  int kills = 0;
  for (; asking->Running() && kills < 100; ++kills) {
    absl::SleepFor(absl::Milliseconds(kills < 3 ? 150 : 700));
    server->process().Signal(SIGKILL);
    server->process().Wait();
    server = std::make_unique<Server>(store_, address_);
  }
  const Outcome outcome = asking->Wait();
  ASSERT_THAT(outcome, Succeeds());
  std::cout << kills << " kills" << std::endl;
  EXPECT_GE(kills, 2);
  const json answered = JsonOf(outcome);
  for (const char* field : {"questions", "exact_matches", "right", "agreements", "generated_tokens",
                            "prompt_tokens", "differing"}) {
    EXPECT_EQ(answered[field], undisturbed[field]) << field;
  }
  EXPECT_THAT(outcome.err, testing::HasSubstr("the store is back"));
}

TEST_F(ServeTest, Terminated_ARunningAskFinishesAndTheSocketIsGone) {
  for (const int signal : {SIGTERM, SIGINT}) {
    Server server(store_, address_);
    const Generating ask = StartGenerating(150);
    ASSERT_NE(ask.process, nullptr);
    server.process().Signal(signal);
    const Outcome outcome = ask.process->Wait();
    EXPECT_THAT(outcome, Succeeds());
    EXPECT_EQ(outcome.out, Carrel(Ask(kKept, ask.flags)).out);
    const Outcome stopped = server.process().Wait();
    EXPECT_THAT(stopped, Succeeds());
    EXPECT_FALSE(fs::exists(socket_));
    EXPECT_THAT(Carrel(Ask(kKept, {"--server", address_})),
                FailsWith(kFailed, Texts{"UNAVAILABLE"}));
  }
  ExpectNothingLost();
}

TEST_F(ServeTest, Terminated_NoOneAsking_StopsAtOnce) {
  Server server(store_, address_);
  server.process().Signal(SIGTERM);
  EXPECT_TRUE(WaitUntil([&] { return !server.process().Running(); }, absl::Seconds(5)));
  EXPECT_THAT(server.process().Wait(), Succeeds());
  EXPECT_FALSE(fs::exists(socket_));
}

TEST_F(ServeTest, Terminated_ADecoderThatDoesNotFinish_IsCutAfterTheDrainTime) {
  Server server(store_, address_, {"--drain", "0.5"});
  const Generating ask = StartGenerating(20000);
  ASSERT_NE(ask.process, nullptr);
  server.process().Signal(SIGTERM);
  EXPECT_TRUE(WaitUntil([&] { return !server.process().Running(); }, absl::Seconds(10)));
  EXPECT_THAT(server.process().Wait(), Succeeds());
  EXPECT_FALSE(fs::exists(socket_));
  const Outcome outcome = ask.process->Wait();
  EXPECT_EQ(outcome.exit_code, kFailed) << outcome;
  ExpectNothingLost();
}

TEST_F(ServeTest, TerminatedTwice_SessionsAreCutAndTheSocketIsGone) {
  Server server(store_, address_, {"--drain", "3600"});
  const Generating ask = StartGenerating(20000);
  ASSERT_NE(ask.process, nullptr);
  server.process().Signal(SIGTERM);
  EXPECT_TRUE(WaitUntil(
      [&] { return server.process().err().find("no new sessions") != std::string::npos; }));
  EXPECT_TRUE(server.process().Running());
  server.process().Signal(SIGTERM);
  EXPECT_TRUE(WaitUntil([&] { return !server.process().Running(); }));
  EXPECT_THAT(server.process().Wait(), Succeeds());
  EXPECT_FALSE(fs::exists(socket_));
  EXPECT_EQ(ask.process->Wait().exit_code, kFailed);
}

// gRPC 1.51's own listener never accepts again (CVE-2023-4785).
TEST_F(ServeTest, DescriptorsRunOut_LaterClientsAreServed) {
  Command command;
  command.args = {"serve", "--store", store_, "--listen", address_};
  command.max_descriptors = 300;
  const std::unique_ptr<Process> server = Process::Start(command);
  ASSERT_TRUE(WaitUntil([&] { return Carrel({"ls", "--server", address_}).exit_code == 0; }));
  sockaddr_un to{};
  to.sun_family = AF_UNIX;
  std::strncpy(to.sun_path, socket_.c_str(), sizeof(to.sun_path) - 1);
  std::vector<int> silent;
  for (int i = 0; i < 400; ++i) {
    silent.push_back(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(connect(silent.back(), reinterpret_cast<const sockaddr*>(&to), sizeof(to)), 0);
  }
  EXPECT_TRUE(server->Running());
  for (const int fd : silent) close(fd);
  EXPECT_TRUE(WaitUntil([&] { return Carrel({"ls", "--server", address_}).exit_code == 0; }));
  EXPECT_EQ(Carrel(Ask(kKept, {"--server", address_})).out, answer_);

  command.max_descriptors = 200;
  command.args = {"serve", "--store", path("other"), "--listen", "unix:" + SocketPath("few")};
  EXPECT_THAT(Carrel(command), FailsWith(kFailed, Texts{"hard limit is 200", "at least 256"}));
}

TEST_F(ServeTest, ReadOnly_SeveralServeAStoreThatIsWrittenMeanwhile) {
  const std::string second_address = "unix:" + SocketPath("second");
  Server first(store_, address_, {"--read-only"}), second(store_, second_address, {"--read-only"});
  for (const std::string& address : {address_, second_address}) {
    EXPECT_EQ(Carrel(Ask(kKept, {"--server", address})).out, answer_);
    EXPECT_THAT(Carrel({"rm", kKept, "--server", address}),
                FailsWith(kFailed, Texts{"FAILED_PRECONDITION", "read-only"}));
    EXPECT_THAT(Carrel(Ask("new", {"--server", address})),
                FailsWith(kFailed, Texts{"NOT_FOUND", "new"}));
  }
  ASSERT_THAT(Carrel(Prefill("new")), Succeeds());
  for (const std::string& address : {address_, second_address}) {
    EXPECT_EQ(Carrel(Ask("new", {"--server", address})).out, answer_);
  }
  ASSERT_THAT(Carrel({"rm", "new", "--store", store_}), Succeeds());
  for (const std::string& address : {address_, second_address}) {
    EXPECT_THAT(Carrel(Ask("new", {"--server", address})),
                FailsWith(kFailed, Texts{"NOT_FOUND", "new"}));
    EXPECT_EQ(Carrel(Ask(kKept, {"--server", address})).out, answer_);
  }
  for (Server* server : {&first, &second}) {
    server->process().Signal(SIGTERM);
    EXPECT_THAT(server->process().Wait(), Succeeds());
  }
}

TEST_F(ServeTest, Supervisor_IsToldWhenItIsReadyAndWhenItStops) {
  const std::string path = SocketPath("notify");
  const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  std::strncpy(name.sun_path, path.c_str(), sizeof(name.sun_path) - 1);
  ASSERT_EQ(bind(fd, reinterpret_cast<const sockaddr*>(&name), sizeof(name)), 0);
  const auto heard = [&] {
    char text[100];
    const ssize_t bytes = recv(fd, text, sizeof(text), 0);
    return std::string(text, static_cast<size_t>(std::max<ssize_t>(0, bytes)));
  };
  Command command;
  command.args = {"serve", "--store", store_, "--listen", address_};
  command.environment = {{"NOTIFY_SOCKET", path}, {"WATCHDOG_USEC", "1000000"}};
  const std::unique_ptr<Process> server = Process::Start(command);
  EXPECT_EQ(heard(), "READY=1");
  EXPECT_THAT(Carrel({"ls", "--server", address_}), Succeeds());
  EXPECT_EQ(heard(), "WATCHDOG=1");
  server->Signal(SIGTERM);
  std::string last = heard();
  while (last == "WATCHDOG=1") last = heard();
  EXPECT_EQ(last, "STOPPING=1");
  EXPECT_THAT(server->Wait(), Succeeds());
  close(fd);
  unlink(path.c_str());
}

TEST_F(ServeTest, ClientKilled_TheServerGoesOn) {
  Server server(store_, address_, {"--max-sessions", "2"});
  for (int i = 0; i < 4; ++i) {  // more than there may be sessions: a dead one makes room
    const Generating ask = StartGenerating(20000);
    ASSERT_NE(ask.process, nullptr);
    ask.process->Signal(SIGKILL);
    ask.process->Wait();
  }
  EXPECT_EQ(Carrel(Ask(kKept, {"--server", address_})).out, answer_);
  server.process().Signal(SIGTERM);
  EXPECT_THAT(server.process().Wait(), Succeeds());
}

TEST_F(ServeTest, RemoveWhileAsked_IsRefusedAndTheAskFinishes) {
  const Server server(store_, address_);
  const Generating ask = StartGenerating(150);
  ASSERT_NE(ask.process, nullptr);
  EXPECT_THAT(Carrel({"rm", kKept, "--server", address_}),
              FailsWith(kFailed, Texts{"FAILED_PRECONDITION", kKept, "sessions"}));
  const Outcome outcome = ask.process->Wait();
  EXPECT_THAT(outcome, Succeeds());
  EXPECT_EQ(outcome.out, Carrel(Ask(kKept, ask.flags)).out);
  EXPECT_THAT(Carrel({"rm", kKept, "--server", address_}), Succeeds());
  EXPECT_THAT(Carrel(Ask(kKept, {"--server", address_})),
              FailsWith(kFailed, Texts{"NOT_FOUND", kKept}));
}

// Files of layers are larger, those of the catalog, which RocksDB reads itself, smaller.
constexpr uintmax_t kLeastLayerFile = 100'000;

// Bytes change under a server that has verified them all.
TEST_F(ServeTest, FilesChangedUnderIt_ItNeverAnswersWrongAndLivesOn) {
  const Server server(store_, address_);
  const Args ask = Ask(kKept, {"--server", address_});
  EXPECT_EQ(Carrel(ask).out, answer_);
  std::vector<std::pair<std::string, std::string>> files;
  for (const auto& entry : fs::recursive_directory_iterator(store_)) {
    if (entry.path().extension() != ".sst" || entry.file_size() < kLeastLayerFile) continue;
    files.emplace_back(entry.path().string(), ReadBytes(entry.path().string()));
    fs::permissions(entry.path(), fs::perms(0600));
  }
  ASSERT_FALSE(files.empty());
  for (const auto& [file, bytes] : files) {
    FlipBit(file, static_cast<int64_t>(bytes.size()) / 3, 4);
    const Outcome flipped = Carrel(ask);
    if (flipped.exit_code == 0) {
      EXPECT_EQ(flipped.out, answer_) << file;  // this question does not read that chunk
    } else {
      EXPECT_THAT(flipped, FailsWith(kFailed, Texts{"DATA_LOSS", "CRC"})) << file;
    }
    FlipBit(file, static_cast<int64_t>(bytes.size()) / 3, 4);
    EXPECT_EQ(Carrel(ask).out, answer_) << file;
    fs::resize_file(file, bytes.size() / 2);
    EXPECT_THAT(Carrel(ask), FailsWith(kFailed, Texts{"DATA_LOSS", file}));
    WriteBytes(file, bytes);
    EXPECT_EQ(Carrel(ask).out, answer_) << file;
    if (file == files[1].first) break;
  }
  const json statistics = JsonOf(Carrel({"stats", "--server", address_, "--json"}));
  EXPECT_GE(statistics["files_changed"], 2);
  EXPECT_GE(statistics["files_damaged"], 2);
  ExpectNothingLost();
}

TEST_F(ServeTest, Scrubbing_CountsPassesAndDamage) {
  const Server server(store_, address_, {"--scrub-rate", "1000"});
  const auto statistics = [&] { return JsonOf(Carrel({"stats", "--server", address_, "--json"})); };
  EXPECT_TRUE(WaitUntil([&] { return statistics()["scrub_passes"] >= 1; }));
  EXPECT_GT(statistics()["scrubbed_bytes"], 0);
  EXPECT_EQ(statistics()["scrub_failures"], 0);
  for (const auto& entry : fs::recursive_directory_iterator(store_)) {
    if (entry.path().extension() != ".sst" || entry.file_size() < kLeastLayerFile) continue;
    fs::permissions(entry.path(), fs::perms(0600));
    FlipBit(entry.path().string(), static_cast<int64_t>(entry.file_size()) / 3, 4);
    EXPECT_TRUE(WaitUntil([&] { return statistics()["scrub_failures"] >= 1; }));
    FlipBit(entry.path().string(), static_cast<int64_t>(entry.file_size()) / 3, 4);
    break;
  }
}

// Each of many decoders gets what it gets alone, whatever the others ask for.
TEST_F(ServeTest, TwoAndSixteenAsks_GiveWhatEachGivesAlone) {
  ASSERT_THAT(Carrel(Prefill("flat", {"--input", DemoDocument("registry-512")})), Succeeds());
  ASSERT_THAT(Carrel(Prefill("hnsw", {"--input", DemoDocument("registry-512"), "--index", "hnsw"})),
              Succeeds());
  const Server server(store_, address_);
  std::vector<Args> asks;
  std::istringstream lines(ReadBytes(DemoModel() + "/docs/registry-512.questions.jsonl"));
  const char* wants[] = {"rows", "values", "attend"};
  const char* prefetches[] = {"off", "speculative", "verified"};
  for (int i = 0; i < 16; ++i) {
    std::string line;
    if (!std::getline(lines, line)) {
      lines.clear();
      lines.seekg(0);
      std::getline(lines, line);
    }
    asks.push_back({"ask", "--model", DemoModel(), "--context", i % 2 == 0 ? "flat" : "hnsw",
                    "--server", address_, "--threads", "1", "--want", wants[i % 3], "--prefetch",
                    prefetches[i / 3 % 3], "--top-k", absl::StrCat(24 + 8 * i), "--dense-layers",
                    absl::StrCat(i % 3), "--json", json::parse(line)["prompt"].get<std::string>()});
  }
  const auto said = [](const Outcome& outcome) {
    EXPECT_THAT(outcome, Succeeds());
    const json answer = JsonOf(outcome);
    return std::make_pair(answer["ids"], answer["text"]);
  };
  std::vector<std::pair<json, json>> alone;
  for (const Args& ask : asks) alone.push_back(said(Carrel(ask)));
  for (const size_t together : {2u, 16u}) {
    std::vector<std::unique_ptr<Process>> running;
    for (size_t i = 0; i < together; ++i) {
      Command command;
      command.args = asks[i];
      command.time_limit = absl::Minutes(3);
      running.push_back(Process::Start(command));
    }
    for (size_t i = 0; i < together; ++i) {
      EXPECT_EQ(said(running[i]->Wait()), alone[i]) << "ask " << i << " of " << together;
    }
  }
}

}  // namespace
}  // namespace carrel::cli
