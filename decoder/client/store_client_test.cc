#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <future>
#include <thread>

#include "carrel/v1/retrieval.grpc.pb.h"
#include "common/routing.h"
#include "common/test_util.h"
#include "decoder/client/store_client_grpc.h"

extern char** environ;

namespace carrel::decoder {
namespace {

using absl::StatusCode;
using retrieval::RequestId;
using Stream = grpc::ServerReaderWriter<v1::SessionReply, v1::SessionRequest>;

const absl::Duration kLong = absl::Seconds(60);

// A store that does what a test says.
class ScriptedStore : public v1::RetrievalService::Service {
 public:
  using Script = std::function<grpc::Status(Stream*)>;

  explicit ScriptedStore(Script script) : script_(std::move(script)) {
    grpc::ServerBuilder builder;
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
  }
  ~ScriptedStore() override { server_->Shutdown(std::chrono::system_clock::now()); }

  absl::StatusOr<std::unique_ptr<retrieval::Session>> Client(
      absl::Duration deadline = kLong, absl::Duration request_timeout = absl::InfiniteDuration(),
      const std::string& context = "") {
    return OpenStoreChannel(server_->InProcessChannel({}), deadline, "", request_timeout, context);
  }
  // What the last session presented as its context; empty: nothing.
  std::string context() const { return context_; }
  std::string header() const { return header_; }  // the same, as routers hash it
  grpc::Status Session(grpc::ServerContext* call, Stream* stream) override {
    const auto found = call->client_metadata().find(kContextMetadata);
    if (found != call->client_metadata().end()) {
      context_.assign(found->second.data(), found->second.size());
    }
    const auto header = call->client_metadata().find(kContextHeader);
    if (header != call->client_metadata().end()) {
      header_.assign(header->second.data(), header->second.size());
    }
    return script_(stream);
  }

