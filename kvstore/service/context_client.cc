#include "kvstore/service/context_client.h"

#include <grpcpp/grpcpp.h>

#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "carrel/v1/context.grpc.pb.h"
#include "common/checksum.h"
#include "common/routing.h"
#include "common/status.h"
#include "kvstore/storage/context_stream.h"

namespace carrel::kvstore {
namespace {

constexpr absl::Duration kAskAgain = absl::Milliseconds(100);

// A request about one context.
template <typename Request>
Request About(const std::string& name) {
  Request request;
  request.set_name(name);
  return request;
}

// name: of the context that the call is about; empty: of none.
void SetUp(grpc::ClientContext& context, const std::string& key, const std::string& name) {
  if (!key.empty()) context.AddMetadata("authorization", "Bearer " + key);
  if (!name.empty()) context.AddMetadata(kContextHeader, ContextHeaderValue(name));
}

}  // namespace

struct ContextClient::Server {
  using Stub = v1::ContextService::Stub;

  void SetUp(grpc::ClientContext& context, const std::string& name, absl::Duration limit) const {
    if (limit != absl::InfiniteDuration()) {
      context.set_deadline(absl::ToChronoTime(absl::Now() + limit));
    }
    kvstore::SetUp(context, key, name);
  }

  // Who answers, for failures of the connection; what the server itself says stays as it is.
  absl::Status Told(const grpc::Status& of) const {
    const absl::Status status(static_cast<absl::StatusCode>(of.error_code()), of.error_message());
    if (!absl::IsUnavailable(status) && !absl::IsDeadlineExceeded(status) &&
        !SaysServerIsGone(status)) {
      return status;
    }
    const std::string& message = of.error_message();
    // How gRPC words what a server of TLS does with a client that does not speak it.
    const bool tls = hints.plain && (absl::StrContains(message, "Socket closed") ||
                                     absl::StrContains(message, "http1.x") ||
                                     absl::StrContains(message, "Connection reset"));
    return absl::UnavailableError(absl::StrCat("server ", address, ": ", message,
                                               tls ? " (does the server want TLS? --tls-ca)" : "",
                                               hints.proxy));
  }

  template <typename Request, typename Response>
  absl::StatusOr<Response> Call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&,
                                                             Response*),
                                const Request& request, const std::string& name,
                                absl::Duration limit) const {
    grpc::ClientContext context;
    SetUp(context, name, limit);
    Response response;
    const grpc::Status status = (stub.get()->*method)(&context, request, &response);
    if (!status.ok()) return Told(status);
    return response;
  }

  const std::unique_ptr<Stub> stub;
  const std::string address;
  const absl::Duration deadline;
  const std::string key;
  const ConnectionHints hints;
};

ContextClient::ContextClient(std::shared_ptr<grpc::Channel> channel, std::string address,
                             absl::Duration deadline, std::string key, ConnectionHints hints)
    : server_(new Server{v1::ContextService::NewStub(std::move(channel)), std::move(address),
                         deadline, std::move(key), std::move(hints)}) {}

ContextClient::~ContextClient() = default;

absl::StatusOr<v1::ListResponse> ContextClient::List() {
  return server_->Call(&Server::Stub::List, v1::ListRequest(), "", server_->deadline);
}

absl::StatusOr<v1::StatisticsResponse> ContextClient::Statistics() {
  return server_->Call(&Server::Stub::Statistics, v1::StatisticsRequest(), "", server_->deadline);
}

absl::StatusOr<v1::Manifest> ContextClient::Get(const std::string& name) {
  ASSIGN_OR_RETURN(
      const v1::GetResponse response,
      server_->Call(&Server::Stub::Get, About<v1::GetRequest>(name), name, server_->deadline));
  return response.manifest();
}

absl::StatusOr<std::vector<TokenId>> ContextClient::Tokens(const std::string& name,
                                                           const std::string& content_id) {
  auto request = About<v1::TokensRequest>(name);
  request.set_content_id(content_id);
  std::string bytes;
  for (;;) {
    request.set_begin(static_cast<int64_t>(bytes.size() / sizeof(TokenId)));
    ASSIGN_OR_RETURN(const v1::TokensResponse part, TokensFrom(request));
    const std::string& ids = part.token_ids();
    bytes += ids;
    const auto whole = static_cast<size_t>(part.tokens()) * sizeof(TokenId);
    const bool more = bytes.size() < whole;
    if (ids.size() % sizeof(TokenId) != 0 || bytes.size() > whole || (more && ids.empty()) ||
        (!more && Sha256Hex(bytes) != part.token_ids_sha256())) {
      return absl::DataLossError(absl::StrCat("context \"", name, "\" of ", server_->address,
                                              ": its token ids are not those of its manifest"));
    }
    if (!more) break;
    request.set_content_id(part.content_id());
  }
  std::vector<TokenId> tokens(bytes.size() / sizeof(TokenId));
  std::memcpy(tokens.data(), bytes.data(), bytes.size());
  return tokens;
}

// A key's bytes per second may be fewer than a long document has.
absl::StatusOr<v1::TokensResponse> ContextClient::TokensFrom(const v1::TokensRequest& request) {
  const absl::Time until = absl::Now() + server_->deadline;
  for (;;) {
    absl::StatusOr<v1::TokensResponse> response =
        server_->Call(&Server::Stub::Tokens, request, request.name(), server_->deadline);
    const bool again =
        request.begin() > 0 && absl::Now() < until && absl::IsResourceExhausted(response.status());
    if (!again) return response;
    absl::SleepFor(kAskAgain);
  }
}

