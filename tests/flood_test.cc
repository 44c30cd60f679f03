// A server of bounded memory under a flood: connections that say nothing, sessions that ask for
// nothing, requests that are far too large, readers that do not read. It lives, a good client's
// answers stay right, and the memory comes back. CARREL_FLOOD=full: all of them.
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/time/clock.h"
#include "kvstore/service/service_test_util.h"
#include "kvstore/storage/store.h"
#include "tests/cli.h"
#include "tests/cli_world.h"

namespace carrel::kvstore {
namespace {

struct Scale {
  int connections, idle_sessions, large_requests, slow_readers;
  absl::Duration hold;
  int64_t memory_bytes;  // the server's limit of address space
};

Scale TheScale() {
  const char* const wanted = std::getenv("CARREL_FLOOD");
  constexpr int64_t kLimit = int64_t{2} << 30;
  if (wanted != nullptr && std::string(wanted) == "full") {
    return {2000, 1000, 1000, 500, absl::Seconds(10), kLimit};
  }
  return {150, 40, 24, 30, absl::Seconds(1), kLimit};
}

constexpr size_t kLargeBytes = size_t{31} << 20;
constexpr int kStreamsPerConnection = 50;

class FloodTest : public testing::Test {
 protected:
  void SetUp() override {
#ifdef CARREL_SANITIZED
    GTEST_SKIP() << "sanitizers need more address space than the limit";
#endif
    rlimit descriptors{};
    getrlimit(RLIMIT_NOFILE, &descriptors);
    descriptors.rlim_cur = descriptors.rlim_max;
    setrlimit(RLIMIT_NOFILE, &descriptors);
    RandomContextSpec spec;
    spec.seed = TestSeed();
    spec.tokens = 8000;
    spec.segment_tokens = 4096;
    context_ = std::make_unique<RandomContext>(spec);
    dir_ = FreshTempDir();
    MakeStore(dir_, {context_.get()});
    cli::Command command;
    command.args = {"serve",          "--store", dir_ + "/store", "--listen", "127.0.0.1:0",
                    "--max-sessions", "4096",    "--threads",     "2"};
    command.max_memory_bytes = scale_.memory_bytes;
    command.time_limit = absl::Minutes(14);
    server_ = cli::Process::Start(command);
    ASSERT_TRUE(cli::WaitUntil([&] { return !server_->Running() || Port() != 0; }));
    ASSERT_TRUE(server_->Running()) << server_->err();
  }
  void TearDown() override {
    for (const int fd : silent_) close(fd);
  }

  int Port() const {
    const std::string text = server_->err();
    const size_t at = text.find("127.0.0.1:");
    int port = 0;
    if (at == std::string::npos || text.find(';', at) == std::string::npos) return 0;
    return absl::SimpleAtoi(text.substr(at + 10, text.find(';', at) - at - 10), &port) ? port : 0;
  }
  std::shared_ptr<grpc::Channel> NewChannel() const {
    grpc::ChannelArguments arguments;
    arguments.SetMaxReceiveMessageSize(-1);
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    return grpc::CreateCustomChannel(absl::StrCat("127.0.0.1:", Port()),
                                     grpc::InsecureChannelCredentials(), arguments);
  }
  int64_t ServerKb(const std::string& field) const {
    std::ifstream status(absl::StrCat("/proc/", server_->pid(), "/status"));
    for (std::string line; std::getline(status, line);) {
      if (line.rfind(field + ":", 0) == 0) return std::stoll(line.substr(field.size() + 1));
    }
    return -1;
  }

  QueryRequest Query(uint64_t i) const {
    QueryRequest request;
    request.layer = Layer(static_cast<int32_t>(i % 2));
    request.tokens = 1 + static_cast<int64_t>(i % 3);
    request.queries = context_->Queries(request.tokens, 100 + i);
    request.selection = select::TopK{16 + static_cast<int64_t>(i) * 10};
    request.want = static_cast<Want>(i % 4);
    return request;
  }
  // Empty if it was not answered.
  std::vector<CollectedHead> Answer(WireSession& session, uint64_t id, uint64_t i) const {
    const QueryRequest request = Query(i);
    if (!session.SendQuery(id, WireQuery(request, context_->spec().shape))) return {};
    const Parts parts = session.Receive(id);
    if (parts.empty() || parts.back().has_error()) return {};
    return CollectWire(parts, request.tokens, context_->spec().shape.kv_heads);
  }

