// What: one decoder's query over a Unix socket and in process: sent, answered, received wholly.
//       Warm: every row was read before. Arguments: tokens of the context, top_k (0: all).
#include <benchmark/benchmark.h>
#include <spdlog/spdlog.h>
#include <stdlib.h>

#include <filesystem>

#include "common/status.h"
#include "kvstore/engine/engine.h"
#include "kvstore/service/server.h"
#include "kvstore/service/service_test_util.h"
#include "kvstore/storage/store.h"

namespace carrel::kvstore {
namespace {

struct Setup {
  explicit Setup(int64_t tokens) {
    char name[] = "/tmp/carrel_bench_XXXXXX";
    CARREL_CHECK(mkdtemp(name) != nullptr);
    folder = name;
    RandomContextSpec spec;
    spec.shape = {.layers = 1, .q_heads = 8, .kv_heads = 2, .head_dim = 64};
    spec.tokens = tokens;
    spec.segment_tokens = 65536;
    context = std::make_unique<RandomContext>(spec);
    engine = *Engine::Create({}, MakeStore(folder, {context.get()}));
    ServerConfig config;
    config.listen = {"unix:" + folder + "/socket"};
    server = *Server::Start(config, engine.get());
  }
  ~Setup() {
    server.reset();
    engine.reset();
    std::filesystem::remove_all(folder);
  }
  std::string folder;
  std::unique_ptr<RandomContext> context;
  std::unique_ptr<Engine> engine;
  std::unique_ptr<Server> server;
};

void BM_Query(benchmark::State& state, Want want, bool in_process) {
  Setup setup(state.range(0));
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  WireSession session(in_process ? setup.server->InProcessChannel()
                                 : grpc::CreateCustomChannel(setup.server->addresses()[0],
                                                             grpc::InsecureChannelCredentials(),
                                                             arguments));
  session.Open(setup.context->Opening());
  QueryRequest request;
  request.tokens = 1;
  request.queries = setup.context->Queries(1, 7);
  request.want = want;
  request.selection = select::TopK{state.range(1)};
  if (state.range(1) == 0) request.selection = select::All();
  const v1::Query query = WireQuery(request, setup.context->spec().shape);
  uint64_t id = 1;
  int64_t bytes = 0, search_us = 0;
  const auto ask = [&] {
    session.SendQuery(++id, query);
    const Parts parts = session.Receive(id);
    CARREL_CHECK(!parts.empty() && !parts.back().has_error());
    for (const v1::SessionReply& part : parts) bytes += static_cast<int64_t>(part.ByteSizeLong());
    search_us += parts.back().query().statistics().search_us();
    return parts;
  };
  const std::vector<CollectedHead> heads = CollectWire(ask(), 1, 2);
  for (const CollectedHead& head : heads) {
    const size_t rows = state.range(1) == 0 ? state.range(0) - 64 : state.range(1);
    CARREL_CHECK(want == Want::kAttend ? head.out.size() == 4 * 64 : head.ids.size() == rows);
  }
  bytes = search_us = 0;
  for (auto _ : state) ask();
  state.SetBytesProcessed(bytes);
  state.counters["search_us"] =
      benchmark::Counter(static_cast<double>(search_us), benchmark::Counter::kAvgIterations);
}

void Cases(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"tokens", "top_k"})->Unit(benchmark::kMicrosecond)->UseRealTime();
  bench->Args({8192, 128})->Args({32768, 128})->Args({32768, 0});
}

BENCHMARK_CAPTURE(BM_Query, attend_unix, Want::kAttend, false)->Apply(Cases);
BENCHMARK_CAPTURE(BM_Query, rows_unix, Want::kRows, false)->Apply(Cases);
BENCHMARK_CAPTURE(BM_Query, attend_in_process, Want::kAttend, true)->Apply(Cases);
BENCHMARK_CAPTURE(BM_Query, rows_in_process, Want::kRows, true)->Apply(Cases);

}  // namespace
}  // namespace carrel::kvstore

int main(int argc, char** argv) {
  spdlog::set_level(spdlog::level::off);
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
