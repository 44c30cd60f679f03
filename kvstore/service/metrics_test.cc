#include "common/metrics.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <sstream>
#include <thread>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_split.h"
#include "common/test_util.h"
#include "kvstore/engine/request_metrics.h"
#include "kvstore/engine/test_context.h"
#include "kvstore/service/listen_address.h"
#include "kvstore/service/metrics_listener.h"
#include "kvstore/service/metrics_text.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;

// A socket to the listener, or -1.
int Connect(const std::string& address) {
  const auto parsed = ParseListenAddress(address);
  if (!parsed.ok()) return -1;
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(parsed->port));
  inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof(to)) == 0) return fd;
  close(fd);
  return -1;
}

// What comes back until the end; empty if nothing does.
std::string Exchange(const std::string& address, const std::string& request) {
  const int fd = Connect(address);
  if (fd < 0) return "";
  absl::Cleanup close_fd = [fd] { close(fd); };
  for (size_t sent = 0; sent < request.size();) {
    const ssize_t n = send(fd, request.data() + sent, request.size() - sent, MSG_NOSIGNAL);
    if (n <= 0) break;
    sent += static_cast<size_t>(n);
  }
  std::string reply;
  char buffer[4096];
  for (ssize_t n; (n = recv(fd, buffer, sizeof(buffer), 0)) > 0;) reply.append(buffer, n);
  return reply;
}

std::string StatusLine(const std::string& reply) { return reply.substr(0, reply.find("\r\n")); }

TEST(MetricsTextTest, Families_ComeAsPrometheusReadsThem) {
  Histogram histogram;
  for (const double us : {3.0, 100.0, 1e9}) histogram.Add(us);
  const std::string text = MetricsText({{.name = "carrel_a_total",
                                         .help = "A.",
                                         .samples = {{.labels = {{"k", "x\"\n"}}, .value = 2}}},
                                        {.name = "carrel_b_seconds",
                                         .help = "B.",
                                         .type = MetricType::kHistogram,
                                         .samples = {{.buckets = histogram.Snapshot()}}}});
  EXPECT_THAT(text,
              testing::HasSubstr("# HELP carrel_a_total A.\n# TYPE carrel_a_total counter\n"));
  EXPECT_THAT(text, testing::HasSubstr("carrel_a_total{k=\"x\\\"\\n\"} 2"));
  EXPECT_THAT(text, testing::HasSubstr("carrel_b_seconds_bucket{le=\"4e-06\"} 1"));
  EXPECT_THAT(text, testing::HasSubstr("carrel_b_seconds_bucket{le=\"+Inf\"} 3"));
  EXPECT_THAT(text, testing::HasSubstr("carrel_b_seconds_count 3"));
}

TEST(MetricsTextTest, Process_TellsMemoryFaultsAndDescriptors) {
  const std::string text = MetricsText(ProcessMetrics());
  for (const char* line :
       {"carrel_resident_memory_bytes{kind=\"heap\"}", "process_open_fds ",
        "carrel_resident_memory_bytes{kind=\"mapped\"}", "carrel_page_faults_total{kind=\"major\"}",
        "carrel_build_info{version="}) {
    EXPECT_THAT(text, testing::HasSubstr(line));
  }
}

// The counters are the process's: what a query adds is a difference.
double Value(const std::string& text, const std::string& series) {
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    double value = 0;
    if (line.substr(0, series.size()) == series && line.substr(series.size(), 1) == " " &&
        absl::SimpleAtod(line.substr(series.size() + 1), &value)) {
      return value;
    }
  }
  return 0;
}

TEST(MetricsTextTest, AnsweredAndRefusedRequests_AreCounted) {
  const std::string folder = FreshTempDir();
  const RandomContext context({.index = {.kind = IndexKind::kHnsw, .ef_construction = 24}});
  const auto engine = Engine::Create({.max_sessions = 1}, MakeStore(folder, {&context}));
  CARREL_ASSERT_OK(engine);
  const auto session = (*engine)->OpenSession(context.Opening());
  CARREL_ASSERT_OK(session);
  const auto text = [&] {
    std::vector<MetricFamily> families = SnapshotMetrics();
    for (MetricFamily& family : EngineMetrics((*engine)->Statistics())) families.push_back(family);
    return MetricsText(families);
  };
  const std::string count = "carrel_request_searched_seconds_count{want=\"ids\",index=\"hnsw\"}";
  const std::string rows = "carrel_rows_selected_total{want=\"ids\",index=\"hnsw\"}";
  const std::string refused = "carrel_refusals_total{reason=\"sessions\"}";
  const std::string before = text();
  for (uint64_t id = 1; id <= 3; ++id) {
    CARREL_ASSERT_OK(Ask(**session, id,
                         QueryRequest{{.layer = Layer(1),
                                       .tokens = 1,
                                       .queries = context.Queries(1, id),
                                       .selection = select::TopK{7}}}));
  }
  EXPECT_THAT((*engine)->OpenSession(context.Opening()),
              StatusIs(StatusCode::kResourceExhausted, "max_sessions=1"));
  const std::string after = text();
  EXPECT_EQ(Value(after, count) - Value(before, count), 3);
  EXPECT_EQ(Value(after, rows) - Value(before, rows), 3 * 7 * 2);  // of two KV heads
  EXPECT_EQ(Value(after, refused) - Value(before, refused), 1);
  EXPECT_EQ(Value(after, "carrel_sessions"), 1);
  // An index that a manifest invents is counted under no name of its own.
  RequestLatencies latencies;
  CountAnswer(latencies, RequestKind::kIds, IndexSeries("evil{}\n"), absl::ZeroDuration(),
              absl::ZeroDuration(), 1);
  EXPECT_THAT(text(), testing::Not(testing::HasSubstr("evil")));
}

