// Exports and imports: what a key may do and lose, a tenant's quotas, and what an import tells.
#include <unistd.h>

#include <filesystem>

#include "absl/time/clock.h"
#include "carrel/v1/context.grpc.pb.h"
#include "common/test_util.h"
#include "kvstore/service/access_test_util.h"
#include "kvstore/service/context_client.h"
#include "kvstore/service/metrics_text.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;
using ::testing::HasSubstr;
using ::testing::Not;

// One Import call, request by request.
class ImportCall {
 public:
  ImportCall(const GuardedServer& server, const std::string& key)
      : stub_(v1::ContextService::NewStub(server.Channel())) {
    context_.AddMetadata("authorization", "Bearer " + key);
    stream_ = stub_->Import(&context_);
  }
  ~ImportCall() {
    if (!finished_) context_.TryCancel();
    if (!finished_) stream_->Finish();
  }
  // The reply's position, or why the call ended.
  absl::StatusOr<int64_t> Send(absl::string_view data, const std::string& name = "",
                               bool publish = false) {
    v1::ImportRequest request;
    request.set_name(name);
    request.set_data(std::string(data));
    request.set_publish(publish);
    v1::ImportReply reply;
    if (!stream_->Write(request) || !stream_->Read(&reply)) return End();
    return reply.position();
  }
  absl::Status End() {
    stream_->WritesDone();
    return Ended();
  }
  // Without a word of ours.
  absl::Status Ended() {
    finished_ = true;
    v1::ImportReply reply;
    while (stream_->Read(&reply)) {
    }
    const grpc::Status status = stream_->Finish();
    return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  }

 private:
  std::unique_ptr<v1::ContextService::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::ImportRequest, v1::ImportReply>> stream_;
  bool finished_ = false;
};

constexpr char kOwner[] =
    R"({"name": "owner", "sha256": "%owner%", "rights": ["list", "open", "import", "delete"]})";
constexpr char kAnn[] =
    R"({"name": "ann", "sha256": "%ann%", "rights": ["import", "open"], "tenant": "a"})";
constexpr char kBob[] =
    R"({"name": "bob", "sha256": "%bob%", "rights": ["import", "open"], "tenant": "b"})";

class TransferAccessTest : public testing::Test {
 protected:
  static std::string Keys(const std::string& more = "") {
    return absl::StrCat(kOwner, ", ", kAnn, ", ", kBob, more.empty() ? "" : ", ", more);
  }
  static std::string Tenants(int64_t bytes, int64_t contexts = 0) {
    return absl::StrCat(R"({"name": "a", "prefix": "a.", "bytes": )", bytes, R"(, "contexts": )",
                        contexts, R"(, "sessions": 3}, {"name": "b", "prefix": "b."})");
  }
  void Start(int64_t tenant_bytes = 0, int64_t contexts = 0) {
    dir_ = FreshTempDir();
    server_ = std::make_unique<GuardedServer>(dir_, Transport::kUnix, Keys().c_str(),
                                              Tenants(tenant_bytes, contexts));
    CARREL_ASSERT_OK(server_->Start());
  }
  void Write(const std::string& keys, const std::string& tenants) {
    const int64_t reloads = server_->config.access->generation();
    server_->WriteKeys(keys, tenants);
    while (server_->config.access->generation() == reloads) absl::SleepFor(absl::Milliseconds(1));
  }
  ContextClient Client(const std::string& key) const {
    return ContextClient(server_->Channel(), "here", absl::Seconds(60), key);
  }
  std::string Exported(const std::string& key, const std::string& name) const {
    std::string stream;
    CARREL_EXPECT_OK(Client(key).Export(name, [&](absl::string_view piece) {
      stream.append(piece.data(), piece.size());
      return absl::OkStatus();
    }));
    return stream;
  }
  // Both contexts out of the store, which is then empty of them.
  void TakeOut() {
    mine_ = Exported("owner", "mine");
    theirs_ = Exported("owner", "theirs");
    for (const char* name : {"mine", "theirs"}) CARREL_EXPECT_OK(Client("owner").Delete(name));
  }
  absl::Status Import(const std::string& key, const std::string& name, const std::string& stream) {
    ImportCall call(*server_, key);
    absl::StatusOr<int64_t> sent = call.Send(stream, name);
    // Further on, where something of it was there.
    while (sent.ok() && *sent < static_cast<int64_t>(stream.size())) {
      sent = call.Send(stream.substr(static_cast<size_t>(*sent)));
    }
    if (!sent.ok()) return sent.status();
    const absl::StatusOr<int64_t> published = call.Send("", "", true);
    return published.ok() ? absl::OkStatus() : published.status();
  }
  int64_t Staged() const {
    int64_t files = 0;
    std::error_code error;
    for (const auto& entry :
         std::filesystem::recursive_directory_iterator(dir_ + "/store/importing", error)) {
      files += entry.is_regular_file() && entry.path().extension() != ".lock";
    }
    return files;
  }
  static constexpr size_t kBeforeTheEnd = 100;

