#include "http_api/http_server.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <stdexcept>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "common/test_util.h"
#include "common/thread_pool.h"
#include "http_api/http_test_util.h"

namespace carrel::http_api {
namespace {

using testing::HasSubstr;

HttpGate UpTo(int64_t bytes) {
  return [bytes](const HttpRequest&) { return HttpVerdict{.max_body_bytes = bytes}; };
}

std::unique_ptr<HttpServer> Echo(HttpServerConfig config = {}, HttpGate gate = UpTo(1 << 20)) {
  if (config.listen.empty()) config.listen = {"127.0.0.1:0"};
  auto server = HttpServer::Start(
      config, std::move(gate), [](HttpRequest request, std::shared_ptr<HttpReply> reply) {
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
  const auto server = Echo({}, UpTo(1000));
  const auto status = [&](const std::string& bytes) {
    TestClient client(server->addresses()[0]);
    client.Send(bytes);
    return client.Receive().status;
  };
  EXPECT_EQ(status("nonsense\r\n\r\n"), 400);
  EXPECT_EQ(status("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1001\r\n\r\n"), 413);
  EXPECT_EQ(status("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n"), 400);
  EXPECT_EQ(status("GET / HTTP/1.1\r\nHost: x\r\nX: " + std::string(20000, 'x') + "\r\n\r\n"), 431);
  EXPECT_EQ(status("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), 200);
}

TEST(HttpServerTest, Pieces_ArriveAsTheyAreWritten_AndADroppedReplyIsAnError) {
  absl::Notification first_seen;
  std::atomic<int> handled{0};
  HttpServerConfig config;
  config.listen = {"127.0.0.1:0"};
  std::thread writer;
  const auto server = HttpServer::Start(config, UpTo(1 << 20),
                                        [&](HttpRequest request, std::shared_ptr<HttpReply> reply) {
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
  const auto server =
      HttpServer::Start(config, UpTo(1 << 20), [&](HttpRequest, std::shared_ptr<HttpReply> reply) {
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
  while ((*server)->counters().connections > 0 && absl::Now() < until)
    absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ((*server)->counters().connections, 0);
}

// The end of a connection and the end of a write are noticed in any order.
TEST(HttpServerTest, ClientsThatLeaveInTheMiddleOfAStream_HarmNobody) {
  HttpServerConfig config;
  config.listen = {"127.0.0.1:0"};
  auto writers = std::make_unique<ThreadPool>(4);
  const auto server =
      HttpServer::Start(config, UpTo(1 << 20), [&](HttpRequest, std::shared_ptr<HttpReply> reply) {
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

// Whoever would answer takes a client of a server that stops for gone, and drops its request.
TEST(HttpServerTest, RequestsThatAreDroppedAsItStops_AreNoInternalErrors) {
  HttpServerConfig config;
  config.listen = {"127.0.0.1:0"};
  for (int trial = 0; trial < 50; ++trial) {
    std::vector<std::thread> answering;
    std::atomic<int> asked{0};
    auto server =
        HttpServer::Start(config, UpTo(1000), [&](HttpRequest, std::shared_ptr<HttpReply> reply) {
          answering.emplace_back([reply]() mutable {
            while (!reply->gone()) std::this_thread::yield();
            reply = nullptr;
          });
          ++asked;
        });
    ASSERT_TRUE(server.ok());
    std::vector<std::unique_ptr<TestClient>> clients;
    for (int i = 0; i < 3; ++i) {
      clients.push_back(std::make_unique<TestClient>((*server)->addresses()[0]));
      clients.back()->Post("/", "");
    }
    while (asked < 3) absl::SleepFor(absl::Milliseconds(1));
    (*server)->Stop();
    for (std::thread& thread : answering) thread.join();
    server->reset();
    for (const auto& client : clients) {
      EXPECT_THAT(client->Read(1 << 20), Not(HasSubstr("HTTP/1.1 500"))) << trial;
    }
  }
}

// --- what clients do that is allowed

std::string Answer(HttpServer& server, const std::string& bytes) {
  TestClient client(server.addresses()[0]);
  client.Send(bytes);
  client.CloseSending();
  return client.Read(1 << 20);
}

TEST(HttpServerTest, AClientThatEndsItsSendingSide_HasItsAnswer) {
  HttpServerConfig config;
  config.listen = {"127.0.0.1:0"};
  std::vector<std::thread> later;
  const auto server =
      HttpServer::Start(config, UpTo(1000), [&](HttpRequest, std::shared_ptr<HttpReply> reply) {
        later.emplace_back([reply] {
          absl::SleepFor(absl::Milliseconds(300));
          reply->Send(200, "text/plain", "late");
        });
      });
  ASSERT_TRUE(server.ok());
  EXPECT_THAT(Answer(**server, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"), HasSubstr("late"));
  EXPECT_THAT(Answer(**server, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab"),
              HasSubstr("late"));
  for (std::thread& thread : later) thread.join();
}

TEST(HttpServerTest, OfAStream_AClientThatIsGoneIsNoticed_OneThatReadsIsNot) {
  HttpServerConfig config;
  config.listen = {"127.0.0.1:0"};
  std::shared_ptr<HttpReply> kept;
  absl::Notification first, second;
  std::atomic<int> asked{0};
  const auto server =
      HttpServer::Start(config, UpTo(1000), [&](HttpRequest, std::shared_ptr<HttpReply> reply) {
        kept = reply;
        reply->Begin("text/event-stream");
        reply->Write("data: 1\n\n");
        (++asked == 1 ? first : second).Notify();
      });
  ASSERT_TRUE(server.ok());
  TestClient reads((*server)->addresses()[0]);
  reads.Send("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
  reads.CloseSending();
  first.WaitForNotification();
  EXPECT_THAT(reads.ReadUntil("data: 1\n\n"), HasSubstr("200 OK"));
  absl::SleepFor(absl::Milliseconds(500));
  EXPECT_FALSE(kept->gone());
  kept->Write("data: 2\n\n");
  EXPECT_THAT(reads.ReadUntil("data: 2\n\n"), HasSubstr("data: 2"));
  kept->End();
  TestClient leaves((*server)->addresses()[0]);
  leaves.Send("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
  second.WaitForNotification();
  leaves.Close();
  const absl::Time until = absl::Now() + absl::Seconds(20);
  while (!kept->gone() && absl::Now() < until) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_TRUE(kept->gone());
}

TEST(HttpServerTest, Continue_IsSaidWhereTheBodyIsWanted_AndARefusalWhereNot) {
  const auto server = Echo({}, [](const HttpRequest& head) {
    HttpVerdict verdict{.max_body_bytes = 1000};
    if (head.authorization.empty()) {
      verdict.status = 401;
      verdict.body = "who?";
      verdict.content_type = "text/plain";
      verdict.fields = {{"WWW-Authenticate", "Bearer"}};
    }
    return verdict;
  });
  TestClient client(server->addresses()[0]);
  client.Send(
      "POST /x HTTP/1.1\r\nHost: x\r\nAuthorization: a\r\nContent-Length: 2\r\n"
      "Expect: 100-continue\r\n\r\n");
  EXPECT_EQ(client.ReadUntil("\r\n\r\n"), "HTTP/1.1 100 Continue\r\n\r\n");
  client.Send("ab");
  EXPECT_EQ(client.Receive().body, "POST /x ab");
  TestClient stranger(server->addresses()[0]);
  stranger.Send(
      "POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: 999999999\r\nExpect: 100-continue\r\n\r\n");
  const auto refused = stranger.Receive();
  EXPECT_EQ(refused.status, 401);
  EXPECT_THAT(refused.headers, HasSubstr("WWW-Authenticate: Bearer"));
  EXPECT_EQ(stranger.Read(1), "");  // and it is over: what it would send is not read
  EXPECT_EQ(server->counters().held_bytes, 0);
}

TEST(HttpServerTest, OldClients_HaveNoChunks_AndAStreamToItsEnd) {
  HttpServerConfig config;
  config.listen = {"127.0.0.1:0"};
  const auto server =
      HttpServer::Start(config, UpTo(1000), [&](HttpRequest, std::shared_ptr<HttpReply> reply) {
        reply->Begin("text/event-stream");
        reply->Write("data: 1\n\n");
        reply->Write("data: 2\n\n");
        reply->End();
      });
  ASSERT_TRUE(server.ok());
  TestClient client((*server)->addresses()[0]);
  client.Send("POST / HTTP/1.0\r\nContent-Length: 0\r\n\r\n");
  const std::string all = client.Read(1 << 20);
  EXPECT_THAT(all, testing::EndsWith("\r\n\r\ndata: 1\n\ndata: 2\n\n"));
  EXPECT_THAT(all, testing::Not(HasSubstr("chunked")));
}

TEST(HttpServerTest, WhatRfc9112Says_OfHostsCodingsAndEmptyLines) {
  const auto server = Echo();
  const auto status = [&](const std::string& bytes) {
    TestClient client(server->addresses()[0]);
    client.Send(bytes);
    return client.Receive().status;
  };
  EXPECT_EQ(status("\r\n\r\nGET / HTTP/1.1\r\nHost: x\r\n\r\n"), 200);
  EXPECT_EQ(status("GET http://other/ HTTP/1.1\r\nHost: x\r\n\r\n"), 200);
  EXPECT_EQ(status("GET / HTTP/1.1\r\n\r\n"), 400);
  EXPECT_EQ(status("GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n"), 400);
  EXPECT_EQ(status("GET / HTTP/1.0\r\n\r\n"), 200);
  EXPECT_EQ(
      status("POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"),
      501);
  EXPECT_EQ(status("POST / HTTP/1.1\r\nHost: x\r\nExpect: a-miracle\r\nContent-Length: 1\r\n\r\na"),
            417);
  EXPECT_EQ(status("POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
                   "3\r\nabc\r\n0\r\n\r\n"),
            200);
  EXPECT_EQ(status("GET x HTTP/1.1\r\nHost: x\r\n\r\n"), 400);
}

// --- what clients do that is not

TEST(HttpServerTest, ChunksThatDoNotEnd_AreRefused_AndTakeNoMemory) {
  const auto server = Echo({}, UpTo(1000));
  const auto status = [&](const std::string& head, const std::string& piece) {
    TestClient client(server->addresses()[0]);
    client.Send("POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + head);
    for (int i = 0; i < 40; ++i) {
      if (!client.TrySend(piece)) break;
    }
    return client.Receive().status;
  };
  const std::string much(16 << 10, 'x');
  EXPECT_EQ(status("1;", much), 431);                  // an extension without end
  EXPECT_EQ(status("1\r\na\r\n0\r\nX: ", much), 431);  // trailers without end
  EXPECT_EQ(status("", "100\r\n" + std::string(256, 'x') + "\r\n"), 413);
  EXPECT_EQ(status("fffffffffffffffff\r\n", "x"), 400);
}

TEST(HttpServerTest, BodiesBeyondTheBudget_AreRefusedAndSmallOnesGoOn) {
  HttpServerConfig config;
  config.budget_bytes = 8 << 20;
  const auto server = Echo(config, UpTo(64 << 20));
  std::vector<std::unique_ptr<TestClient>> greedy;
  const std::string megabyte(1 << 20, 'x');
  for (int i = 0; i < 8; ++i) {  // never to its end
    greedy.push_back(std::make_unique<TestClient>(server->addresses()[0]));
    greedy.back()->Send("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 60000000\r\n\r\n");
    for (int part = 0; part < 3 && greedy.back()->TrySend(megabyte); ++part) {
    }
  }
  for (int i = 0; i < 20; ++i) {
    TestClient good(server->addresses()[0]);
    good.Post("/", std::string(10000, 'a'));
    EXPECT_EQ(good.Receive().status, 200);
  }
  EXPECT_GT(server->counters().refused_bytes, 0);
  EXPECT_LE(server->counters().held_bytes, 8 << 20);
  greedy.clear();
  const absl::Time until = absl::Now() + absl::Seconds(20);
  while (server->counters().held_bytes > 0 && absl::Now() < until)
    absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(server->counters().held_bytes, 0);
}

TEST(HttpServerTest, AStreamThatNobodyReads_IsLeft) {
  HttpServerConfig config;
  config.listen = {"127.0.0.1:0"};
  std::thread writer;
  std::atomic<int64_t> written{0};
  absl::Notification left;
  const auto server =
      HttpServer::Start(config, UpTo(1000), [&](HttpRequest, std::shared_ptr<HttpReply> reply) {
        writer = std::thread([&, reply] {
          reply->Begin("text/event-stream");
          const std::string piece(64 << 10, 'x');
          for (; !reply->gone() && written < (int64_t{1} << 30); written += 64 << 10)
            reply->Write(piece);
          left.Notify();
        });
      });
  ASSERT_TRUE(server.ok());
  TestClient client((*server)->addresses()[0]);
  client.Send("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
  left.WaitForNotification();
  writer.join();
  EXPECT_LT(written, int64_t{64} << 20);
  EXPECT_EQ((*server)->counters().slow, 1);
}

TEST(HttpServerTest, WhenAllAreTaken_TheOneThatKeepsTheServerWaitingGoes) {
  HttpServerConfig config;
  config.max_connections = 8;
  const auto server = Echo(config);
  std::vector<std::unique_ptr<TestClient>> hostile;
  for (int i = 0; i < 8; ++i) {
    hostile.push_back(std::make_unique<TestClient>(server->addresses()[0]));
    hostile.back()->Send("GET / HTTP/1.1\r\nX: ");  // and no more
  }
  const absl::Time until = absl::Now() + absl::Seconds(20);
  while (server->counters().connections < 8 && absl::Now() < until)
    absl::SleepFor(absl::Milliseconds(1));
  for (int i = 0; i < 20; ++i) {
    TestClient good(server->addresses()[0]);
    good.Post("/", "x");
    EXPECT_EQ(good.Receive().status, 200) << i;
  }
  EXPECT_GT(server->counters().evicted, 0);
}

// They wait for as long as a model takes: none of them goes for a newcomer, so they may not have all connections.
TEST(HttpServerTest, AnswersThatTakeLong_LeaveConnectionsToOthers) {
  HttpServerConfig config;
  config.listen = {"127.0.0.1:0"};
  config.max_connections = 8;
  absl::Mutex mu;
  std::vector<std::shared_ptr<HttpReply>> kept;
  const auto server = HttpServer::Start(
      config,
      [](const HttpRequest& head) {
        return HttpVerdict{.max_body_bytes = 1000, .may_take_long = head.target != "/"};
      },
      [&](HttpRequest request, std::shared_ptr<HttpReply> reply) {
        if (request.target != "/long") return reply->Send(200, "text/plain", "at once");
        absl::MutexLock lock(&mu);
        kept.push_back(std::move(reply));
      });
  ASSERT_TRUE(server.ok());
  const auto waiting = [&](size_t count) {
    const auto as_many = [&] { return kept.size() == count; };
    absl::MutexLock lock(&mu);
    return mu.AwaitWithTimeout(absl::Condition(&as_many), absl::Seconds(20));
  };
  std::vector<std::unique_ptr<TestClient>> clients;
  for (int round = 0; round < 2; ++round) {
    for (int i = 0; i < 7; ++i) {
      if (round == 0) clients.push_back(std::make_unique<TestClient>((*server)->addresses()[0]));
      clients[static_cast<size_t>(i)]->Post("/long", "");
    }
    ASSERT_TRUE(waiting(7)) << round;
    for (int i = 0; i < 20; ++i) {
      while ((*server)->counters().connections > 7) absl::SleepFor(absl::Milliseconds(1));
      TestClient late((*server)->addresses()[0]);
      late.Post("/long", "");
      const auto refused = late.Receive();
      EXPECT_EQ(refused.status, 503);
      EXPECT_THAT(refused.headers, HasSubstr("Retry-After: 1"));
      late.Post("/", "");  // on the same connection
      EXPECT_EQ(late.Receive().body, "at once");
    }
    std::vector<std::shared_ptr<HttpReply>> replies;
    {
      absl::MutexLock lock(&mu);
      replies.swap(kept);
    }
    for (const auto& reply : replies) reply->Send(200, "text/plain", "late");
    for (const auto& client : clients) EXPECT_EQ(client->Receive().body, "late");
  }
  // Those that leave give their places back.
  for (const auto& client : clients) client->Post("/long", "");
  ASSERT_TRUE(waiting(7));
  clients.clear();
  const absl::Time until = absl::Now() + absl::Seconds(20);
  int status = 503;
  // 0: closed at once, while the place of the one before is not free yet.
  while (status != 200 && absl::Now() < until) {
    TestClient next((*server)->addresses()[0]);
    next.Post("/long-and-answered", "");
    status = next.Receive().status;
  }
  EXPECT_EQ(status, 200);
  absl::MutexLock lock(&mu);
  kept.clear();
}

// A refused client that goes on sending holds its connection for a moment, however little it sends at a time.
TEST(HttpServerTest, WhoWasRefusedAndGoesOnSending_IsLeft) {
  const auto server = Echo({}, UpTo(1000));
  TestClient drips(server->addresses()[0]);
  drips.Send("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n");
  EXPECT_EQ(drips.Receive().status, 413);
  const absl::Time until = absl::Now() + absl::Seconds(20);
  while (server->counters().connections > 0 && absl::Now() < until) {
    if (!drips.TrySend("x")) break;
    absl::SleepFor(absl::Milliseconds(50));
  }
  while (server->counters().connections > 0 && absl::Now() < until)
    absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(server->counters().connections, 0);
}

// Slower than the server's patience as a whole, not in its parts.
TEST(HttpServerTest, ASlowClient_BringsItsBodyAndHasItsReply) {
  HttpServerConfig config;
  config.patience = absl::Milliseconds(500);
  const auto server = Echo(config);
  TestClient brings(server->addresses()[0]);
  const std::string piece(16 << 10, 'x');
  brings.Send("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 81920\r\n\r\n" + piece);
  for (int i = 1; i < 5; ++i) {
    absl::SleepFor(absl::Milliseconds(300));
    ASSERT_TRUE(brings.TrySend(piece)) << i;
  }
  EXPECT_EQ(brings.Receive().body.size(), 5 * piece.size() + 7);
  // One that says no more is cut.
  TestClient stops(server->addresses()[0]);
  stops.Send("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 81920\r\n\r\nx");
  EXPECT_EQ(stops.Read(1), "");

  constexpr size_t kLarge = 16 << 20;  // beyond what the kernel holds for a client
  config.patience = absl::Seconds(1);
  config.listen = {"127.0.0.1:0"};
  const auto large =
      HttpServer::Start(config, UpTo(1000), [](HttpRequest, std::shared_ptr<HttpReply> reply) {
        reply->Send(200, "text/plain", std::string(kLarge, 'x'));
      });
  ASSERT_TRUE(large.ok());
  TestClient reads((*large)->addresses()[0]);
  reads.Send("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
  EXPECT_THAT(reads.ReadUntil("\r\n\r\n"), HasSubstr("200 OK"));
  size_t got = 0;
  for (size_t bytes = 1; bytes > 0 && got < kLarge; got += bytes) {
    bytes = reads.Read(std::min<size_t>(128 << 10, kLarge - got)).size();
    absl::SleepFor(absl::Milliseconds(25));
  }
  EXPECT_EQ(got, kLarge);
}

// Bytes that nobody asked for (a line end behind a body, the next request) do not hide that it left.
TEST(HttpServerTest, AClientThatSendsMoreAndLeaves_IsNoticed) {
  HttpServerConfig config;
  config.listen = {"127.0.0.1:0"};
  std::shared_ptr<HttpReply> kept;
  absl::Notification asked;
  const auto server =
      HttpServer::Start(config, UpTo(1000), [&](HttpRequest, std::shared_ptr<HttpReply> reply) {
        kept = std::move(reply);
        asked.Notify();
      });
  ASSERT_TRUE(server.ok());
  TestClient client((*server)->addresses()[0]);
  client.Send("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nab");
  asked.WaitForNotification();
  client.Send("\r\n");
  absl::SleepFor(absl::Milliseconds(300));
  EXPECT_FALSE(kept->gone());
  client.Close();
  const absl::Time until = absl::Now() + absl::Seconds(20);
  while (!kept->gone() && absl::Now() < until) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_TRUE(kept->gone());
  kept = nullptr;
}

// A reply that cannot be made (its header is beyond what a header may be) is no reason to wait for ever.
TEST(HttpServerTest, AReplyThatThrows_EndsItsConnection) {
  HttpServerConfig config;
  config.listen = {"127.0.0.1:0"};
  const auto server = HttpServer::Start(
      config, UpTo(1000), [](HttpRequest request, std::shared_ptr<HttpReply> reply) {
        const bool long_header = request.target == "/long-header";
        reply->Send(200, "text/plain", "well",
                    {{"X-More", std::string(long_header ? 100000 : 10, 'x')}});
      });
  ASSERT_TRUE(server.ok());
  for (const char* target : {"/long-header", "/", "/long-header", "/"}) {
    TestClient client((*server)->addresses()[0]);
    client.Post(target, "");
    const auto got = client.Receive();
    EXPECT_EQ(got.body, std::string(target) == "/" ? "well" : "") << target;
  }
}

TEST(HttpServerTest, WhatGateOrHandlerThrow_IsThatRequestsError) {
  HttpServerConfig config;
  config.listen = {"127.0.0.1:0"};
  const auto server = HttpServer::Start(
      config,
      [](const HttpRequest& head) -> HttpVerdict {
        if (head.target == "/gate") throw std::runtime_error("planted");
        return {.max_body_bytes = 1000};
      },
      [](HttpRequest request, std::shared_ptr<HttpReply> reply) {
        if (request.target == "/handler") throw std::runtime_error("planted");
        reply->Send(200, "text/plain", "well");
      });
  ASSERT_TRUE(server.ok());
  for (const char* target : {"/gate", "/handler", "/", "/handler", "/"}) {
    TestClient client((*server)->addresses()[0]);
    client.Post(target, "");
    const auto got = client.Receive();
    EXPECT_EQ(got.status, std::string(target) == "/" ? 200 : 500) << target;
  }
}

TEST(HttpServerTest, AReplyThatOutlivesTheServer_SaysNothing) {
  HttpServerConfig config;
  config.listen = {"127.0.0.1:0"};
  std::shared_ptr<HttpReply> kept;
  absl::Notification asked;
  auto server =
      HttpServer::Start(config, UpTo(1000), [&](HttpRequest, std::shared_ptr<HttpReply> reply) {
        kept = std::move(reply);
        asked.Notify();
      });
  ASSERT_TRUE(server.ok()) << server.status();
  TestClient client((*server)->addresses()[0]);
  client.Send("GET / HTTP/1.1\r\nHost: x\r\n\r\n");
  asked.WaitForNotification();
  server->reset();
  EXPECT_TRUE(kept->gone());
  kept->Begin("text/plain");
  kept->Write("late");
  kept->End();
  kept.reset();
}

TEST(HttpServerTest, AUnixSocket_KnowsItsUser) {
  const std::string path = SocketPath();
  HttpServerConfig config;
  config.listen = {"unix:" + path};
  std::atomic<int64_t> uid = -1;
  const auto server = HttpServer::Start(
      config, UpTo(1000), [&](HttpRequest request, std::shared_ptr<HttpReply> reply) {
        uid = request.uid.value_or(-1);
        reply->Send(200, "text/plain", request.local ? "local" : "far");
      });
  ASSERT_TRUE(server.ok()) << server.status();
  UnixClient client(path);
  client.Send("GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
  EXPECT_THAT(client.ReadAll(), testing::EndsWith("local"));
  EXPECT_EQ(uid, getuid());
}

TEST(HttpServerTest, Addresses_ThatCannotBe_AreRefused) {
  const auto start = [](const std::string& address) {
    HttpServerConfig config;
    config.listen = {address};
    return HttpServer::Start(config, UpTo(1 << 20), [](HttpRequest, std::shared_ptr<HttpReply>) {})
        .status();
  };
  EXPECT_EQ(start("nonsense").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(start("127.0.0.1:99999").code(), absl::StatusCode::kInvalidArgument);
  const auto server = Echo();
  EXPECT_EQ(start(server->addresses()[0]).code(), absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace carrel::http_api
