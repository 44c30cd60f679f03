// Rates of the kernels on one thread. Every benchmark first compares its result with the reference
// and stops with an error if they differ; sizes are those of small models and of Llama-3.1-8B.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "kernels/attention/merge_states/merge_states.h"
#include "kernels/attention/prefill_attention/prefill_attention.h"
#include "kernels/attention/sparse_attention/sparse_attention.h"
#include "kernels/attention/window_attention/window_attention.h"
#include "kernels/layer/linear/linear.h"
#include "kernels/layer/quantized_linear/quantized_linear.h"
#include "kernels/layer/rms_norm/rms_norm.h"
#include "kernels/layer/rope/rope.h"
#include "kernels/layer/silu_mul/silu_mul.h"
#include "kernels/score/dot_score/dot_score.h"
#include "kernels/score/group_score/group_score.h"
#include "kernels/score/max_score/max_score.h"
#include "kernels/select/topk/topk.h"

namespace carrel::kernels {
namespace {

using Floats = std::vector<float>;

Floats Normal(int64_t count, uint64_t seed) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<float> normal;
  Floats values(static_cast<size_t>(count));
  for (float& x : values) x = normal(rng);
  return values;
}

std::vector<uint16_t> Bf16Normal(int64_t count, uint64_t seed) {
  const Floats values = Normal(count, seed);
  std::vector<uint16_t> bits(values.size());
  FloatToBf16(values, bits.data());
  return bits;
}

// False, and the benchmark ends, if ||out - ref|| > tolerance ||ref||.
bool Check(benchmark::State& state, const Floats& out, const Floats& ref, double tolerance = 1e-5) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    error += std::pow(double{out[i]} - double{ref[i]}, 2);
    norm += std::pow(double{ref[i]}, 2);
  }
  if (std::sqrt(error) <= tolerance * std::sqrt(norm)) return true;
  state.SkipWithError("the result differs from the reference");
  return false;
}

void SetRate(benchmark::State& state, const char* name, double per_iteration) {
  state.counters[name] =
      benchmark::Counter(per_iteration / 1e9, benchmark::Counter::kIsIterationInvariantRate);
}

// Rows in random order, as a search returns them.
std::vector<const void*> Scatter(const std::vector<uint16_t>& rows, int64_t dim) {
  std::vector<const void*> pointers;
  for (size_t i = 0; i < rows.size(); i += static_cast<size_t>(dim)) pointers.push_back(&rows[i]);
  std::shuffle(pointers.begin(), pointers.end(), std::mt19937_64(7));
  return pointers;
}

void BM_PrefillAttention(benchmark::State& state) {
  const int64_t dim = state.range(0), first = state.range(1), n = kPrefillQueryTile;
  const Floats q = Normal(n * dim, 1), k = Normal((first + n) * dim, 2);
  const Floats v = Normal((first + n) * dim, 3);
  Floats out(q.size()), ref(q.size());
  Floats scratch(static_cast<size_t>(PrefillAttentionScratchFloats(dim)));
  PrefillAttentionParams params{.q = q.data(),
                                .q_stride = dim,
                                .n = n,
                                .first_position = first,
                                .k = k.data(),
                                .v = v.data(),
                                .head_dim = dim,
                                .scale = 1.0f / std::sqrt(static_cast<float>(dim)),
                                .out = ref.data(),
                                .out_stride = dim};
  RefPrefillAttention(params);
  params.out = out.data();
  PrefillAttention(params, scratch.data());
  if (!Check(state, out, ref)) return;
  for (auto _ : state) PrefillAttention(params, scratch.data());
  const double pairs = static_cast<double>(n) * (static_cast<double>(first) + 0.5 * (n + 1));
  SetRate(state, "GFLOP/s", 4.0 * pairs * static_cast<double>(dim));
}
BENCHMARK(BM_PrefillAttention)
    ->ArgNames({"head_dim", "first"})
    ->Args({64, 0})
    ->Args({64, 2048})
    ->Args({64, 32768})
    ->Args({128, 32768});

