#include "kvstore/service/access_test_util.h"

#include <filesystem>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "carrel/v1/context.grpc.pb.h"
#include "common/checksum.h"
#include "common/file.h"
#include "common/status.h"
#include "common/test_util.h"
#include "kvstore/service/service_test_util.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {
namespace {

void SetUp(grpc::ClientContext& context, const std::string& key) {
  if (!key.empty()) context.AddMetadata("authorization", "Bearer " + key);
}

}  // namespace

std::string TransportName(Transport transport) {
  constexpr const char* kNames[] = {"Unix", "Loopback", "Tls", "MutualTls"};
  return kNames[static_cast<int>(transport)];
}

GuardedServer::GuardedServer(const std::string& folder, Transport transport, const char* keys,
                             const std::string& tenants)
    : folder_(folder), tls_(folder + "/tls"), transport_(transport) {
  RandomContextSpec spec;
  spec.seed = TestSeed();
  spec.name = "mine";
  spec.document = true;
  mine = std::make_unique<RandomContext>(spec);
  spec.name = "theirs";
  theirs = std::make_unique<RandomContext>(spec);
  MakeStore(folder_, {mine.get(), theirs.get()});
  std::filesystem::create_directory(tls_);
  if (keys != nullptr) {
    WriteKeys(keys, tenants);
    auto access = Access::Create(folder_ + "/keys.json", absl::Milliseconds(10));
    CARREL_EXPECT_OK(access);
    if (access.ok()) config.access = *std::move(access);
  }
  socket_ = SocketPath("guarded");
  config.listen = {transport == Transport::kUnix ? "unix:" + socket_ : "127.0.0.1:0"};
  if (transport == Transport::kTls || transport == Transport::kMutualTls) {
    WriteCertificate(authority.Issue({.common_name = "server", .dns = "localhost"}));
    config.tls.certificate = tls_ + "/certificate.pem";
    config.tls.key = tls_ + "/key.pem";
    if (transport == Transport::kMutualTls) config.tls.ca = tls_ + "/ca.pem";
  }
  audit = *AuditLog::Open(folder_ + "/audit.jsonl");
  config.audit = audit.get();
}

GuardedServer::~GuardedServer() {
  server = nullptr;
  engine = nullptr;
}

absl::Status GuardedServer::Start() {
  server = nullptr;
  engine = nullptr;
  EngineConfig limits;
  limits.search_threads = 2;
  ASSIGN_OR_RETURN(std::unique_ptr<Store> store,
                   Store::Open(absl::StrCat(folder_, "/", store_name), StoreMode::kReadWrite));
  ASSIGN_OR_RETURN(engine, Engine::Create(limits, std::move(store)));
  if (made_engine != nullptr) made_engine(*engine);
  ASSIGN_OR_RETURN(server, Server::Start(config, engine.get()));
  return absl::OkStatus();
}

void GuardedServer::WriteKeys(const std::string& keys, const std::string& tenants) {
  std::string text = absl::StrCat("{\"tenants\": [", tenants, "], \"keys\": [", keys, "]}");
  for (size_t at; (at = text.find('%')) != std::string::npos;) {
    const size_t end = text.find('%', at + 1);
    text.replace(at, end - at + 1, Sha256Hex(text.substr(at + 1, end - at - 1)));
  }
  CARREL_EXPECT_OK(WriteFileAtomically(folder_ + "/keys.json", text));
}

std::shared_ptr<grpc::Channel> GuardedServer::MakeChannel(const TestAuthority::Pair& own) const {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 200);
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
  if (transport_ == Transport::kTls || transport_ == Transport::kMutualTls) {
    grpc::SslCredentialsOptions options;
    options.pem_root_certs = authority.certificate();
    options.pem_cert_chain = own.certificate;
    options.pem_private_key = own.key;
    credentials = grpc::SslCredentials(options);
  }
  return grpc::CreateCustomChannel(server->addresses()[0], credentials, arguments);
}

std::shared_ptr<grpc::Channel> GuardedServer::Channel() const {
  if (transport_ == Transport::kMutualTls) return ChannelAs("client");
  return MakeChannel({});
}

std::shared_ptr<grpc::Channel> GuardedServer::ChannelAs(const std::string& name) const {
  return MakeChannel(authority.Issue({.common_name = name}));
}

grpc::Status GuardedServer::List(const std::string& key, std::vector<std::string>* names) const {
  grpc::ClientContext context;
  SetUp(context, key);
  v1::ListResponse response;
  const grpc::Status status =
      v1::ContextService::NewStub(Channel())->List(&context, v1::ListRequest(), &response);
  if (names != nullptr) {
    for (const auto& summary : response.contexts()) names->push_back(summary.name());
  }
  return status;
}

grpc::Status GuardedServer::Get(const std::string& key, const std::string& name) const {
  grpc::ClientContext context;
  SetUp(context, key);
  v1::GetRequest request;
  request.set_name(name);
  v1::GetResponse response;
  return v1::ContextService::NewStub(Channel())->Get(&context, request, &response);
}