 private:
  std::string context_, header_;
  const Script script_;
  std::unique_ptr<grpc::Server> server_;
};

v1::SessionRequest Read(Stream* stream) {
  v1::SessionRequest request;
  stream->Read(&request);
  return request;
}

v1::SessionReply ReplyTo(uint64_t id, bool last = true, int64_t rows = 0) {
  v1::SessionReply reply;
  reply.set_request_id(id);
  reply.set_last(last);
  reply.mutable_query()->mutable_statistics()->set_rows(rows);
  return reply;
}

void AcceptOpen(Stream* stream) {
  stream->SendInitialMetadata();
  const v1::SessionRequest request = Read(stream);
  v1::SessionReply reply;
  reply.set_request_id(request.request_id());
  reply.set_last(true);
  reply.mutable_open()->set_tokens(123);
  stream->Write(reply);
}

retrieval::OpenRequest MakeOpen() { return {.context = "report"}; }

retrieval::Query MakeQuery(int32_t layer) {
  retrieval::Query query;
  query.layer = Layer(layer);
  return query;
}

TEST(StoreClient, RepliesInAnyOrderAndInParts_ReachTheirRequests) {
  ScriptedStore store([](Stream* stream) {
    AcceptOpen(stream);
    const uint64_t first = Read(stream).request_id(), second = Read(stream).request_id();
    stream->Write(ReplyTo(second, false, 20));
    stream->Write(ReplyTo(first, true, 10));
    stream->Write(ReplyTo(second, true, 21));
    return grpc::Status::OK;
  });
  auto client = store.Client();
  CARREL_ASSERT_OK(client);
  const auto opened = (*client)->Open(MakeOpen());
  CARREL_ASSERT_OK(opened);
  EXPECT_EQ(opened->context.tokens, 123);
  const auto first = (*client)->Send(MakeQuery(1)), second = (*client)->Send(retrieval::Fetch());
  CARREL_ASSERT_OK(first);
  CARREL_ASSERT_OK(second);
  const auto next = [&](RequestId id) {
    const auto reply = (*client)->Next(id);
    EXPECT_TRUE(reply.ok()) << reply.status();
    return reply.ok() ? reply->statistics.rows : 0;
  };
  EXPECT_EQ(next(*first), 10);
  EXPECT_EQ(next(*second), 20);
  EXPECT_EQ(next(*second), 21);
  EXPECT_THAT((*client)->Next(*second), StatusIs(StatusCode::kFailedPrecondition, "read wholly"));
  EXPECT_GT((*client)->bytes_sent(), 0);
  EXPECT_GT((*client)->bytes_received(), 0);
}

TEST(StoreClient, ErrorReply_KeepsItsCodeAndSaysWhatWasAsked) {
  ScriptedStore store([](Stream* stream) {
    AcceptOpen(stream);
    v1::SessionReply reply;
    reply.set_request_id(Read(stream).request_id());
    reply.set_last(true);
    reply.mutable_error()->set_code(static_cast<int>(StatusCode::kDataLoss));
    reply.mutable_error()->set_message("segment 3 is damaged");
    stream->Write(reply);
    stream->Write(ReplyTo(Read(stream).request_id()));
    return grpc::Status::OK;
  });
  auto client = store.Client();
  CARREL_ASSERT_OK(client);
  CARREL_ASSERT_OK((*client)->Open(MakeOpen()));
  EXPECT_THAT((*client)->Next(*(*client)->Send(MakeQuery(7))),
              StatusIs(StatusCode::kDataLoss, "query layer 7: segment 3 is damaged"));
  CARREL_EXPECT_OK((*client)->Next(*(*client)->Send(MakeQuery(7))));
}

TEST(StoreClient, LateReply_IsGivenUpAndTheSessionGoesOn) {
  std::vector<int64_t> told;  // read once the stream has ended
  ScriptedStore store([&](Stream* stream) {
    AcceptOpen(stream);
    const v1::SessionRequest late = Read(stream);
    const v1::SessionRequest next = Read(stream);
    told = {late.timeout_us(), next.timeout_us()};
    stream->Write(ReplyTo(late.request_id()));
    stream->Write(ReplyTo(next.request_id(), true, 5));
    return grpc::Status::OK;
  });
  auto client = store.Client(kLong, absl::Milliseconds(20));
  CARREL_ASSERT_OK(client);
  CARREL_ASSERT_OK((*client)->Open(MakeOpen()));
  EXPECT_THAT((*client)->Next(*(*client)->Send(MakeQuery(7))),
              StatusIs(StatusCode::kDeadlineExceeded, "query layer 7: the store says nothing"));
  EXPECT_FALSE((*client)->broken());
  const auto reply = (*client)->Next(*(*client)->Send(MakeQuery(8)));
  CARREL_ASSERT_OK(reply);
  EXPECT_EQ(reply->statistics.rows, 5);
  client->reset();
  EXPECT_THAT(told, testing::ElementsAre(20'000, 20'000));
}

// By it who stands between chooses a server; names may have any characters.
TEST(StoreClient, TheContext_IsInTheMetadataOfTheCall) {
  for (const std::string name : {"", "report",
                                 "B\xc3\xbc"
                                 "cher, erster Teil"}) {
    ScriptedStore store([](Stream* stream) {
      AcceptOpen(stream);
      return grpc::Status::OK;
    });
    auto client = store.Client(kLong, absl::InfiniteDuration(), name);
    CARREL_ASSERT_OK(client);
    CARREL_ASSERT_OK((*client)->Open(MakeOpen()));
    EXPECT_EQ(store.context(), name);
    EXPECT_EQ(store.header(), ContextHeaderValue(name));
  }
}

// Each word of it is heard: the store is not late.
TEST(StoreClient, AStoreThatBringsTheContextFirst_IsWaitedFor) {
  ScriptedStore store([](Stream* stream) {
    stream->SendInitialMetadata();
    const v1::SessionRequest request = Read(stream);
    v1::SessionReply reply;
    reply.set_request_id(request.request_id());
    for (int i = 0; i < 8; ++i) {
      absl::SleepFor(absl::Milliseconds(500));
      reply.mutable_fetching()->set_bytes(i);
      reply.mutable_fetching()->set_of(8);
      stream->Write(reply);
    }
    reply.set_last(true);
    reply.mutable_open()->set_tokens(123);
    stream->Write(reply);
    return grpc::Status::OK;
  });
  auto client = store.Client(kLong, absl::Milliseconds(1500));
  CARREL_ASSERT_OK(client);
  const auto opened = (*client)->Open(MakeOpen());
  CARREL_ASSERT_OK(opened);
  EXPECT_EQ(opened->context.tokens, 123);
}

TEST(StoreClient, RefusedOpen_KeepsItsCode) {
  ScriptedStore store([](Stream* stream) {
    stream->SendInitialMetadata();
    Read(stream);
    return grpc::Status(grpc::StatusCode::FAILED_PRECONDITION, "fingerprint mismatch: rope_theta");
  });
  auto client = store.Client();
  CARREL_ASSERT_OK(client);
  EXPECT_THAT((*client)->Open(MakeOpen()),
              StatusIs(StatusCode::kFailedPrecondition,
                       "open context report: fingerprint mismatch: rope_theta"));
  EXPECT_THAT((*client)->Send(MakeQuery(0)),
              StatusIs(StatusCode::kFailedPrecondition, "fingerprint mismatch"));
}

// A server that stops while a session opens; whoever waits for a store tries again.
TEST(StoreClient, OpenThatAStoppingServerCancels_IsUnavailable) {
  ScriptedStore store([](Stream* stream) {
    stream->SendInitialMetadata();
    Read(stream);
    return grpc::Status::CANCELLED;
  });
  auto client = store.Client();
  CARREL_ASSERT_OK(client);
  EXPECT_THAT((*client)->Open(MakeOpen()), StatusIs(StatusCode::kUnavailable, "the store is gone"));
}

TEST(StoreClient, StreamThatEnds_FailsWhatIsPendingAndWhatComesAsUnavailable) {
  for (const grpc::Status& end :
       {grpc::Status::OK, grpc::Status(grpc::StatusCode::UNAVAILABLE, "shutting down"),
        grpc::Status(grpc::StatusCode::CANCELLED, "cut")}) {
    ScriptedStore store([&](Stream* stream) {
      AcceptOpen(stream);
      stream->Write(ReplyTo(Read(stream).request_id(), /*last=*/false));
      return end;
    });
    auto client = store.Client();
    CARREL_ASSERT_OK(client);
    CARREL_ASSERT_OK((*client)->Open(MakeOpen()));
    const auto id = (*client)->Send(MakeQuery(4));
    CARREL_ASSERT_OK(id);
    CARREL_EXPECT_OK((*client)->Next(*id));  // what had arrived is not lost
    EXPECT_THAT((*client)->Next(*id),
                StatusIs(StatusCode::kUnavailable, "query layer 4: the store"));
    EXPECT_THAT((*client)->Next(*id),
                StatusIs(StatusCode::kUnavailable, "query layer 4: the store"));
    EXPECT_THAT((*client)->Send(MakeQuery(5)),
                StatusIs(StatusCode::kUnavailable, "query layer 5: the store"));
  }
}

TEST(StoreClient, ForgottenRequest_ItsPartsAreDropped) {
  ScriptedStore store([](Stream* stream) {
    AcceptOpen(stream);
    const uint64_t first = Read(stream).request_id();
    stream->Write(ReplyTo(first, false));
    const uint64_t second = Read(stream).request_id();
    stream->Write(ReplyTo(first, false));
    stream->Write(ReplyTo(first, true));
    stream->Write(ReplyTo(second, true, 9));
    Read(stream);
    return grpc::Status::OK;
  });
  auto client = store.Client();
  CARREL_ASSERT_OK(client);
  CARREL_ASSERT_OK((*client)->Open(MakeOpen()));
  const auto first = (*client)->Send(MakeQuery(0));
  CARREL_ASSERT_OK(first);
  CARREL_EXPECT_OK((*client)->Next(*first));
  (*client)->Forget(*first);
  (*client)->Forget(*first);
  EXPECT_THAT((*client)->Next(*first), StatusIs(StatusCode::kFailedPrecondition, "forgotten"));
  const auto second = (*client)->Send(MakeQuery(1));
  CARREL_ASSERT_OK(second);
  CARREL_EXPECT_OK((*client)->Next(*second));
  (*client)->Forget(12345);  // of no request: nothing happens
}

TEST(StoreClient, ReplyToNothing_IsDataLoss) {
  ScriptedStore store([](Stream* stream) {
    AcceptOpen(stream);
    Read(stream);
    stream->Write(ReplyTo(4711));
    Read(stream);
    return grpc::Status::OK;
  });
  auto client = store.Client();
  CARREL_ASSERT_OK(client);
  CARREL_ASSERT_OK((*client)->Open(MakeOpen()));
  EXPECT_THAT((*client)->Next(*(*client)->Send(MakeQuery(0))),
              StatusIs(StatusCode::kDataLoss, "request 4711, which was not sent"));
}

TEST(StoreClient, ServerThatNeverAnswers_IsUnavailableAfterTheDeadline) {
  std::promise<void> done;
  ScriptedStore store([ended = done.get_future().share()](Stream*) {
    ended.wait();
    return grpc::Status::OK;
  });
  EXPECT_THAT(store.Client(absl::Milliseconds(50)),
              StatusIs(StatusCode::kUnavailable, "no answer within the deadline"));
  done.set_value();
}

TEST(StoreClient, DestroyedWithRequestsInFlight_CancelsTheStream) {
  std::promise<void> cancelled;
  ScriptedStore store([&](Stream* stream) {
    AcceptOpen(stream);
    while (Read(stream).request_id() != 0) {
    }
    cancelled.set_value();
    return grpc::Status::OK;
  });
  {
    auto client = store.Client();
    CARREL_ASSERT_OK(client);
    CARREL_ASSERT_OK((*client)->Open(MakeOpen()));
    CARREL_ASSERT_OK((*client)->Send(MakeQuery(0)));
  }
  cancelled.get_future().wait();
}

TEST(StoreClient, NoServerAtTheAddress_IsUnavailableNamingIt) {
  for (const std::string address : {"unix:/nonexistent/carrel.sock", "127.0.0.1:1"}) {
    EXPECT_THAT(ConnectToStore(address, absl::Milliseconds(200)),
                StatusIs(StatusCode::kUnavailable, address));
  }
}

// It is no fault of the server's address where a proxy stands between.
TEST(StoreClient, NoServerBehindAProxy_TheMessageNamesTheVariable_NotForThisMachine) {
  setenv("http_proxy", "http://127.0.0.1:9", 1);
  const absl::Status far = ConnectToStore("192.0.2.7:7400", absl::Milliseconds(200)).status();
  const absl::Status here = ConnectToStore("127.0.0.1:1", absl::Milliseconds(200)).status();
  unsetenv("http_proxy");
  EXPECT_THAT(far, StatusIs(StatusCode::kUnavailable, "http_proxy=http://127.0.0.1:9 sends it"));
  EXPECT_THAT(here, StatusIs(StatusCode::kUnavailable, "127.0.0.1:1"));
  EXPECT_EQ(here.message().find("http_proxy"), absl::string_view::npos);
}

// A store process, killed by the destructor at the latest.
class StoreProcess {
 public:
  explicit StoreProcess(const std::string& address) {
    int output[2];
    if (pipe(output) != 0) return;
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, output[1], STDOUT_FILENO);
    posix_spawn_file_actions_addclose(&actions, output[0]);
    std::string program = CARREL_BINARY_DIR "/stalling_store", argument = address;
    char* arguments[] = {program.data(), argument.data(), nullptr};
    if (posix_spawn(&pid_, program.c_str(), &actions, nullptr, arguments, environ) != 0) pid_ = -1;
    posix_spawn_file_actions_destroy(&actions);
    close(output[1]);
    char ready;
    started_ = pid_ > 0 && read(output[0], &ready, 1) == 1;
    close(output[0]);
  }
  ~StoreProcess() { Kill(); }
  bool started() const { return started_; }
  void Kill() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  pid_t pid_ = -1;
  bool started_ = false;
};

TEST(StoreClient, StoreKilledMidStream_IsUnavailableAndDoesNotHang) {
  const std::string path = SocketPath("stalling");
  StoreProcess store("unix:" + path);
  ASSERT_TRUE(store.started());
  auto client = ConnectToStore("unix:" + path, kLong);
  CARREL_ASSERT_OK(client);
  CARREL_ASSERT_OK((*client)->Open(MakeOpen()));
  const auto id = (*client)->Send(MakeQuery(3));
  CARREL_ASSERT_OK(id);
  CARREL_ASSERT_OK((*client)->Next(*id));
  std::thread waiting([&] {
    EXPECT_THAT((*client)->Next(*id),
                StatusIs(StatusCode::kUnavailable, "query layer 3: the store"));
  });
  store.Kill();
  waiting.join();
  EXPECT_THAT((*client)->Send(MakeQuery(4)), StatusIs(StatusCode::kUnavailable, "query layer 4"));
}

TEST(StoreClient, StoreThatStartsLate_IsFoundWithinTheDeadline) {
  const std::string path = SocketPath("late");
  auto connecting = std::async(std::launch::async,
                               [&] { return ConnectToStore("unix:" + path, kLong).status(); });
  EXPECT_EQ(connecting.wait_for(std::chrono::milliseconds(100)), std::future_status::timeout);
  StoreProcess store("unix:" + path);
  ASSERT_TRUE(store.started());
  CARREL_EXPECT_OK(connecting.get());
}

}  // namespace
}  // namespace carrel::decoder
