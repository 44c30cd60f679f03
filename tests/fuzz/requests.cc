// Requests of a session as they come from the wire, against a small context: conversion, validation, and what
// the engine does with those that pass.
#include <future>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "carrel/v1/retrieval.pb.h"
#include "google/protobuf/stubs/logging.h"
#include "kvstore/engine/engine.h"
#include "kvstore/engine/session.h"
#include "kvstore/engine/test_context.h"
#include "kvstore/service/convert.h"
#include "kvstore/storage/store.h"
#include "tests/fuzz/target.h"

namespace carrel::fuzz {
namespace {

using namespace carrel::kvstore;  // NOLINT: all of this file is about it

// Protobuf writes a line about every string that is no UTF-8.
[[maybe_unused]] const bool quiet = (google::protobuf::SetLogHandler(nullptr), true);

constexpr int64_t kTokens = 160;

const RandomContext& Context() {
  static const RandomContext context(
      {.shape = {.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 8},
       .tokens = kTokens,
       .segment_tokens = 64,
       .index = {.m = 4, .ef_construction = 16},
       .summary_rows = 8,
       .query_drift = true});
  return context;
}

Engine& TheEngine() {
  static Engine& engine = [&]() -> Engine& {
    WriteInput("store/empty", "");
    auto store = Store::Open(Folder() + "/store/db", StoreMode::kReadWrite);
    CARREL_FUZZ_CHECK(store.ok());
    CARREL_FUZZ_CHECK(Context().Publish(**store, Folder() + "/store").ok());
    auto made = Engine::Create({.search_threads = 1, .max_top_k = 4096}, *std::move(store));
    CARREL_FUZZ_CHECK(made.ok());
    return *made->release();  // as long as the process
  }();
  return engine;
}

template <typename Request>
void AskIfValid(Session& session, uint64_t id, absl::StatusOr<Request> request) {
  if (!request.ok()) return;
  const auto reply = Ask(session, id, *std::move(request));
  if (!reply.ok()) return;
  v1::SessionReply wire;
  for (int part = 0; part < 100000; ++part) {
    wire.Clear();
    CARREL_FUZZ_CHECK(NextPartToWire(**reply, 4096, &wire).ok());
    if (wire.last()) return;
  }
  CARREL_FUZZ_CHECK(wire.last());
}

// The input is one request; each runs in a session of its own, after one that left candidates.
void RunRequest(absl::string_view bytes) {
  v1::SessionRequest request;
  if (!request.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return;
  if (request.has_open()) {
    const auto open = FromWire(request.open());
    if (open.ok()) (void)TheEngine().OpenSession(*open);
    return;
  }
  static const std::vector<float> queries = Context().Queries(1, 5);
  const auto session = TheEngine().OpenSession(Context().Opening());
  CARREL_FUZZ_CHECK(session.ok());
  (void)Ask(**session, 7,
            QueryRequest{{.layer = Layer(1),
                          .tokens = 1,
                          .queries = queries,
                          .selection = select::TopK{5},
                          .speculative = true}});
  if (request.has_query()) {
    AskIfValid(**session, request.request_id(), FromWire(request.query(), *(*session)->context()));
  } else if (request.has_fetch_rows()) {
    AskIfValid(**session, request.request_id(),
               FromWire(request.fetch_rows(), *(*session)->context()));
  }
}

v1::SessionRequest OneQuery() {
  const std::vector<float> queries = Context().Queries(1, 3);
  v1::SessionRequest request;
  request.set_request_id(1);
  v1::Query& query = *request.mutable_query();
  query.set_layer(1);
  query.mutable_queries()->set_dtype(v1::Tensor::F32);
  for (const int64_t size : {1, 4, 8}) query.mutable_queries()->add_shape(size);
  query.mutable_queries()->set_data(queries.data(), queries.size() * sizeof(float));
  query.mutable_select()->set_top_k(7);
  query.set_want(v1::IDS);
  return request;
}

std::vector<std::string> RequestSeeds() {
  std::vector<std::string> seeds;
  v1::SessionRequest open;
  open.set_request_id(1);
  open.mutable_open()->set_context("report");
  open.mutable_open()->set_sink(4);
  open.mutable_open()->set_local(60);
  open.mutable_open()->set_query_drift(true);
  for (const auto& [name, value] : Context().spec().fingerprint) {
    auto* field = open.mutable_open()->mutable_fingerprint()->add_fields();
    field->set_name(name);
    field->set_value(value);
  }
  seeds.push_back(open.SerializeAsString());
  for (int want = 1; want <= 4; ++want) {
    v1::SessionRequest query = OneQuery();
    query.mutable_query()->set_want(static_cast<v1::Want>(want));
    query.mutable_query()->set_estimate(want == v1::ATTEND);
    seeds.push_back(query.SerializeAsString());
  }
  v1::SessionRequest among = OneQuery();
  among.mutable_query()->set_among_candidates_of(7);
  seeds.push_back(among.SerializeAsString());
  v1::SessionRequest fetch;
  fetch.set_request_id(2);
  fetch.mutable_fetch_rows()->set_layer(0);
  fetch.mutable_fetch_rows()->mutable_range()->set_begin(2);
  fetch.mutable_fetch_rows()->mutable_range()->set_end(6);
  seeds.push_back(fetch.SerializeAsString());
  return seeds;
}

CARREL_FUZZ_TARGET(request, RunRequest, RequestSeeds);

}  // namespace
}  // namespace carrel::fuzz