  std::string dir_, mine_, theirs_;
  std::unique_ptr<GuardedServer> server_;
};

TEST_F(TransferAccessTest, Clients_PresentTheirKeys) {
  Start();
  TakeOut();
  CARREL_EXPECT_OK(Import("ann", "a.mine", mine_));
  EXPECT_EQ(Exported("ann", "a.mine").size(), mine_.size() + 2);  // by the longer name
  EXPECT_THAT(Client("nobody").Export("a.mine", [](absl::string_view) { return absl::OkStatus(); }),
              StatusIs(StatusCode::kUnauthenticated, "not valid"));
  EXPECT_THAT(Client("bob").Export("a.mine", [](absl::string_view) { return absl::OkStatus(); }),
              StatusIs(StatusCode::kNotFound, "context a.mine is not in the store"));
  EXPECT_THAT(Import("bob", "a.other", theirs_),
              StatusIs(StatusCode::kPermissionDenied, "may not add context a.other"));
}

TEST_F(TransferAccessTest, QuotaOfBytes_IsAskedAtTheHeaderAndNothingIsKept) {
  Start();
  TakeOut();
  const auto size = static_cast<int64_t>(mine_.size());
  Write(Keys(), Tenants(size / 2));
  EXPECT_THAT(Import("ann", "a.mine", mine_),
              StatusIs(StatusCode::kResourceExhausted, "on their way in beside the 0"));
  EXPECT_EQ(Staged(), 0);
  CARREL_EXPECT_OK(Import("bob", "b.mine", mine_));  // no quota of his
}

TEST_F(TransferAccessTest, ImportsAtATime_CountTogether) {
  Start();
  TakeOut();
  const auto size = static_cast<int64_t>(mine_.size());
  Write(Keys(), Tenants(size * 3 / 2));
  ImportCall first(*server_, "ann");
  CARREL_ASSERT_OK(first.Send(mine_.substr(0, mine_.size() - kBeforeTheEnd), "a.mine"));
  EXPECT_THAT(Import("ann", "a.theirs", theirs_),
              StatusIs(StatusCode::kResourceExhausted, "bytes on their way in"));
  CARREL_EXPECT_OK(first.Send(mine_.substr(mine_.size() - kBeforeTheEnd), "", true));
  EXPECT_THAT(Import("ann", "a.theirs", theirs_),
              StatusIs(StatusCode::kResourceExhausted, "that it has stored exceed"));
  Write(Keys(), Tenants(size * 3, 1));
  EXPECT_THAT(Import("ann", "a.theirs", theirs_),
              StatusIs(StatusCode::kResourceExhausted, "exceed contexts=1"));
  Write(Keys(), Tenants(size * 3, 2));
  CARREL_EXPECT_OK(Import("ann", "a.theirs", theirs_));
}

TEST_F(TransferAccessTest, QuotaThatBecomesLess_IsAskedAgain) {
  Start();
  TakeOut();
  ImportCall call(*server_, "ann");
  CARREL_ASSERT_OK(call.Send(mine_, "a.mine"));
  Write(Keys(), Tenants(static_cast<int64_t>(mine_.size()) / 2));
  EXPECT_THAT(call.Send("", "", true), StatusIs(StatusCode::kResourceExhausted, "exceed bytes="));
}

