// What:    the client of ContextService: what a store holds, for people and tools.
// Errors:  what the server answers, code kept; Unavailable no server at the address (names it).
// Threads: any.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace grpc {
class Channel;
}

namespace carrel::v1 {
class ListResponse;
class StatisticsResponse;
class Manifest;
class VerifyResponse;
}  // namespace carrel::v1

namespace carrel::kvstore {

class ContextClient {
 public:
  // address: of the server, for messages. deadline: of each call.
  ContextClient(std::shared_ptr<grpc::Channel> channel, std::string address,
                absl::Duration deadline);
  ~ContextClient();

  absl::StatusOr<v1::ListResponse> List();
  absl::StatusOr<v1::Manifest> Get(const std::string& name);
  absl::StatusOr<v1::StatisticsResponse> Statistics();
  // Takes as long as the context is large: no deadline.
  absl::StatusOr<v1::VerifyResponse> Verify(const std::string& name, bool deep);
  absl::Status Delete(const std::string& name);

 private:
  struct Stub;
  absl::Status Annotated(int code, const std::string& message) const;
  const std::unique_ptr<Stub> stub_;
  const std::string address_;
  const absl::Duration deadline_;
};

}  // namespace carrel::kvstore
