#include "kvstore/service/context_client.h"

#include <grpcpp/grpcpp.h>

#include <array>
#include <cstring>

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

void Present(grpc::ClientContext& context, const std::string& key) {
  if (!key.empty()) context.AddMetadata("authorization", "Bearer " + key);
}

// name: of the context that the call is about; empty: of none.
void SetUp(grpc::ClientContext& context, absl::Duration deadline, const std::string& key,
           const std::string& name = "") {
  if (deadline != absl::InfiniteDuration()) {
    context.set_deadline(absl::ToChronoTime(absl::Now() + deadline));
  }
  Present(context, key);
  if (!name.empty()) context.AddMetadata(kContextHeader, ContextHeaderValue(name));
}

}  // namespace

struct ContextClient::Stub {
  std::unique_ptr<v1::ContextService::Stub> service;
};

ContextClient::ContextClient(std::shared_ptr<grpc::Channel> channel, std::string address,
                             absl::Duration deadline, std::string key, ConnectionHints hints)
    : stub_(std::make_unique<Stub>(Stub{v1::ContextService::NewStub(std::move(channel))})),
      address_(std::move(address)),
      deadline_(deadline),
      key_(std::move(key)),
      hints_(std::move(hints)) {}

ContextClient::~ContextClient() = default;

// Who answers, for failures of the connection; what the server itself says stays as it is.
absl::Status ContextClient::Annotated(int code, const std::string& message) const {
  const absl::Status status(static_cast<absl::StatusCode>(code), message);
  if (!absl::IsUnavailable(status) && !absl::IsDeadlineExceeded(status)) return status;
  // How gRPC words what a server of TLS does with a client that does not speak it.
  const bool tls = hints_.plain && (absl::StrContains(message, "Socket closed") ||
                                    absl::StrContains(message, "http1.x") ||
                                    absl::StrContains(message, "Connection reset"));
  return absl::UnavailableError(absl::StrCat("server ", address_, ": ", message,
                                             tls ? " (does the server want TLS? --tls-ca)" : "",
                                             hints_.proxy));
}

absl::StatusOr<v1::ListResponse> ContextClient::List() {
  grpc::ClientContext context;
  SetUp(context, deadline_, key_);
  v1::ListResponse response;
  const grpc::Status status = stub_->service->List(&context, v1::ListRequest(), &response);
  if (!status.ok()) return Annotated(status.error_code(), status.error_message());
  return response;
}

absl::StatusOr<v1::StatisticsResponse> ContextClient::Statistics() {
  grpc::ClientContext context;
  SetUp(context, deadline_, key_);
  v1::StatisticsResponse response;
  const grpc::Status status =
      stub_->service->Statistics(&context, v1::StatisticsRequest(), &response);
  if (!status.ok()) return Annotated(status.error_code(), status.error_message());
  return response;
}

absl::StatusOr<v1::Manifest> ContextClient::Get(const std::string& name) {
  grpc::ClientContext context;
  SetUp(context, deadline_, key_, name);
  v1::GetRequest request;
  request.set_name(name);
  v1::GetResponse response;
  const grpc::Status status = stub_->service->Get(&context, request, &response);
  if (!status.ok()) return Annotated(status.error_code(), status.error_message());
  return response.manifest();
}