TEST_F(TransferAccessTest, SessionsOfATenant_CountTransfers) {
  Start();
  TakeOut();
  ImportCall one(*server_, "ann"), two(*server_, "ann"), three(*server_, "ann");
  CARREL_ASSERT_OK(one.Send(mine_.substr(0, 10), "a.1"));
  CARREL_ASSERT_OK(two.Send(mine_.substr(0, 10), "a.2"));
  CARREL_ASSERT_OK(three.Send(mine_.substr(0, 10), "a.3"));
  ImportCall four(*server_, "ann");  // a call takes its place when it begins
  EXPECT_THAT(four.Send("", "a.4"), StatusIs(StatusCode::kResourceExhausted, "sessions=3"));
  // The call that was refused counts until gRPC is done with it, which its client does not see.
  for (int i = 0; i < 5000 && server_->server->statistics().transfers != 3; ++i) {
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_EQ(server_->server->statistics().transfers, 3);
}

TEST_F(TransferAccessTest, ContentOfOthers_IsToldToWhoHasAllOfItAndWithoutItsName) {
  Start();
  const std::string stream = Exported("owner", "theirs");
  {
    ImportCall call(*server_, "ann");
    // Not at the header, which a manifest gives away.
    CARREL_ASSERT_OK(call.Send(stream.substr(0, stream.size() - kBeforeTheEnd), "a.t"));
    const absl::StatusOr<int64_t> early = call.Send("", "", true);
    EXPECT_THAT(early, StatusIs(StatusCode::kDataLoss, "the stream ends at"));
  }
  const absl::Status whole = Import("ann", "a.t", stream);
  EXPECT_THAT(whole, StatusIs(StatusCode::kAlreadyExists, "is published already"));
  EXPECT_THAT(std::string(whole.message()), Not(HasSubstr("theirs")));
  EXPECT_THAT(Import("owner", "again", stream),
              StatusIs(StatusCode::kAlreadyExists, "is published as theirs"));
}

TEST_F(TransferAccessTest, WhatOneTenantLeft_IsNotAnothersToGoOnWith) {
  Start();
  TakeOut();
  const std::string most = mine_.substr(0, mine_.size() - kBeforeTheEnd);
  ImportCall(*server_, "ann").Send(most, "a.mine").IgnoreError();
  const auto header = static_cast<size_t>(mine_.size() / 2);  // at least
  ImportCall other(*server_, "bob");
  const absl::StatusOr<int64_t> his = other.Send(mine_.substr(0, header), "b.mine");
  CARREL_ASSERT_OK(his);
  EXPECT_EQ(*his, static_cast<int64_t>(header));
  while (server_->server->statistics().transfers > 1) absl::SleepFor(absl::Milliseconds(1));
  ImportCall again(*server_, "ann");
  const absl::StatusOr<int64_t> hers = again.Send(mine_.substr(0, header), "a.mine");
  CARREL_ASSERT_OK(hers);
  EXPECT_EQ(*hers, static_cast<int64_t>(most.size()));
}

TEST_F(TransferAccessTest, WhatATenantLeft_MakesRoomForWhatItBrings) {
  Start();
  TakeOut();
  const auto size = static_cast<int64_t>(mine_.size());
  const std::string most = mine_.substr(0, mine_.size() - kBeforeTheEnd);
  for (const bool fits : {true, false}) {
    Write(Keys(), Tenants(fits ? size * 5 / 2 : size * 3 / 2));
    ImportCall(*server_, "ann").Send(most, "a.mine").IgnoreError();
    while (server_->server->statistics().transfers > 0) absl::SleepFor(absl::Milliseconds(1));
    EXPECT_GT(Staged(), 0);
    CARREL_EXPECT_OK(Import("ann", "a.theirs", theirs_));
    EXPECT_EQ(Staged() > 0, fits);
    CARREL_EXPECT_OK(Client("owner").Delete("a.theirs"));
  }
}

// Each file that comes ahead is a call of its own; together they are one context.
TEST_F(TransferAccessTest, FilesAhead_CountTogether) {
  Start();
  Write(Keys(), Tenants(3000));
  const ContextId id = ContextId::Random();
  const std::string file(1000, 'x');
  const auto send = [&](const std::string& key, const std::string& name, int64_t at) {
    return Client(key).SendAhead(name, id, at, file, [] { return true; }).status();
  };
  CARREL_EXPECT_OK(send("ann", "a.big", 0));
  CARREL_EXPECT_OK(send("ann", "a.big", 1));
  EXPECT_THAT(send("ann", "a.big", 2),
              StatusIs(StatusCode::kResourceExhausted, "bytes on their way in"));
  CARREL_EXPECT_OK(send("ann", "a.big", 1));  // is there
  for (int64_t at = 0; at < 5; ++at) CARREL_EXPECT_OK(send("bob", "b.big", at));
}

TEST_F(TransferAccessTest, Tenants_AreCounted) {
  Start();
  TakeOut();
  Write(Keys(), Tenants(static_cast<int64_t>(mine_.size()) * 3 / 2));
  CARREL_EXPECT_OK(Import("ann", "a.mine", mine_));
  EXPECT_FALSE(Import("ann", "a.theirs", theirs_).ok());
  ImportCall going(*server_, "bob");
  CARREL_ASSERT_OK(going.Send(mine_.substr(0, 10), "b.mine"));
  const std::vector<TenantUse> tenants = server_->server->tenants();
  ASSERT_EQ(tenants.size(), 2u);
  EXPECT_EQ(tenants[0].name, "a");
  EXPECT_EQ(tenants[0].refusals, 1);
  EXPECT_EQ(tenants[0].stored_contexts, 1);
  EXPECT_GE(tenants[0].requests, 2);
  EXPECT_GE(tenants[0].bytes, static_cast<int64_t>(mine_.size()));
  EXPECT_EQ(tenants[1].name, "b");
  EXPECT_EQ(tenants[1].sessions, 1);
  EXPECT_EQ(tenants[1].stored_contexts, 0);
  EXPECT_THAT(MetricsText(TenantMetrics(tenants)),
              HasSubstr("carrel_tenant_sessions{tenant=\"b\"} 1"));
  // One that the file names no more is not shown.
  Write(kOwner, "");
  EXPECT_TRUE(server_->server->tenants().empty());
}

// What is imported may be gone on with; and the transfer, whose own alarm kept it, does not leak
// (./run sanitized sees that).
TEST_F(TransferAccessTest, DelayedImportThatIsCutOff_IsLetGo) {
  Start();
  TakeOut();
  Write(Keys(R"({"name": "slow", "sha256": "%slow%", "rights": ["import"],
                 "requests_per_second": 2})"),
        Tenants(0));
  {
    ImportCall call(*server_, "slow");
    CARREL_ASSERT_OK(call.Send(mine_.substr(0, 10), "here"));
    for (size_t at = 10; at < 60; at += 10) CARREL_ASSERT_OK(call.Send(mine_.substr(at, 10)));
    EXPECT_GT(server_->config.access->Named("slow")->counts().delayed, 0);
  }
  absl::StatusOr<int64_t> again = absl::UnavailableError("not yet");
  for (int i = 0; i < 2000 && !again.ok(); ++i) {
    again = ImportCall(*server_, "owner").Send(mine_.substr(0, 60), "here");
    if (!again.ok()) absl::SleepFor(absl::Milliseconds(5));
  }
  CARREL_EXPECT_OK(again);
}