class MetricsListenerTest : public testing::Test {
 protected:
  void SetUp() override {
    auto listener = MetricsListener::Start("0", [] { return std::string("carrel_x 1\n"); });
    CARREL_ASSERT_OK(listener);
    listener_ = *std::move(listener);
  }
  std::string Ask(const std::string& request) { return Exchange(listener_->address(), request); }
  std::unique_ptr<MetricsListener> listener_;
};

TEST_F(MetricsListenerTest, Get_IsAnswered) {
  EXPECT_EQ(listener_->address().substr(0, 10), "127.0.0.1:");
  const std::string reply = Ask("GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_EQ(StatusLine(reply), "HTTP/1.1 200 OK");
  EXPECT_THAT(reply, testing::HasSubstr("text/plain; version=0.0.4"));
  EXPECT_THAT(reply, testing::EndsWith("\r\n\r\ncarrel_x 1\n"));
  const std::string head = Ask("HEAD /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_EQ(StatusLine(head), "HTTP/1.1 200 OK");
  EXPECT_THAT(head, testing::EndsWith("\r\n\r\n"));
}

TEST_F(MetricsListenerTest, EverythingElse_IsRefused) {
  EXPECT_THAT(StatusLine(Ask("GET / HTTP/1.1\r\nHost: x\r\n\r\n")), testing::HasSubstr("404"));
  EXPECT_THAT(StatusLine(Ask("GET /metrics/../etc HTTP/1.1\r\n\r\n")), testing::HasSubstr("404"));
  EXPECT_THAT(StatusLine(Ask("DELETE /metrics HTTP/1.1\r\n\r\n")), testing::HasSubstr("405"));
  EXPECT_THAT(StatusLine(Ask("\x16\x03\x01 tls?\r\n\r\n")), testing::HasSubstr("400"));
  const std::string huge = "GET /metrics HTTP/1.1\r\nX: " + std::string(20000, 'a') + "\r\n\r\n";
  EXPECT_THAT(Ask(huge), testing::Not(testing::HasSubstr("carrel_x")));
  EXPECT_THAT(StatusLine(Ask("GET /metrics HTTP/1.1\r\n\r\n")), testing::HasSubstr("200"));
}

TEST_F(MetricsListenerTest, SilentConnections_DoNotKeepOthersOut) {
  std::vector<int> silent;
  for (int i = 0; i < 15; ++i) silent.push_back(Connect(listener_->address()));
  EXPECT_THAT(StatusLine(Ask("GET /metrics HTTP/1.1\r\n\r\n")), testing::HasSubstr("200"));
  // At the limit the next one waits until one of them is given up.
  for (int i = 0; i < 5; ++i) silent.push_back(Connect(listener_->address()));
  EXPECT_THAT(StatusLine(Ask("GET /metrics HTTP/1.1\r\n\r\n")), testing::HasSubstr("200"));
  for (const int fd : silent) close(fd);
}

TEST_F(MetricsListenerTest, ManyAtOnce_AreAllAnswered) {
  std::vector<std::thread> threads;
  std::atomic<int> answered{0};
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < 20; ++j) {
        answered += StatusLine(Ask("GET /metrics HTTP/1.1\r\n\r\n")) == "HTTP/1.1 200 OK";
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(answered, 160);
}

TEST(MetricsListenerStartTest, BadAddresses_AreRefusedByName) {
  const auto none = [] { return std::string(); };
  EXPECT_THAT(MetricsListener::Start("unix:/tmp/x", none),
              StatusIs(StatusCode::kInvalidArgument, "unix:/tmp/x"));
  EXPECT_THAT(MetricsListener::Start("localhost:1", none),
              StatusIs(StatusCode::kInvalidArgument, "numeric"));
  EXPECT_THAT(MetricsListener::Start("70000", none),
              StatusIs(StatusCode::kInvalidArgument, "70000"));
  const auto first = MetricsListener::Start("0", none);
  CARREL_ASSERT_OK(first);
  EXPECT_THAT(MetricsListener::Start((*first)->address(), none),
              StatusIs(StatusCode::kFailedPrecondition, (*first)->address()));
}

}  // namespace
}  // namespace carrel::kvstore
