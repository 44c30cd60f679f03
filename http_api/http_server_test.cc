#include "http_api/http_server.h"

#include <atomic>
#include <thread>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "common/thread_pool.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "http_api/http_test_util.h"

namespace carrel::http_api {
namespace {

using testing::HasSubstr;

std::unique_ptr<HttpServer> Echo(HttpServerConfig config = {}) {
  config.listen = {"127.0.0.1:0"};
  auto server =
      HttpServer::Start(config, [](HttpRequest request, std::shared_ptr<HttpReply> reply) {
        reply->Send(200, "text/plain", request.method + " " + request.target + " " + request.body);
      });
  EXPECT_TRUE(server.ok()) << server.status();
  return *std::move(server);
}

TEST(HttpServerTest, Requests_OneAfterTheOther_OnOneConnection) {
  const auto server = Echo();
  TestClient client(server->addresses()[0]);
  for (int i = 0; i < 3; ++i) {
    client.Post("/x", std::string(static_cast<size_t>(i) * 1000, 'a'));
    EXPECT_EQ(client.Receive().body, "POST /x " + std::string(static_cast<size_t>(i) * 1000, 'a'));
  }
  client.Send("GET /1 HTTP/1.1\r\nHost: x\r\n\r\nGET /2 HTTP/1.1\r\nHost: x\r\n\r\n");  // at once
  EXPECT_EQ(client.Receive().body, "GET /1 ");
  EXPECT_EQ(client.Receive().body, "GET /2 ");
  client.Send("HEAD /h HTTP/1.1\r\nHost: x\r\n\r\nGET /2 HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_THAT(client.ReadUntil("\r\n\r\n"), HasSubstr("Content-Length: 8"));  // and no body
  EXPECT_EQ(client.Receive().body, "GET /2 ");
  client.Send("GET /3 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
  EXPECT_EQ(client.Receive().body, "GET /3 ");
  EXPECT_EQ(client.Read(1), "");
}

TEST(HttpServerTest, WhatIsNoRequest_OrTooLarge_IsRefused) {
  HttpServerConfig config;
  config.max_body_bytes = 1000;
  const auto server = Echo(config);
  const auto status = [&](const std::string& bytes) {
    TestClient client(server->addresses()[0]);
    client.Send(bytes);
    return client.Receive().status;
  };
  EXPECT_EQ(status("nonsense\r\n\r\n"), 400);
  EXPECT_EQ(status("POST / HTTP/1.1\r\nContent-Length: 1001\r\n\r\n"), 413);
  EXPECT_EQ(status("POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n"), 400);
  EXPECT_EQ(status("GET / HTTP/1.1\r\nX: " + std::string(20000, 'x') + "\r\n\r\n"), 431);
  EXPECT_EQ(status("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), 200);
}

TEST(HttpServerTest, Pieces_ArriveAsTheyAreWritten_AndADroppedReplyIsAnError) {
  absl::Notification first_seen;
  std::atomic<int> handled{0};
  HttpServerConfig config;
  config.listen = {"127.0.0.1:0"};
  std::thread writer;
  const auto server =
      HttpServer::Start(config, [&](HttpRequest request, std::shared_ptr<HttpReply> reply) {
        ++handled;
        if (request.target == "/drop") return;
        writer = std::thread([&, reply] {
          reply->Begin("text/event-stream");
          reply->Write("one");
          first_seen.WaitForNotification();
          reply->Write("two");
          reply->End();
        });
      });
  ASSERT_TRUE(server.ok());
  TestClient client((*server)->addresses()[0]);
  client.Post("/stream", "");
  EXPECT_THAT(client.ReadUntil("\r\n\r\n"), HasSubstr("Transfer-Encoding: chunked"));
  EXPECT_EQ(client.ReadUntil("one\r\n"), "3\r\none\r\n");
  first_seen.Notify();
  EXPECT_EQ(client.ReadUntil("0\r\n\r\n"), "3\r\ntwo\r\n0\r\n\r\n");
  writer.join();
  client.Post("/drop", "");
  EXPECT_EQ(client.Receive().status, 500);
  EXPECT_EQ(handled, 2);
}

TEST(HttpServerTest, AClientThatLeaves_IsNoticed) {
  std::shared_ptr<HttpReply> kept;
  absl::Notification asked;
  HttpServerConfig config;
  config.listen = {"127.0.0.1:0"};
  const auto server = HttpServer::Start(config, [&](HttpRequest, std::shared_ptr<HttpReply> reply) {
    kept = std::move(reply);
    asked.Notify();
  });
  ASSERT_TRUE(server.ok());
  TestClient client((*server)->addresses()[0]);
  client.Post("/", "");
  asked.WaitForNotification();
  EXPECT_FALSE(kept->gone());
  client.Close();
  const absl::Time until = absl::Now() + absl::Seconds(20);
  while (!kept->gone() && absl::Now() < until) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_TRUE(kept->gone());
  kept->Send(200, "text/plain", "too late");
  kept = nullptr;
  while ((*server)->connections() > 0 && absl::Now() < until) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ((*server)->connections(), 0);
}

// The end of a connection and the end of a write are noticed in any order.
TEST(HttpServerTest, ClientsThatLeaveInTheMiddleOfAStream_HarmNobody) {
  HttpServerConfig config;
  config.listen = {"127.0.0.1:0"};
  auto writers = std::make_unique<ThreadPool>(4);
  const auto server = HttpServer::Start(config, [&](HttpRequest, std::shared_ptr<HttpReply> reply) {
    const bool taken = writers->TrySubmit([reply] {
      reply->Begin("text/event-stream");
      for (int i = 0; i < 1000000 && !reply->gone(); ++i) {
        reply->Write("piece\n");
        if (i % 8 == 0) std::this_thread::yield();
      }
      reply->End();
    });
    EXPECT_TRUE(taken);
  });
  ASSERT_TRUE(server.ok());
  for (int round = 0; round < 400; ++round) {
    TestClient client((*server)->addresses()[0]);
    client.Post("/", "");
    EXPECT_THAT(client.ReadUntil("piece"), HasSubstr("200 OK"));
    if (round % 4 == 0) (void)client.Read(static_cast<size_t>(round) * 10);
    client.Close();
  }
  (*server)->Stop();
  writers = nullptr;  // replies may be used until the server is destroyed
}

TEST(HttpServerTest, Addresses_ThatCannotBe_AreRefused) {
  const auto start = [](const std::string& address) {
    HttpServerConfig config;
    config.listen = {address};
    return HttpServer::Start(config, [](HttpRequest, std::shared_ptr<HttpReply>) {}).status();
  };
  EXPECT_EQ(start("example.org:80").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(start("unix:/tmp/x").code(), absl::StatusCode::kInvalidArgument);
  const auto server = Echo();
  EXPECT_EQ(start(server->addresses()[0]).code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace carrel::http_api