void BM_Linear(benchmark::State& state) {
  const int64_t n = state.range(0), in = state.range(1), out = state.range(2);
  const std::vector<uint16_t> weights = Bf16Normal(in * out, 1);
  const WeightMatrix w{weights.data(), DType::kBf16, out, in, nullptr};
  const Floats x = Normal(n * in, 2);
  Floats y(static_cast<size_t>(n * out)), scratch(static_cast<size_t>(LinearScratchFloats(w)));
  Linear(x.data(), n, in, w, y.data(), out, scratch.data());
  // The reference is slow: the first rows of the result stand for all.
  const WeightMatrix head = w.Rows(0, 16);
  Floats part, ref(static_cast<size_t>(n * 16));
  for (int64_t i = 0; i < n; ++i) {
    part.insert(part.end(), y.begin() + i * out, y.begin() + i * out + 16);
  }
  RefLinear(x.data(), n, in, head, ref.data(), 16);
  if (!Check(state, part, ref)) return;
  for (auto _ : state) Linear(x.data(), n, in, w, y.data(), out, scratch.data());
  SetRate(state, "GFLOP/s", 2.0 * static_cast<double>(n * in * out));
  SetRate(state, "weights_GB/s", 2.0 * static_cast<double>(in * out));
}
BENCHMARK(BM_Linear)
    ->ArgNames({"tokens", "in", "out"})
    ->ArgsProduct({{1, 4, 8, 64, 512}, {512}, {1536}})
    ->ArgsProduct({{1, 4, 64}, {4096}, {4096}});

// Blocks of random bytes but for their fp16 numbers, which are between 2^-13 and 2^-11.
std::vector<uint8_t> RandomBlocks(GgufType type, int64_t count) {
  std::mt19937_64 rng(1);
  std::vector<uint8_t> blocks(static_cast<size_t>(GgufBytes(type, count)));
  for (uint8_t& byte : blocks) byte = static_cast<uint8_t>(rng());
  const int64_t bytes = TraitsOf(type).block_bytes;
  const size_t halves = type == GgufType::kQ6_K ? 208 : type == GgufType::kQ2_K ? 80 : 0;
  const bool minimum = type == GgufType::kQ4_1 || type == GgufType::kQ5_1 ||
                       type == GgufType::kQ4_K || type == GgufType::kQ5_K ||
                       type == GgufType::kQ2_K;
  for (size_t i = halves + 1; i < blocks.size(); i += static_cast<size_t>(bytes)) {
    blocks[i] = static_cast<uint8_t>(8 + rng() % 8);
    if (minimum) blocks[i + 2] = static_cast<uint8_t>(8 + rng() % 8);
  }
  return blocks;
}

// As many copies of the weights as 64 MiB hold, one after the other, like the layers of a model: what
// a step reads has left the caches since the last one.
void BM_QuantizedLinear(benchmark::State& state) {
  const auto type = static_cast<GgufType>(state.range(0));
  const int64_t n = state.range(1), in = state.range(2), out = state.range(3);
  const int64_t bytes = GgufBytes(type, in * out);
  const int64_t copies = std::max<int64_t>(1, (int64_t{64} << 20) / bytes);
  const std::vector<uint8_t> blocks = RandomBlocks(type, copies * in * out);
  QuantizedMatrix w{blocks.data(), type, out, in, nullptr};
  const Floats x = Normal(n * in, 2);
  Floats y(static_cast<size_t>(n * out));
  Floats scratch(static_cast<size_t>(QuantizedLinearScratchFloats(w)));
  QuantizedLinear(x.data(), n, in, w, y.data(), out, scratch.data());
  Floats part, ref(static_cast<size_t>(n * 16));
  for (int64_t i = 0; i < n; ++i) {
    part.insert(part.end(), y.begin() + i * out, y.begin() + i * out + 16);
  }
  RefQuantizedLinear(x.data(), n, in, w.Rows(0, 16), ref.data(), 16);
  // Twice what rounding to 16 bits comes to.
  if (!Check(state, part, ref, 1e-4)) return;
  int64_t copy = 0;
  for (auto _ : state) {
    w.data = blocks.data() + copy * bytes;
    copy = (copy + 1) % copies;
    QuantizedLinear(x.data(), n, in, w, y.data(), out, scratch.data());
  }
  state.SetLabel(std::string(TraitsOf(type).name));
  SetRate(state, "GFLOP/s", 2.0 * static_cast<double>(n * in * out));
  SetRate(state, "weights_GB/s", static_cast<double>(bytes));
}
constexpr int64_t kBenchTypes[] = {
    static_cast<int64_t>(GgufType::kQ4_0), static_cast<int64_t>(GgufType::kQ4_1),
    static_cast<int64_t>(GgufType::kQ5_1), static_cast<int64_t>(GgufType::kQ8_0),
    static_cast<int64_t>(GgufType::kQ2_K), static_cast<int64_t>(GgufType::kQ4_K),
    static_cast<int64_t>(GgufType::kQ5_K), static_cast<int64_t>(GgufType::kQ6_K)};