TEST_F(TransferAccessTest, WithdrawnKey_EndsImportsAndExports) {
  Start();
  const std::string stream = Exported("owner", "mine");
  const std::string without_ann = absl::StrCat(kOwner, ", ", kBob);
  ImportCall quiet(*server_, "ann"), asking(*server_, "ann");
  CARREL_ASSERT_OK(quiet.Send(stream.substr(0, 10), "a.1"));
  CARREL_ASSERT_OK(asking.Send(stream.substr(0, 10), "a.2"));
  Write(without_ann, Tenants(0));
  EXPECT_THAT(asking.Send(stream.substr(10, 10)),
              StatusIs(StatusCode::kPermissionDenied, "key ann was withdrawn"));
  EXPECT_THAT(quiet.Ended(), StatusIs(StatusCode::kPermissionDenied, "key ann was withdrawn"));
  // An export whose reader is slow: its key goes between two pieces.
  Write(Keys(), Tenants(0));
  int64_t pieces = 0;
  const absl::Status status = Client("owner").Export("theirs", [&](absl::string_view) {
    if (pieces++ == 0) Write(absl::StrCat(kAnn, ", ", kBob), Tenants(0));
    return absl::OkStatus();
  });
  // The store is small: at most one piece may have been on its way.
  if (!status.ok()) {
    EXPECT_THAT(status, StatusIs(StatusCode::kPermissionDenied, "key owner was withdrawn"));
  }
}

}  // namespace
}  // namespace carrel::kvstore