grpc::Status GuardedServer::Tokens(const std::string& key, const std::string& name) const {
  grpc::ClientContext context;
  SetUp(context, key);
  v1::TokensRequest request;
  request.set_name(name);
  v1::TokensResponse response;
  return v1::ContextService::NewStub(Channel())->Tokens(&context, request, &response);
}

grpc::Status GuardedServer::Statistics(const std::string& key) const {
  grpc::ClientContext context;
  SetUp(context, key);
  v1::StatisticsResponse response;
  return v1::ContextService::NewStub(Channel())->Statistics(&context, v1::StatisticsRequest(),
                                                            &response);
}

grpc::Status GuardedServer::Verify(const std::string& key, const std::string& name) const {
  grpc::ClientContext context;
  SetUp(context, key);
  v1::VerifyRequest request;
  request.set_name(name);
  v1::VerifyResponse response;
  return v1::ContextService::NewStub(Channel())->Verify(&context, request, &response);
}

grpc::Status GuardedServer::Delete(const std::string& key, const std::string& name) const {
  grpc::ClientContext context;
  SetUp(context, key);
  v1::DeleteRequest request;
  request.set_name(name);
  v1::DeleteResponse response;
  return v1::ContextService::NewStub(Channel())->Delete(&context, request, &response);
}

grpc::Status GuardedServer::Export(const std::string& key, const std::string& name) const {
  grpc::ClientContext context;
  SetUp(context, key);
  v1::ExportRequest request;
  request.set_name(name);
  const auto stub = v1::ContextService::NewStub(Channel());
  const auto reader = stub->Export(&context, request);
  for (v1::ExportPiece piece; reader->Read(&piece);) {
  }
  return reader->Finish();
}

grpc::Status GuardedServer::Import(const std::string& key, const std::string& name) const {
  grpc::ClientContext context;
  SetUp(context, key);
  const auto stub = v1::ContextService::NewStub(Channel());
  const auto stream = stub->Import(&context);
  v1::ImportRequest request;
  request.set_name(name);
  request.set_data(std::string(1000, 'x'));
  v1::ImportReply reply;
  stream->Write(request);
  stream->Read(&reply);
  stream->WritesDone();
  return stream->Finish();
}

grpc::Status GuardedServer::Warm(const std::string& key, const std::string& name) const {
  grpc::ClientContext context;
  SetUp(context, key);
  v1::WarmRequest request;
  request.set_name(name);
  const auto stub = v1::ContextService::NewStub(Channel());
  const auto reader = stub->Warm(&context, request);
  for (v1::WarmReply reply; reader->Read(&reply);) {
  }
  return reader->Finish();
}

grpc::Status GuardedServer::Locate(const std::string& key, const std::string& name) const {
  grpc::ClientContext context;
  SetUp(context, key);
  v1::LocateRequest request;
  request.set_name(name);
  v1::LocateResponse response;
  return v1::ContextService::NewStub(Channel())->Locate(&context, request, &response);
}

grpc::Status GuardedServer::OpenSession(const std::string& key, const std::string& name) const {
  WireSession session(Channel(), key);
  OpenRequest opening = mine->Opening();
  opening.context = name;
  session.SendOpen(WireOpen(opening));
  const bool opened = !session.Receive(1).empty();
  if (opened) session.CloseSending();
  return session.Finish();
}

std::vector<std::string> GuardedServer::AuditLines() const {
  std::vector<std::string> lines = absl::StrSplit(*ReadFile(folder_ + "/audit.jsonl"), '\n');
  lines.pop_back();
  return lines;
}

std::vector<GuardedCall> EveryCall(const GuardedServer& server) {
  using grpc::StatusCode;
  const GuardedServer* const at = &server;
  return {
      {"ContextService.List", "list", StatusCode::OK, [at](auto& key) { return at->List(key); }},
      {"ContextService.Get", "list", StatusCode::OK,
       [at](auto& key) { return at->Get(key, "mine"); }},
      {"ContextService.Tokens", "open", StatusCode::OK,
       [at](auto& key) { return at->Tokens(key, "mine"); }},
      {"ContextService.Statistics", "list", StatusCode::OK,
       [at](auto& key) { return at->Statistics(key); }},
      {"ContextService.Verify", "admin", StatusCode::OK,
       [at](auto& key) { return at->Verify(key, "mine"); }},
      {"ContextService.Export", "open", StatusCode::OK,
       [at](auto& key) { return at->Export(key, "mine"); }},
      {"ContextService.Import", "import", StatusCode::DATA_LOSS,
       [at](auto& key) { return at->Import(key, "new"); }},
      {"ContextService.Delete", "delete", StatusCode::NOT_FOUND,
       [at](auto& key) { return at->Delete(key, "absent"); }},
      {"ContextService.Warm", "open", StatusCode::OK,
       [at](auto& key) { return at->Warm(key, "mine"); }},
      {"ContextService.Locate", "open", StatusCode::OK,
       [at](auto& key) { return at->Locate(key, "mine"); }},
      {"RetrievalService.Session", "open", StatusCode::OK,
       [at](auto& key) { return at->OpenSession(key, "mine"); }},
  };
}

}  // namespace carrel::kvstore
