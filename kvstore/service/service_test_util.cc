#include "kvstore/service/service_test_util.h"

#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace carrel::kvstore {
namespace {

grpc::ByteBuffer Bytes(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

std::string String(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  std::string bytes;
  if (!buffer.Dump(&slices).ok()) return bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return bytes;
}

// Null if the operation failed.
void* Await(grpc::CompletionQueue& queue) {
  void* tag = nullptr;
  bool ok = false;
  return queue.Next(&tag, &ok) && ok ? &queue : nullptr;
}

void AppendFloats(const v1::Tensor& tensor, std::vector<float>& to) {
  const size_t count = tensor.data().size() / sizeof(float);
  to.resize(to.size() + count);
  if (count == 0) return;
  std::memcpy(&to[to.size() - count], tensor.data().data(), count * sizeof(float));
}

}  // namespace

v1::Open WireOpen(const OpenRequest& request) {
  v1::Open open;
  open.set_context(request.context);
  for (const auto& [name, value] : request.fingerprint) {
    v1::Fingerprint::Field* field = open.mutable_fingerprint()->add_fields();
    field->set_name(name);
    field->set_value(value);
  }
  open.set_sink(request.sink);
  open.set_local(request.local);
  open.set_query_drift(request.query_drift);
  open.set_content_id(request.content_id);
  return open;
}

v1::Query WireQuery(const QueryRequest& request, const AttentionShape& shape) {
  v1::Query query;
  query.set_layer(request.layer.value());
  query.mutable_queries()->set_dtype(v1::Tensor::F32);
  for (int64_t size : {request.tokens, int64_t{shape.q_heads}, int64_t{shape.head_dim}}) {
    query.mutable_queries()->add_shape(size);
  }
  query.mutable_queries()->set_data(request.queries.data(), request.queries.size() * 4);
  if (select::IsAll(request.selection)) {
    query.mutable_select()->set_all(true);
  } else {
    query.mutable_select()->set_top_k(std::get<select::TopK>(request.selection).rows);
  }
  constexpr v1::Want kWants[] = {v1::IDS, v1::ROWS, v1::VALUES, v1::ATTEND};
  query.set_want(kWants[static_cast<int>(request.want)]);
  query.set_speculative(request.speculative);
  query.set_among_candidates_of(request.among_candidates_of);
  query.set_measure_mass(request.measure_mass);
  query.set_effort(static_cast<uint32_t>(request.effort));
  for (size_t head = 0; head < request.held.size(); ++head) {
    v1::HeldRows& held = *query.add_held();
    held.set_kv_head(static_cast<uint32_t>(head));
    Position last = 0;
    for (const Position id : request.held[head]) {
      held.add_steps(static_cast<uint64_t>(id - last));
      last = id;
    }
  }
  return query;
}

WireSession::WireSession(const std::shared_ptr<grpc::Channel>& channel, const std::string& key)
    : stub_(v1::RetrievalService::NewStub(channel)) {
  if (!key.empty()) context_.AddMetadata("authorization", "Bearer " + key);
  stream_ = stub_->Session(&context_);
}

WireSession::~WireSession() {
  if (finished_) return;
  context_.TryCancel();
  Finish();
}

bool WireSession::SendOpen(const v1::Open& open, uint64_t id) {
  v1::SessionRequest request;
  request.set_request_id(id);
  *request.mutable_open() = open;
  return Send(request);
}

bool WireSession::SendQuery(uint64_t id, const v1::Query& query) {
  v1::SessionRequest request;
  request.set_request_id(id);
  *request.mutable_query() = query;
  return Send(request);
}

bool WireSession::SendFetch(uint64_t id, const v1::FetchRows& fetch) {
  v1::SessionRequest request;
  request.set_request_id(id);
  *request.mutable_fetch_rows() = fetch;
  return Send(request);
}

Parts WireSession::Receive(uint64_t id) {
  while (parts_[id].empty() || !parts_[id].back().last()) {
    v1::SessionReply reply;
    if (!stream_->Read(&reply)) return {};
    parts_[reply.request_id()].push_back(std::move(reply));
  }
  Parts parts = std::move(parts_[id]);
  parts_.erase(id);
  return parts;
}

v1::OpenReply WireSession::Open(const OpenRequest& request) {
  SendOpen(WireOpen(request));
  const Parts parts = Receive(1);
  if (parts.size() == 1 && parts[0].has_open()) return parts[0].open();
  ADD_FAILURE() << "open: " << Finish().error_message();
  return {};
}

grpc::Status WireSession::Finish() {
  finished_ = true;
  for (v1::SessionReply reply; stream_->Read(&reply);) {
  }
  return stream_->Finish();
}

std::vector<CollectedHead> CollectWire(const Parts& parts, int64_t tokens, int64_t kv_heads) {
  std::vector<CollectedHead> heads(static_cast<size_t>(tokens * kv_heads));
  for (const v1::SessionReply& part : parts) {
    EXPECT_FALSE(part.has_error()) << part.error().message();
    for (const v1::HeadResult& from : part.query().heads()) {
      CollectedHead& to = heads.at(from.token() * kv_heads + from.kv_head());
      const size_t rows = from.ids().data().size() / 8, before = to.ids.size();
      to.ids.resize(before + rows);
      if (rows > 0) std::memcpy(&to.ids[before], from.ids().data().data(), rows * 8);
      std::vector<float> scores;
      AppendFloats(from.scores(), scores);
      const size_t group = from.has_scores() ? from.scores().shape(0) : 0;
      if (rows > 0) to.scores.resize(std::max(to.scores.size(), group));
      for (size_t h = 0; rows > 0 && h < group; ++h) {
        to.scores[h].insert(to.scores[h].end(), scores.begin() + h * rows,
                            scores.begin() + (h + 1) * rows);
      }
      to.k += from.k().data();
      to.v += from.v().data();
      AppendFloats(from.out(), to.out);
      AppendFloats(from.lse(), to.lse);
      AppendFloats(from.zone_lse(), to.zone_lse);
      AppendFloats(from.rest(), to.rest);
    }
  }
  return heads;
}

grpc::Status SendRaw(const std::shared_ptr<grpc::Channel>& channel,
                     const std::vector<std::string>& messages) {
  grpc::GenericStub stub(channel);
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  const auto call = stub.PrepareCall(&context, "/carrel.v1.RetrievalService/Session", &queue);
  call->StartCall(&queue);
  Await(queue);
  for (const std::string& message : messages) {
    call->Write(Bytes(message), &queue);
    if (Await(queue) == nullptr) break;
  }
  call->WritesDone(&queue);
  Await(queue);
  grpc::ByteBuffer reply;  // written to by the queue, in Await
  do {
    call->Read(&reply, &queue);
  } while (Await(queue) != nullptr);
  grpc::Status status;
  call->Finish(&status, &queue);
  Await(queue);
  return status;
}

std::string HealthOf(const std::shared_ptr<grpc::Channel>& channel, const std::string& service) {
  // HealthCheckRequest{service = 1}; HealthCheckResponse{status = 1}.
  const std::string request =
      service.empty() ? "" : absl::StrCat("\x0a", std::string(1, char(service.size())), service);
  grpc::GenericStub stub(channel);
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  grpc::ByteBuffer reply;
  grpc::Status status;
  const auto call =
      stub.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check", Bytes(request), &queue);
  call->StartCall();
  call->Finish(&reply, &status, &queue);
  Await(queue);
  if (!status.ok()) return status.error_message();
  const std::string bytes = String(reply);
  if (bytes == std::string("\x08\x01")) return "SERVING";
  if (bytes == std::string("\x08\x02")) return "NOT_SERVING";
  return "unexpected bytes";
}

std::string ReflectedServices(const std::shared_ptr<grpc::Channel>& channel) {
  // ServerReflectionRequest{list_services = 7}.
  grpc::GenericStub stub(channel);
  grpc::CompletionQueue queue;
  grpc::ClientContext context;
  const auto call = stub.PrepareCall(
      &context, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue);
  call->StartCall(&queue);
  Await(queue);
  call->Write(Bytes(std::string("\x3a\x01*", 3)), &queue);
  Await(queue);
  grpc::ByteBuffer reply;
  call->Read(&reply, &queue);
  const bool read = Await(queue) != nullptr;
  context.TryCancel();
  grpc::Status status;
  call->Finish(&status, &queue);
  Await(queue);
  return read ? String(reply) : status.error_message();
}

}  // namespace carrel::kvstore
