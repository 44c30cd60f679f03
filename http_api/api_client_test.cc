#include "http_api/api_client.h"

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/write.hpp>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/test_random.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace carrel::http_api {
namespace {

using boost::asio::ip::tcp;
using testing::HasSubstr;

// Answers one connection with these bytes, `times` times over, and closes.
class FakeServer {
 public:
  explicit FakeServer(std::string answer, int times = 1)
      : acceptor_(io_, tcp::endpoint(boost::asio::ip::address_v4::loopback(), 0)),
        thread_([this, answer = std::move(answer), times] {
          boost::system::error_code error;
          tcp::socket socket = acceptor_.accept(error);
          char buffer[4096];
          if (!error) asked_.assign(buffer, socket.read_some(boost::asio::buffer(buffer), error));
          for (int i = 0; i < times && !error; ++i) {
            boost::asio::write(socket, boost::asio::buffer(answer), error);
          }
        }) {}
  ~FakeServer() {
    boost::system::error_code error;
    tcp::socket(io_).connect(acceptor_.local_endpoint(), error);  // if nobody came
    thread_.join();
  }
  // What it was asked, once it has answered.
  const std::string& asked() const { return asked_; }
  ApiClient Client() const {
    return *ApiClient::Create(absl::StrCat("http://127.0.0.1:", acceptor_.local_endpoint().port()));
  }

 private:
  boost::asio::io_context io_;
  tcp::acceptor acceptor_;
  std::string asked_;
  std::thread thread_;
};

std::string Answer(const std::string& status, const std::string& body) {
  return absl::StrCat("HTTP/1.1 ", status, "\r\nContent-Length: ", body.size(), "\r\n\r\n", body);
}

absl::Status Streamed(const FakeServer& server, std::vector<std::string>* events = nullptr) {
  return server.Client().Stream("/v1/completions", "{}", [&](absl::string_view data) {
    if (events != nullptr) events->emplace_back(data);
    return absl::OkStatus();
  });
}

TEST(ApiClientTest, Errors_AreTheServersWords_WhateverItsJson) {
  const struct {
    std::string status, body;
    absl::StatusCode code;
    const char* words;
  } cases[] = {
      {"400 Bad", R"({"error": {"message": "no such thing"}})", absl::StatusCode::kInvalidArgument,
       "no such thing"},
      {"404 None", R"({"error": {"message": null}})", absl::StatusCode::kNotFound, "status 404"},
      {"503 Later", R"({"error": []})", absl::StatusCode::kUnavailable, "status 503"},
      {"507 Full", R"({"error": "full"})", absl::StatusCode::kInternal, "status 507"},
      {"415 What", R"([{"error": {"message": "x"}}])", absl::StatusCode::kInvalidArgument,
       "status 415"},
      {"500 Oh", std::string(60000, '['), absl::StatusCode::kInternal, "status 500"},
      {"500 Oh", R"({"error": {"message": ")" + std::string(50000, 'x') + "\"}}",
       absl::StatusCode::kInternal, "xxx"},
      {"500 Oh", std::string(1 << 20, 'x'), absl::StatusCode::kInternal, "status 500"},
      {"500 Oh", "", absl::StatusCode::kInternal, "status 500"},
  };
  for (const auto& c : cases) {
    const FakeServer server(Answer(c.status, c.body));
    const auto said = server.Client().Call("/v1/models", "");
    EXPECT_EQ(said.status().code(), c.code) << said.status();
    EXPECT_THAT(std::string(said.status().message()), HasSubstr(c.words));
    EXPECT_LT(said.status().message().size(), 5000u);
  }
}

TEST(ApiClientTest, ContextIsSaid_ToWhoChoosesAServerByIt) {
  const FakeServer server(Answer("202 Soon", "{}"));
  ApiClient client = server.Client();
  client.set_context("team a/report");
  EXPECT_TRUE(client.Call("/v1/contexts/x/warm", "{}").ok());
  EXPECT_THAT(server.asked(), HasSubstr("\r\ncarrel-context: team%20a%2Freport\r\n"));
  const FakeServer other(Answer("200 OK", "{}"));
  EXPECT_TRUE(other.Client().Call("/v1/models", "").ok());
  EXPECT_THAT(other.asked(), testing::Not(HasSubstr("carrel-context")));
}

TEST(ApiClientTest, AnAnswerWithoutEnd_IsGivenUp) {
  // 100 MiB of a body that says nothing of its length.
  const FakeServer endless(absl::StrCat("HTTP/1.1 200 OK\r\n\r\n", std::string(1 << 20, 'x')), 100);
  EXPECT_EQ(endless.Client().Call("/v1/models", "").status().code(), absl::StatusCode::kDataLoss);
  const FakeServer line(absl::StrCat("HTTP/1.1 200 OK\r\n\r\ndata: ", std::string(1 << 20, 'x')),
                        100);
  EXPECT_EQ(Streamed(line).code(), absl::StatusCode::kDataLoss);
  const FakeServer head(std::string(1 << 20, 'H'), 10);
  EXPECT_EQ(head.Client().Call("/v1/models", "").status().code(), absl::StatusCode::kDataLoss);
}

TEST(ApiClientTest, AStream_IsItsEvents_AndBreaksOffWithoutItsEnd) {
  std::vector<std::string> events;
  const FakeServer whole(
      "HTTP/1.1 200 OK\r\n\r\n: a comment\n\ndata: {\"a\": 1}\n\ndata: b\n\ndata: [DONE]\n\n");
  EXPECT_TRUE(Streamed(whole, &events).ok());
  EXPECT_THAT(events, testing::ElementsAre("{\"a\": 1}", "b"));
  const FakeServer cut("HTTP/1.1 200 OK\r\n\r\ndata: {\"a\": 1}\n\ndata: ");
  EXPECT_EQ(Streamed(cut).code(), absl::StatusCode::kDataLoss);
}

TEST(ApiClientTest, RandomAnswers_AreReadOrRefused) {
  std::mt19937_64 random(TestSeed());
  const std::string pieces[] = {"HTTP/1.1 200 OK\r\n",
                                "HTTP/1.1 500 No\r\n",
                                "Content-Length: 5\r\n",
                                "Content-Length: -5\r\n",
                                "Content-Length: 99999999999999999999\r\n",
                                "Transfer-Encoding: chunked\r\n",
                                "\r\n",
                                "5\r\nhello\r\n",
                                "ffffffffffffffff\r\n",
                                "0\r\n\r\n",
                                "data: {\"choices\": [{\"delta\": {\"content\": null}}]}\n\n",
                                "data: [DONE]\n\n",
                                "\xff\xfe",
                                "x"};
  for (int trial = 0; trial < 300; ++trial) {
    std::string answer = trial % 3 == 0 ? "" : pieces[random() % 2];
    for (uint64_t i = random() % 9; i > 0; --i) answer += pieces[random() % std::size(pieces)];
    const FakeServer server(answer);
    if (trial % 2 == 0) {
      (void)server.Client().Call("/v1/models", "");
    } else {
      (void)Streamed(server);
    }
  }
}

}  // namespace
}  // namespace carrel::http_api
