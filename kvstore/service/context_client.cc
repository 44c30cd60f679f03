#include "kvstore/service/context_client.h"

#include <grpcpp/grpcpp.h>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "carrel/v1/context.grpc.pb.h"

namespace carrel::kvstore {
namespace {

void SetDeadline(grpc::ClientContext& context, absl::Duration deadline) {
  context.set_deadline(absl::ToChronoTime(absl::Now() + deadline));
}

}  // namespace

struct ContextClient::Stub {
  std::unique_ptr<v1::ContextService::Stub> service;
};

ContextClient::ContextClient(std::shared_ptr<grpc::Channel> channel, std::string address,
                             absl::Duration deadline)
    : stub_(std::make_unique<Stub>(Stub{v1::ContextService::NewStub(std::move(channel))})),
      address_(std::move(address)),
      deadline_(deadline) {}

ContextClient::~ContextClient() = default;

// Who answers, for failures of the connection; what the server itself says stays as it is.
absl::Status ContextClient::Annotated(int code, const std::string& message) const {
  const absl::Status status(static_cast<absl::StatusCode>(code), message);
  const bool connection = absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status);
  return connection ? absl::UnavailableError(absl::StrCat("server ", address_, ": ", message))
                    : status;
}

absl::StatusOr<v1::ListResponse> ContextClient::List() {
  grpc::ClientContext context;
  SetDeadline(context, deadline_);
  v1::ListResponse response;
  const grpc::Status status = stub_->service->List(&context, v1::ListRequest(), &response);
  if (!status.ok()) return Annotated(status.error_code(), status.error_message());
  return response;
}

absl::StatusOr<v1::StatisticsResponse> ContextClient::Statistics() {
  grpc::ClientContext context;
  SetDeadline(context, deadline_);
  v1::StatisticsResponse response;
  const grpc::Status status =
      stub_->service->Statistics(&context, v1::StatisticsRequest(), &response);
  if (!status.ok()) return Annotated(status.error_code(), status.error_message());
  return response;
}

absl::StatusOr<v1::Manifest> ContextClient::Get(const std::string& name) {
  grpc::ClientContext context;
  SetDeadline(context, deadline_);
  v1::GetRequest request;
  request.set_name(name);
  v1::GetResponse response;
  const grpc::Status status = stub_->service->Get(&context, request, &response);
  if (!status.ok()) return Annotated(status.error_code(), status.error_message());
  return response.manifest();
}

absl::StatusOr<v1::VerifyResponse> ContextClient::Verify(const std::string& name, bool deep) {
  grpc::ClientContext context;
  v1::VerifyRequest request;
  request.set_name(name);
  request.set_deep(deep);
  v1::VerifyResponse response;
  const grpc::Status status = stub_->service->Verify(&context, request, &response);
  if (!status.ok()) return Annotated(status.error_code(), status.error_message());
  return response;
}

absl::Status ContextClient::Delete(const std::string& name) {
  grpc::ClientContext context;
  SetDeadline(context, deadline_);
  v1::DeleteRequest request;
  request.set_name(name);
  v1::DeleteResponse response;
  const grpc::Status status = stub_->service->Delete(&context, request, &response);
  return Annotated(status.error_code(), status.error_message());
}

}  // namespace carrel::kvstore
