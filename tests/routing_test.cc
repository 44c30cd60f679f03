// Decoders that reach a store through somebody who chooses among several servers, or choose themselves.
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/bucket_world.h"

namespace carrel::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::HasSubstr;

constexpr int kFailed = 1, kUsage = 2;

sockaddr_un AddressOf(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof(address.sun_path) - 1);
  return address;
}

// What stands between, as a proxy does: bytes go through it, and are counted.
class Router {
 public:
  Router(std::string path, std::string to) : path_(std::move(path)), to_(std::move(to)) {
    listening_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const sockaddr_un address = AddressOf(path_);
    EXPECT_EQ(bind(listening_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(listen(listening_, 64), 0);
    accepting_ = std::thread([this] { Accept(); });
  }
  ~Router() {
    shutdown(listening_, SHUT_RDWR);
    accepting_.join();
    close(listening_);
    {
      const std::lock_guard<std::mutex> lock(mu_);
      for (const int fd : fds_) shutdown(fd, SHUT_RDWR);
    }
    for (std::thread& thread : threads_) thread.join();
    for (const int fd : fds_) close(fd);
    unlink(path_.c_str());
  }
  std::string address() const { return "unix:" + path_; }
  int64_t TakeBytes() { return bytes_.exchange(0); }

 private:
  void Accept() {
    for (;;) {
      const int in = accept4(listening_, nullptr, nullptr, SOCK_CLOEXEC);
      if (in < 0) return;
      const int out = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
      const sockaddr_un address = AddressOf(to_);
      const bool there =
          connect(out, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
      const std::lock_guard<std::mutex> lock(mu_);
      fds_.push_back(in);
      fds_.push_back(out);
      if (!there) {
        shutdown(in, SHUT_RDWR);
        continue;
      }
      threads_.emplace_back([this, in, out] { Pump(in, out); });
      threads_.emplace_back([this, in, out] { Pump(out, in); });
    }
  }
  void Pump(int from, int to) {
    char bytes[65536];
    for (ssize_t n; (n = recv(from, bytes, sizeof(bytes), 0)) > 0;) {
      bytes_ += n;
      for (ssize_t sent = 0; sent < n;) {
        const ssize_t more = send(to, bytes + sent, static_cast<size_t>(n - sent), MSG_NOSIGNAL);
        if (more <= 0) return;
        sent += more;
      }
    }
    shutdown(to, SHUT_WR);
  }

  const std::string path_, to_;
  int listening_ = -1;
  std::atomic<int64_t> bytes_{0};
  std::thread accepting_;
  std::mutex mu_;
  std::vector<int> fds_;
  std::vector<std::thread> threads_;
};

class RoutingTest : public StoreTest {
 protected:
  // Requests that a server has answered.
  static int64_t AnsweredBy(const std::string& address) {
    int64_t answered = 0;
    const json statistics = JsonOf(Carrel({"stats", "--server", address, "--json"}));
    for (const json& latency : statistics["latencies"]) answered += latency["count"].get<int64_t>();
    return answered;
  }
  std::string At(const std::string& name) const { return "unix:" + SocketPath(name); }
};

TEST_F(RoutingTest, ThroughARouter_SessionsGoWhereTheServerSaysThatItIs) {
  const std::string path = SocketPath("server");
  Router router(SocketPath("router"), path);
  int64_t bytes[3];
  const Args advertised[] = {
      {}, {"--advertise", "unix:" + path}, {"--advertise", "unix:" + SocketPath("nobody")}};
  for (int i = 0; i < 3; ++i) {
    Server server(store_, "unix:" + path, advertised[i]);
    EXPECT_EQ(Carrel(Ask(kKept, {"--server", router.address()})).out, answer_) << i;
    bytes[i] = router.TakeBytes();
    server.process().Signal(SIGTERM);
    server.process().Wait();
  }
  EXPECT_LT(4 * bytes[1], bytes[0]) << "the session went through the router";
  EXPECT_GT(2 * bytes[2], bytes[0]) << "an address that nobody reaches: through the router";
  ExpectNothingLost();
}

TEST_F(RoutingTest, OfSeveralServers_TheContextSaysWhich_AndTheOtherAnswersWhenItIsLost) {
  const std::string a = At("a"), b = At("b");
  auto one = std::make_unique<Server>(store_, a, Args{"--read-only"});
  auto other = std::make_unique<Server>(store_, b, Args{"--read-only"});
  EXPECT_EQ(Carrel(Ask(kKept, {"--server", a, "--server", b})).out, answer_);
  const int64_t by_a = AnsweredBy(a), by_b = AnsweredBy(b);
  EXPECT_EQ(by_a > 0, by_b == 0) << by_a << " " << by_b;
  EXPECT_EQ(Carrel(Ask(kKept, {"--server", b, "--server", a})).out, answer_);
  EXPECT_EQ(AnsweredBy(a), 2 * by_a);
  EXPECT_EQ(AnsweredBy(b), 2 * by_b);
  (by_a > 0 ? one : other)->process().Signal(SIGKILL);
  (by_a > 0 ? one : other)->process().Wait();
  EXPECT_EQ(Carrel(Ask(kKept, {"--server", a, "--server", b})).out, answer_);
  EXPECT_EQ(AnsweredBy(by_a > 0 ? b : a), by_a + by_b);
}

// The one that is asked is killed again and again.
TEST_F(RoutingTest, OfSeveralServers_OneIsKilledInTheMiddle_AnswersAreThoseOfAnUndisturbedRun) {
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
               "--top-k",
               "48",
               "--json"};
  for (int i = 0; i < 6; ++i) {  // long enough for several kills
    eval = With(eval, {"--also", "doc=" + DemoModel() + "/docs/registry-512.questions.jsonl"});
  }
  const json undisturbed = JsonOf(Carrel(With(eval, {"--store", store_})));
  const std::string addresses[] = {At("a"), At("b")};
  std::unique_ptr<Server> servers[2];
  for (int i = 0; i < 2; ++i) {
    servers[i] = std::make_unique<Server>(store_, addresses[i], Args{"--read-only"});
  }
  Command command;
  command.args = With(eval, {"--server", addresses[0], "--server", addresses[1]});
  command.time_limit = absl::Minutes(4);
  const std::unique_ptr<Process> asking = Process::Start(command);
  int kills = 0;
  for (; asking->Running() && kills < 100; ++kills) {
    absl::SleepFor(absl::Milliseconds(kills < 4 ? 200 : 800));
    const int i = kills % 2;
    servers[i]->process().Signal(SIGKILL);
    servers[i]->process().Wait();
    servers[i] = std::make_unique<Server>(store_, addresses[i], Args{"--read-only"});
  }
  const Outcome outcome = asking->Wait();
  ASSERT_THAT(outcome, Succeeds());
  std::cout << kills << " kills\n" << outcome.err << std::endl;
  EXPECT_GE(kills, 2);
  const json answered = JsonOf(outcome);
  for (const char* field : {"questions", "exact_matches", "right", "agreements", "generated_tokens",
                            "prompt_tokens", "differing"}) {
    EXPECT_EQ(answered[field], undisturbed[field]) << field;
  }
  EXPECT_THAT(outcome.err, HasSubstr("the store is back"));
}

class ReplicaTest : public RoutingTest {
 protected:
  void SetUp() override {
    RoutingTest::SetUp();
    ASSERT_THAT(Carrel({.args = {"push", kKept, kBucketUri, "--store", store_},
                        .environment = BucketEnvironment(fake_.endpoint())}),
                Succeeds());
  }
  void TearDown() override { fake_.Intercept(nullptr); }
  std::unique_ptr<Process> Replica(const std::string& name, const Args& more = {}) {
    Command command;
    command.environment = BucketEnvironment(fake_.endpoint());
    command.args =
        With(With({"serve", "--listen", At(name)}, ReplicaOf(path("cache-" + name))), more);
    auto process = Process::Start(command);
    EXPECT_TRUE(WaitUntil([&] { return absl::StrContains(process->err(), "ready on "); }));
    return process;
  }

  kvstore::FakeS3 fake_;
};

TEST_F(ReplicaTest, OneOfTwoIsLost_TheOtherFetchesWhatItLacks_AndAnswersGoOn) {
  auto a = Replica("a"), b = Replica("b");
  const Args servers = {"--server", At("a"), "--server", At("b")};
  EXPECT_EQ(Carrel(Ask(kKept, servers)).out, answer_);
  (AnsweredBy(At("a")) > 0 ? a : b)->Signal(SIGKILL);
  EXPECT_EQ(Carrel(Ask(kKept, servers)).out, answer_);
}

TEST_F(ReplicaTest, WithoutTheBucket_WhoAsksIsToldOnce) {
  const std::string log = path("audit.jsonl");
  fake_.Intercept([](const kvstore::FakeRequest&) {
    return kvstore::FakeReply{.status = 503, .body = "<Error><Code>SlowDown</Code></Error>"};
  });
  auto a = Replica("a", {"--audit-log", log});
  EXPECT_THAT(Carrel(Ask(kKept, {"--server", At("a")})), FailsWith(kFailed, Texts{"UNAVAILABLE"}));
  int opens = 0;
  const std::string lines = ReadBytes(log);
  for (size_t at = 0; (at = lines.find("\"event\":\"open\"", at)) != std::string::npos; ++at) {
    ++opens;
  }
  EXPECT_EQ(opens, 1) << "what the bucket did not say is not asked for again\n" << lines;
}

TEST_F(ReplicaTest, Warm_ByFlagAndByCommand) {
  auto a = Replica("a", {"--warm", kKept});
  EXPECT_TRUE(WaitUntil([&] { return absl::StrContains(a->err(), "what --warm names is here"); }));
  const json listed = JsonOf(Carrel({"ls", "--server", At("a"), "--json"}));
  EXPECT_EQ(listed["contexts"][0]["elsewhere"], false);
  auto b = Replica("b");
  EXPECT_TRUE(WaitUntil([&] {
    const json all = JsonOf(Carrel({"ls", "--server", At("b"), "--json"}));
    return all["contexts"].size() == 1 && all["contexts"][0]["elsewhere"] == true;
  }));
  EXPECT_THAT(Carrel({"ls", "--server", At("b")}).out, HasSubstr("in the bucket alone"));
  const Outcome warmed = Carrel({"warm", kKept, "--server", At("b")});
  EXPECT_THAT(warmed, Succeeds());
  EXPECT_THAT(warmed.out, HasSubstr("kept is here"));
  EXPECT_THAT(Carrel({"warm", "nobody", "--server", At("b")}),
              FailsWith(kFailed, Texts{"NOT_FOUND", "nobody"}));
  EXPECT_THAT(Carrel({"warm", kKept}), FailsWith(kUsage, Texts{"--server", "--api"}));
  a->Signal(SIGTERM);
  EXPECT_THAT(a->Wait(), Succeeds());
}

TEST_F(ReplicaTest, AskedWhileItStops_EndsAtOnce) {
  std::atomic<bool> holds{true};
  fake_.Intercept([&](const kvstore::FakeRequest& request) -> std::optional<kvstore::FakeReply> {
    while (holds && absl::StrContains(request.key, ".sst")) absl::SleepFor(absl::Milliseconds(5));
    return std::nullopt;
  });
  auto a = Replica("a", {"--drain", "600"});
  Command command;
  command.args = Ask(kKept, {"--server", At("a"), "--retry-for", "0"});
  const auto asking = Process::Start(command);
  EXPECT_TRUE(WaitUntil([&] { return fake_.requests() > 3; }));
  absl::SleepFor(absl::Milliseconds(300));
  a->Signal(SIGTERM);
  EXPECT_THAT(asking->Wait(), FailsWith(kFailed, Texts{"UNAVAILABLE"}));
  holds = false;
  EXPECT_THAT(a->Wait(), Succeeds());
  fake_.Intercept(nullptr);
}

TEST_F(RoutingTest, AddressesThatCannotBe_AreRefused) {
  EXPECT_THAT(Carrel({"serve", "--store", store_, "--listen", At("a"), "--advertise", "replica-1"}),
              FailsWith(kUsage, Texts{"advertise", "replica-1"}));
  EXPECT_THAT(Carrel({"serve", "--store", store_, "--listen", At("a"), "--warm", "x"}),
              FailsWith(kUsage, Texts{"--warm is of --remote"}));
}

}  // namespace
}  // namespace carrel::cli