void QuantizedShapes(benchmark::internal::Benchmark* bench) {
  for (const int64_t type : kBenchTypes) {
    for (const int64_t n : {1, 4, 31, 64}) bench->Args({type, n, 4096, 4096});
    bench->Args({type, 256, 1536, 512});
    bench->Args({type, 1, 1536, 576});
  }
  for (const int64_t out : {192, 576, 1536, 49152}) {
    bench->Args({static_cast<int64_t>(GgufType::kQ4_1), 1, 576, out});
  }
  for (const int64_t n : {5, 8, 16, 31, 64, 256}) {
    bench->Args({static_cast<int64_t>(GgufType::kQ4_1), n, 576, 512});
    bench->Args({static_cast<int64_t>(GgufType::kQ4_1), n, 1536, 576});
  }
}
BENCHMARK(BM_QuantizedLinear)->ArgNames({"type", "tokens", "in", "out"})->Apply(QuantizedShapes);

void BM_DotScore(benchmark::State& state) {
  const int64_t group = state.range(0), dim = state.range(1), rows = state.range(2);
  const bool scattered = state.range(3) != 0;
  const std::vector<uint16_t> k = Bf16Normal(rows * dim, 1);
  const std::vector<const void*> pointers = Scatter(k, dim);
  const Floats q = Normal(group * dim, 2);
  Floats out(static_cast<size_t>(group * rows)), ref(out.size());
  const auto run = [&] {
    if (scattered) {
      DotScoreRows(q.data(), group, dim, pointers.data(), rows, 0.125f, out.data(), rows);
    } else {
      DotScore(q.data(), group, dim, k.data(), rows, 0.125f, out.data(), rows);
    }
  };
  std::vector<const void*> order = pointers;
  if (!scattered) std::sort(order.begin(), order.end());
  RefDotScoreRows(q.data(), group, dim, order.data(), rows, 0.125f, ref.data(), rows);
  run();
  if (!Check(state, out, ref)) return;
  for (auto _ : state) run();
  SetRate(state, "GFLOP/s", 2.0 * static_cast<double>(group * rows * dim));
  SetRate(state, "GB/s", 2.0 * static_cast<double>(rows * dim));
}
BENCHMARK(BM_DotScore)
    ->ArgNames({"group", "head_dim", "rows", "scattered"})
    ->ArgsProduct({{1, 4, 12, 60}, {64}, {8192, 32768}, {0, 1}})
    ->Args({4, 128, 524288, 0})
    ->Args({4, 128, 524288, 1});

void BM_MaxScore(benchmark::State& state) {
  const int64_t queries = state.range(0), keys = 2048, dim = 64;
  const Floats q = Normal(queries * dim, 1), k = Normal(keys * dim, 2);
  Floats out(static_cast<size_t>(keys)), ref(out.size());
  const QueryPanels panels(q.data(), queries, dim);
  MaxScore(panels, k.data(), keys, out.data());
  RefMaxScore(q.data(), queries, dim, k.data(), keys, ref.data());
  if (!Check(state, out, ref)) return;
  for (auto _ : state) MaxScore(panels, k.data(), keys, out.data());
  SetRate(state, "GFLOP/s", 2.0 * static_cast<double>(queries * keys * dim));
}
BENCHMARK(BM_MaxScore)->ArgName("queries")->Arg(16)->Arg(64)->Arg(256);

void BM_DotBf16(benchmark::State& state) {
  const int64_t dim = state.range(0), rows = 256;  // in L1 or L2: the call itself
  const std::vector<uint16_t> k = Bf16Normal(rows * dim, 1);
  const auto row = [&](int64_t j) -> const void* { return &k[static_cast<size_t>(j * dim)]; };
  Floats out, ref(static_cast<size_t>(rows)), first(static_cast<size_t>(dim));
  WidenToFloat(DType::kBf16, row(0), dim, first.data());
  std::vector<const void*> order;
  for (int64_t j = 0; j < rows; ++j) {
    order.push_back(row(j));
    out.push_back(DotBf16(row(0), row(j), dim));
  }
  RefDotScoreRows(first.data(), 1, dim, order.data(), rows, 1.0f, ref.data(), rows);
  if (!Check(state, out, ref)) return;
  for (auto _ : state) {
    for (int64_t j = 0; j < rows; ++j) benchmark::DoNotOptimize(DotBf16(row(0), row(j), dim));
  }
  state.SetItemsProcessed(state.iterations() * rows);
}
BENCHMARK(BM_DotBf16)->ArgName("head_dim")->Arg(64)->Arg(128);

