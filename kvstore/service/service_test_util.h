// What: a client of the wire for tests: one session as plain calls, health and reflection by their
//       raw bytes. Tests only.
#pragma once

#include <grpcpp/grpcpp.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "carrel/v1/retrieval.grpc.pb.h"
#include "kvstore/engine/test_context.h"

namespace carrel::kvstore {

v1::Open WireOpen(const OpenRequest& request);
v1::Query WireQuery(const QueryRequest& request, const AttentionShape& shape);

// A reply's parts.
using Parts = std::vector<v1::SessionReply>;

class WireSession {
 public:
  // key: presented; empty: none.
  explicit WireSession(const std::shared_ptr<grpc::Channel>& channel, const std::string& key = "");
  ~WireSession();  // cancels what is not finished

  bool Send(const v1::SessionRequest& request) { return stream_->Write(request); }
  bool SendOpen(const v1::Open& open, uint64_t id = 1);
  bool SendQuery(uint64_t id, const v1::Query& query);
  bool SendFetch(uint64_t id, const v1::FetchRows& fetch);
  // The parts of a request, read until they are there; those of others are kept for them. Empty if
  // the stream ended first.
  Parts Receive(uint64_t id);
  // Opens and expects it to succeed.
  v1::OpenReply Open(const OpenRequest& request);

  void CloseSending() { stream_->WritesDone(); }
  void Cancel() { context_.TryCancel(); }
  // Reads to the end of the stream.
  grpc::Status Finish();

 private:
  std::unique_ptr<v1::RetrievalService::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::SessionRequest, v1::SessionReply>> stream_;
  std::map<uint64_t, Parts> parts_;
  bool finished_ = false;
};

// What Collect gives for the engine's reply.
std::vector<CollectedHead> CollectWire(const Parts& parts, int64_t tokens, int64_t kv_heads);

// Sends messages of any bytes over one Session stream, closes it and waits for its end.
grpc::Status SendRaw(const std::shared_ptr<grpc::Channel>& channel,
                     const std::vector<std::string>& messages);

// SERVING, NOT_SERVING, or what else the call said.
std::string HealthOf(const std::shared_ptr<grpc::Channel>& channel, const std::string& service);
// The raw answer to list_services, which holds their names.
std::string ReflectedServices(const std::shared_ptr<grpc::Channel>& channel);

}  // namespace carrel::kvstore