absl::StatusOr<v1::VerifyResponse> ContextClient::Verify(const std::string& name, bool deep) {
  auto request = About<v1::VerifyRequest>(name);
  request.set_deep(deep);
  return server_->Call(&Server::Stub::Verify, request, name, absl::InfiniteDuration());
}

absl::Status ContextClient::Export(const std::string& name,
                                   absl::FunctionRef<absl::Status(absl::string_view)> sink) {
  grpc::ClientContext context;
  server_->SetUp(context, name, absl::InfiniteDuration());
  const auto reader = server_->stub->Export(&context, About<v1::ExportRequest>(name));
  v1::ExportPiece piece;
  absl::Status taken;
  while (taken.ok() && reader->Read(&piece)) taken = sink(piece.data());
  if (!taken.ok()) context.TryCancel();
  const grpc::Status status = reader->Finish();
  if (!taken.ok()) return taken;
  return server_->Told(status);
}

absl::StatusOr<v1::ImportReply> ContextClient::Import(
    const std::string& name,
    absl::FunctionRef<absl::StatusOr<absl::string_view>(int64_t offset)> source,
    absl::FunctionRef<void(int64_t position, int64_t bytes)> progress) {
  grpc::ClientContext context;
  server_->SetUp(context, name, absl::InfiniteDuration());
  const auto stream = server_->stub->Import(&context);
  v1::ImportReply reply;
  auto request = About<v1::ImportRequest>(name);
  absl::Status given;
  while (given.ok() && reply.content_id().empty()) {
    const absl::StatusOr<absl::string_view> bytes = source(reply.position());
    given = bytes.status();
    if (!given.ok()) break;
    request.set_data(bytes->data(), bytes->size());
    // Also where the source ends too early: the store says what is missing.
    request.set_publish(bytes->empty());
    if (!stream->Write(request) || !stream->Read(&reply)) break;
    request.clear_name();
    progress(reply.position(), reply.bytes());
  }
  if (!given.ok()) context.TryCancel();
  stream->WritesDone();
  const grpc::Status status = stream->Finish();
  if (!given.ok()) return given;
  if (!status.ok()) return server_->Told(status);
  return reply;
}

absl::Status ContextClient::AskImport(const std::string& name) {
  grpc::ClientContext context;
  server_->SetUp(context, name, server_->deadline);
  const auto stream = server_->stub->Import(&context);
  auto request = About<v1::ImportRequest>(name);
  v1::ImportReply reply;
  const bool may = stream->Write(request) && stream->Read(&reply);
  stream->WritesDone();
  const grpc::Status status = stream->Finish();  // of an import that did not go on
  return may ? absl::OkStatus() : server_->Told(status);
}

absl::StatusOr<int64_t> ContextClient::SendAhead(const std::string& name, ContextId id,
                                                 int64_t file, absl::string_view bytes,
                                                 absl::FunctionRef<bool()> go_on) {
  const std::string digest = StreamDigest(bytes);
  const absl::string_view end = digest;
  const auto size = static_cast<int64_t>(bytes.size());
  grpc::ClientContext context;
  server_->SetUp(context, name, absl::InfiniteDuration());
  const auto stream = server_->stub->Import(&context);
  v1::ImportReply reply;
  auto request = About<v1::ImportRequest>(name);
  request.mutable_ahead()->set_context_id(id.Bytes());
  request.mutable_ahead()->set_file(static_cast<uint32_t>(file));
  request.mutable_ahead()->set_bytes(size);
  int64_t sent = 0;
  bool going_on = true;
  while (stream->Write(request) && stream->Read(&reply) && reply.position() < reply.bytes()) {
    if (!(going_on = go_on())) break;
    const auto at = static_cast<size_t>(reply.position());
    const absl::string_view piece = reply.position() < size ? bytes.substr(at, kStreamPieceBytes)
                                                            : end.substr(at - bytes.size());
    request.Clear();
    request.set_data(piece.data(), piece.size());
    sent += static_cast<int64_t>(piece.size());
  }
  if (!going_on) context.TryCancel();
  stream->WritesDone();
  const grpc::Status status = stream->Finish();
  if (!going_on) return absl::CancelledError("sending ahead was stopped");
  if (!status.ok()) return server_->Told(status);
  return sent;
}

absl::Status ContextClient::Warm(const std::string& name,
                                 absl::FunctionRef<bool(const v1::WarmReply&)> progress) {
  grpc::ClientContext context;
  server_->SetUp(context, name, absl::InfiniteDuration());
  const auto reader = server_->stub->Warm(&context, About<v1::WarmRequest>(name));
  v1::WarmReply reply;
  bool wanted = true, here = false;
  while (wanted && reader->Read(&reply)) {
    here = reply.here();
    wanted = progress(reply);
  }
  if (!wanted && !here) context.TryCancel();
  const grpc::Status status = reader->Finish();
  if (here) return absl::OkStatus();
  if (!wanted) return absl::CancelledError(absl::StrCat("warm: nobody waits for \"", name, "\""));
  if (!status.ok()) return server_->Told(status);
  return absl::UnavailableError(absl::StrCat(
      "server ", server_->address, ": it stopped without saying that \"", name, "\" is here"));
}

absl::StatusOr<std::string> ContextClient::Locate(const std::string& name) {
  ASSIGN_OR_RETURN(const v1::LocateResponse response,
                   server_->Call(&Server::Stub::Locate, About<v1::LocateRequest>(name), name,
                                 server_->deadline));
  return response.address();
}

absl::Status ContextClient::Delete(const std::string& name) {
  return server_
      ->Call(&Server::Stub::Delete, About<v1::DeleteRequest>(name), name, server_->deadline)
      .status();
}

}  // namespace carrel::kvstore