void BM_SparseAttention(benchmark::State& state) {
  const int64_t group = state.range(0), dim = state.range(1), rows = state.range(2);
  const std::vector<uint16_t> k = Bf16Normal(rows * dim, 1), v = Bf16Normal(rows * dim, 2);
  const std::vector<const void*> k_rows = Scatter(k, dim), v_rows = Scatter(v, dim);
  const Floats q = Normal(group * dim, 3);
  Floats scores(static_cast<size_t>(group * rows)), lse(static_cast<size_t>(group));
  Floats out(q.size()), ref(q.size());
  SparseAttentionParams params{.q = q.data(),
                               .group = group,
                               .k = k_rows.data(),
                               .v = v_rows.data(),
                               .rows = rows,
                               .head_dim = dim,
                               .scale = 1.0f / std::sqrt(static_cast<float>(dim)),
                               .scores = scores.data(),
                               .out = ref.data(),
                               .lse = lse.data()};
  RefSparseAttention(params);
  params.out = out.data();
  SparseAttention(params);
  if (!Check(state, out, ref)) return;
  for (auto _ : state) SparseAttention(params);
  SetRate(state, "GFLOP/s", 4.0 * static_cast<double>(group * rows * dim));
  SetRate(state, "GB/s", 4.0 * static_cast<double>(rows * dim));
}
BENCHMARK(BM_SparseAttention)
    ->ArgNames({"group", "head_dim", "rows"})
    ->Args({4, 64, 128})
    ->Args({4, 64, 32768})
    ->Args({4, 128, 1024})
    ->Args({8, 128, 262144});

void BM_WindowAttention(benchmark::State& state) {
  const int64_t group = 4, dim = state.range(0), rows = state.range(1);
  const Floats k = Normal(rows * dim, 1), v = Normal(rows * dim, 2), q = Normal(group * dim, 3);
  Floats out(q.size()), ref(q.size()), lse(static_cast<size_t>(group));
  Floats scratch(static_cast<size_t>(group * rows));
  WindowAttentionParams params{.q = q.data(),
                               .group = group,
                               .k = k.data(),
                               .v = v.data(),
                               .rows = rows,
                               .head_dim = dim,
                               .scale = 1.0f / std::sqrt(static_cast<float>(dim)),
                               .out = ref.data(),
                               .lse = lse.data()};
  RefWindowAttention(params);
  params.out = out.data();
  WindowAttention(params, scratch.data());
  if (!Check(state, out, ref)) return;
  for (auto _ : state) WindowAttention(params, scratch.data());
  SetRate(state, "GFLOP/s", 4.0 * static_cast<double>(group * rows * dim));
  SetRate(state, "GB/s", 8.0 * static_cast<double>(rows * dim));
}
BENCHMARK(BM_WindowAttention)->ArgNames({"head_dim", "rows"})->Args({64, 128})->Args({128, 1024});

void BM_TopK(benchmark::State& state) {
  const int64_t n = state.range(0), k = state.range(1);
  const Floats scores = Normal(n, 1);
  std::vector<int64_t> out(static_cast<size_t>(k)), ref(static_cast<size_t>(k));
  std::vector<uint64_t> scratch;
  TopK(scores.data(), n, k, out.data(), scratch);
  RefTopK(scores.data(), n, k, ref.data());
  if (out != ref) return state.SkipWithError("the result differs from the reference");
  for (auto _ : state) TopK(scores.data(), n, k, out.data(), scratch);
  SetRate(state, "Gscores/s", static_cast<double>(n));
}
BENCHMARK(BM_TopK)
    ->ArgNames({"n", "k"})
    ->Args({8192, 128})
    ->Args({32768, 128})
    ->Args({1048576, 128})
    ->Args({1048576, 4096});