absl::StatusOr<std::vector<TokenId>> ContextClient::Tokens(const std::string& name,
                                                           const std::string& content_id) {
  v1::TokensRequest request;
  request.set_name(name);
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
      return absl::DataLossError(absl::StrCat("context \"", name, "\" of ", address_,
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
  const absl::Time until = absl::Now() + deadline_;
  for (;;) {
    grpc::ClientContext context;
    SetUp(context, deadline_, key_, request.name());
    v1::TokensResponse response;
    const grpc::Status status = stub_->service->Tokens(&context, request, &response);
    if (status.ok()) return response;
    const bool again = request.begin() > 0 && absl::Now() < until &&
                       status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED;
    if (!again) return Annotated(status.error_code(), status.error_message());
    absl::SleepFor(kAskAgain);
  }
}

absl::StatusOr<v1::VerifyResponse> ContextClient::Verify(const std::string& name, bool deep) {
  grpc::ClientContext context;
  SetUp(context, absl::InfiniteDuration(), key_, name);
  v1::VerifyRequest request;
  request.set_name(name);
  request.set_deep(deep);
  v1::VerifyResponse response;
  const grpc::Status status = stub_->service->Verify(&context, request, &response);
  if (!status.ok()) return Annotated(status.error_code(), status.error_message());
  return response;
}

absl::Status ContextClient::Export(const std::string& name,
                                   absl::FunctionRef<absl::Status(absl::string_view)> sink) {
  grpc::ClientContext context;
  SetUp(context, absl::InfiniteDuration(), key_, name);
  v1::ExportRequest request;
  request.set_name(name);
  const auto reader = stub_->service->Export(&context, request);
  v1::ExportPiece piece;
  absl::Status taken;
  while (taken.ok() && reader->Read(&piece)) taken = sink(piece.data());
  if (!taken.ok()) context.TryCancel();
  const grpc::Status status = reader->Finish();
  if (!taken.ok()) return taken;
  return Annotated(status.error_code(), status.error_message());
}

absl::StatusOr<v1::ImportReply> ContextClient::Import(
    const std::string& name,
    absl::FunctionRef<absl::StatusOr<absl::string_view>(int64_t offset)> source,
    absl::FunctionRef<void(int64_t position, int64_t bytes)> progress) {
  grpc::ClientContext context;
  SetUp(context, absl::InfiniteDuration(), key_, name);
  const auto stream = stub_->service->Import(&context);
  v1::ImportReply reply;
  v1::ImportRequest request;
  request.set_name(name);
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
  if (!status.ok()) return Annotated(status.error_code(), status.error_message());
  return reply;
}

absl::Status ContextClient::AskImport(const std::string& name) {
  grpc::ClientContext context;
  SetUp(context, deadline_, key_, name);
  const auto stream = stub_->service->Import(&context);
  v1::ImportRequest request;
  request.set_name(name);
  v1::ImportReply reply;
  const bool may = stream->Write(request) && stream->Read(&reply);
  stream->WritesDone();
  const grpc::Status status = stream->Finish();  // of an import that did not go on
  return may ? absl::OkStatus() : Annotated(status.error_code(), status.error_message());
}

absl::StatusOr<int64_t> ContextClient::SendAhead(const std::string& name, ContextId id,
                                                 int64_t file, absl::string_view bytes,
                                                 absl::FunctionRef<bool()> go_on) {
  Sha256 sha;
  sha.Update(bytes);
  const std::array<uint8_t, 32> digest = sha.Finish();
  const absl::string_view end(reinterpret_cast<const char*>(digest.data()), digest.size());
  const auto size = static_cast<int64_t>(bytes.size());
  grpc::ClientContext context;
  SetUp(context, absl::InfiniteDuration(), key_, name);
  const auto stream = stub_->service->Import(&context);
  v1::ImportReply reply;
  v1::ImportRequest request;
  request.set_name(name);
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
  if (!status.ok()) return Annotated(status.error_code(), status.error_message());
  return sent;
}

absl::Status ContextClient::Warm(const std::string& name,
                                 absl::FunctionRef<bool(const v1::WarmReply&)> progress) {
  grpc::ClientContext context;
  SetUp(context, absl::InfiniteDuration(), key_, name);
  v1::WarmRequest request;
  request.set_name(name);
  const auto reader = stub_->service->Warm(&context, request);
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
  if (!status.ok()) return Annotated(status.error_code(), status.error_message());
  return absl::UnavailableError(
      absl::StrCat("server ", address_, ": it stopped without saying that \"", name, "\" is here"));
}

absl::StatusOr<std::string> ContextClient::Locate(const std::string& name) {
  grpc::ClientContext context;
  SetUp(context, deadline_, key_, name);
  v1::LocateRequest request;
  request.set_name(name);
  v1::LocateResponse response;
  const grpc::Status status = stub_->service->Locate(&context, request, &response);
  if (!status.ok()) return Annotated(status.error_code(), status.error_message());
  return response.address();
}

absl::Status ContextClient::Delete(const std::string& name) {
  grpc::ClientContext context;
  SetUp(context, deadline_, key_, name);
  v1::DeleteRequest request;
  request.set_name(name);
  v1::DeleteResponse response;
  const grpc::Status status = stub_->service->Delete(&context, request, &response);
  return Annotated(status.error_code(), status.error_message());
}

}  // namespace carrel::kvstore