  void OpenSilentConnections() {
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<uint16_t>(Port()));
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (int i = 0; i < scale_.connections; ++i) {
      silent_.push_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      ASSERT_EQ(connect(silent_.back(), reinterpret_cast<const sockaddr*>(&to), sizeof(to)), 0);
    }
  }
  std::string Resident() const {
    return absl::StrCat("resident ", ServerKb("VmRSS") / 1024, " MiB (own ",
                        ServerKb("RssAnon") / 1024, ", files ", ServerKb("RssFile") / 1024, ")");
  }
  // Reads every row once: pages of the store that are mapped from then on are no more than a normal
  // client leaves.
  void FetchEverything(const std::shared_ptr<grpc::Channel>& channel) const {
    WireSession session(channel);
    session.Open(context_->Opening());
    v1::FetchRows all;
    all.mutable_range()->set_end(8000);
    for (uint32_t layer = 0; layer < 2; ++layer) {
      all.set_layer(layer);
      ASSERT_TRUE(session.SendFetch(2 + layer, all));
      const Parts parts = session.Receive(2 + layer);
      ASSERT_FALSE(parts.empty());
      ASSERT_FALSE(parts.back().has_error()) << parts.back().error().message();
    }
  }
  std::unique_ptr<WireSession> OpenOne(std::shared_ptr<grpc::Channel>& channel, int i) const {
    if (i % kStreamsPerConnection == 0) channel = NewChannel();
    auto session = std::make_unique<WireSession>(channel);
    session->Open(context_->Opening());
    return session;
  }
  void OpenIdleSessions() {
    std::shared_ptr<grpc::Channel> channel;
    for (int i = 0; i < scale_.idle_sessions; ++i) idle_.push_back(OpenOne(channel, i));
  }
  void SendLargeRequests() {
    std::atomic<int> next{0}, refused{0};
    const std::string bytes(kLargeBytes, 'x');
    v1::SessionRequest open;
    open.set_request_id(1);
    *open.mutable_open() = WireOpen(context_->Opening());
    v1::SessionRequest large;
    large.set_request_id(2);
    large.mutable_query()->mutable_queries()->set_data(bytes);
    const std::vector<std::string> messages = {open.SerializeAsString(), large.SerializeAsString()};
    std::vector<std::thread> threads;
    for (int t = 0; t < 8; ++t) {
      threads.emplace_back([&] {
        const auto channel = NewChannel();
        while (next.fetch_add(1) < scale_.large_requests) {
          if (!SendRaw(channel, messages).ok()) ++refused;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(refused, scale_.large_requests);
  }
  void OpenSlowReaders() {
    v1::FetchRows all;
    all.mutable_range()->set_end(8000);
    QueryRequest many = Query(0);
    many.tokens = 64;
    many.queries = context_->Queries(64, 5);
    many.want = Want::kIds;
    many.selection = select::TopK{8000};
    std::shared_ptr<grpc::Channel> channel;
    for (int i = 0; i < scale_.slow_readers; ++i) {
      slow_.push_back(OpenOne(channel, i));
      uint64_t id = 1;
      for (int n = 0; n < 20; ++n) slow_.back()->SendFetch(++id, all);
      if (i % 10 == 0) slow_.back()->SendQuery(++id, WireQuery(many, context_->spec().shape));
    }
  }

  const Scale scale_ = TheScale();
  std::string dir_;
  std::unique_ptr<RandomContext> context_;
  std::unique_ptr<cli::Process> server_;
  std::vector<int> silent_;
  std::vector<std::unique_ptr<WireSession>> idle_, slow_;
};

TEST_F(FloodTest, TheServerLivesAGoodClientIsAnsweredAndTheMemoryComesBack) {
  constexpr uint64_t kQueries = 12;
  std::vector<std::vector<CollectedHead>> truth;
  const auto good = NewChannel();
  {
    WireSession session(good);
    session.Open(context_->Opening());
    for (uint64_t i = 0; i < kQueries; ++i) truth.push_back(Answer(session, i + 2, i));
    for (const auto& answer : truth) ASSERT_FALSE(answer.empty());
  }
  std::atomic<bool> stop{false};
  std::atomic<int64_t> right{0}, wrong{0}, unanswered{0};
  std::thread client([&] {
    for (int64_t round = 0; !stop; ++round) {
      WireSession session(good);
      session.Open(context_->Opening());
      for (uint64_t i = 0; i < kQueries; ++i) {
        const std::vector<CollectedHead> answer = Answer(session, i + 2, i);
        if (answer.empty()) {
          ++unanswered;
        } else {
          ++(answer == truth[i] ? right : wrong);
        }
      }
    }
  });
  // Warm: what one client that asks in earnest leaves behind, and two trims of the heap after it.
  FetchEverything(good);
  cli::WaitUntil([&] { return right > 300; });
  absl::SleepFor(absl::Seconds(5));
  const int64_t before_kb = ServerKb("VmRSS");
  const auto step = [&](const char* what, const std::function<void()>& flood) {
    const absl::Time start = absl::Now();
    const int64_t answered = right;
    flood();
    std::cout << what << ": " << absl::Now() - start << ", " << Resident() << ", most "
              << ServerKb("VmHWM") / 1024 << " MiB, good answers " << right - answered << std::endl;
  };
  std::cout << "before, warm (" << right << " answers and every row fetched): " << Resident()
            << std::endl;
  step("silent connections", [&] { OpenSilentConnections(); });
  step("idle sessions", [&] { OpenIdleSessions(); });
  step("slow readers", [&] { OpenSlowReaders(); });
  step("large requests", [&] { SendLargeRequests(); });
  step("held", [&] { absl::SleepFor(scale_.hold); });
  EXPECT_TRUE(server_->Running()) << server_->err();
  idle_.clear();
  slow_.clear();
  for (const int fd : silent_) close(fd);
  silent_.clear();
  const absl::Time gone = absl::Now();
  const bool back = cli::WaitUntil([&] { return ServerKb("VmRSS") <= before_kb * 11 / 10; });
  std::cout << "after " << absl::Now() - gone << ": " << Resident() << "; good answers " << right
            << std::endl;
  EXPECT_TRUE(back) << before_kb << " kB before, " << ServerKb("VmRSS") << " kB after";
  stop = true;
  client.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(unanswered, 0);
  EXPECT_GT(right, 100);
  server_->Signal(SIGTERM);
  EXPECT_THAT(server_->Wait(), cli::Succeeds());
}

}  // namespace
}  // namespace carrel::kvstore