void BM_GroupScore(benchmark::State& state) {
  const int64_t group = 4, rows = 32768;
  const Floats scores = Normal(group * rows, 1), base = Normal(group, 2);
  Floats out(static_cast<size_t>(rows)), ref(out.size());
  GroupScore(scores.data(), group, rows, rows, base.data(), out.data());
  RefGroupScore(scores.data(), group, rows, rows, base.data(), ref.data());
  if (!Check(state, out, ref)) return;
  for (auto _ : state) GroupScore(scores.data(), group, rows, rows, base.data(), out.data());
  SetRate(state, "GB/s", 4.0 * static_cast<double>((group + 1) * rows));
}
BENCHMARK(BM_GroupScore);

void BM_LogSumExp(benchmark::State& state) {
  const Floats scores = Normal(32768, 1);
  const auto rows = static_cast<int64_t>(scores.size());
  if (!Check(state, {LogSumExp(scores.data(), rows)},
             {static_cast<float>(RefLogSumExp(scores.data(), rows))})) {
    return;
  }
  for (auto _ : state) benchmark::DoNotOptimize(LogSumExp(scores.data(), rows));
  SetRate(state, "Gscores/s", static_cast<double>(rows));
}
BENCHMARK(BM_LogSumExp);

void BM_RmsNorm(benchmark::State& state) {
  const int64_t n = 64, dim = 2048;
  const Floats x = Normal(n * dim, 1), w = Normal(dim, 2);
  Floats y(x.size()), ref(x.size());
  RmsNorm(x.data(), n, dim, dim, w.data(), 1e-5f, y.data(), dim);
  RefRmsNorm(x.data(), n, dim, dim, w.data(), 1e-5f, ref.data(), dim);
  if (!Check(state, y, ref)) return;
  for (auto _ : state) RmsNorm(x.data(), n, dim, dim, w.data(), 1e-5f, y.data(), dim);
  SetRate(state, "GB/s", 8.0 * static_cast<double>(n * dim));
}
BENCHMARK(BM_RmsNorm);

void BM_Rope(benchmark::State& state) {
  const int64_t n = 64, heads = 8, dim = 64;
  Floats inv_freq;
  for (int64_t c = 0; c < dim / 2; ++c) {
    inv_freq.push_back(std::pow(10000.0f, -2.0f * static_cast<float>(c) / static_cast<float>(dim)));
  }
  Floats x = Normal(n * heads * dim, 1), ref = x;
  Rope(x.data(), n, heads, dim, 1000, inv_freq.data());
  RefRope(ref.data(), n, heads, dim, 1000, inv_freq.data());
  if (!Check(state, x, ref)) return;
  for (auto _ : state) Rope(x.data(), n, heads, dim, 1000, inv_freq.data());
  SetRate(state, "GB/s", 8.0 * static_cast<double>(n * heads * dim));
}
BENCHMARK(BM_Rope);

void BM_SiluMul(benchmark::State& state) {
  const int64_t count = 64 * 2048;
  const Floats gate = Normal(count, 1), up = Normal(count, 2);
  Floats out = gate, ref = gate;
  SiluMul(out.data(), up.data(), count);
  RefSiluMul(ref.data(), up.data(), count);
  if (!Check(state, out, ref)) return;
  for (auto _ : state) {
    // In place: applied again and again the gates would vanish into denormals.
    std::copy(gate.begin(), gate.end(), out.begin());
    SiluMul(out.data(), up.data(), count);
  }
  SetRate(state, "GB/s", 12.0 * static_cast<double>(count));
}
BENCHMARK(BM_SiluMul);

void BM_MergeStates(benchmark::State& state) {
  const int64_t heads = 32, dim = 128;
  Floats a = Normal(heads * dim, 1), lse_a = Normal(heads, 2), ref = a, ref_lse = lse_a;
  const Floats b = Normal(heads * dim, 3), lse_b = Normal(heads, 4);
  MergeStates(a.data(), lse_a.data(), b.data(), lse_b.data(), heads, dim);
  RefMergeStates(ref.data(), ref_lse.data(), b.data(), lse_b.data(), heads, dim);
  if (!Check(state, a, ref)) return;
  for (auto _ : state) {
    MergeStates(a.data(), lse_a.data(), b.data(), lse_b.data(), heads, dim);
    benchmark::ClobberMemory();
  }
  SetRate(state, "GB/s", 12.0 * static_cast<double>(heads * dim));
}
BENCHMARK(BM_MergeStates);

}  // namespace
}  // namespace carrel::kernels

BENCHMARK_MAIN();
