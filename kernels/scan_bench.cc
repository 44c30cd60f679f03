// The scans by which keys are found, side by side: nanoseconds per key for a group of four queries
// at head_dim 128, on one thread. The first keys are compared with the reference.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "common/dtype.h"
#include "kernels/score/block_hamming/block_hamming.h"
#include "kernels/score/code_score/code_score.h"
#include "kernels/score/dot_score/dot_score.h"
#include "kernels/score/int8_score/int8_score.h"

namespace carrel::kernels {
namespace {

constexpr int64_t kGroup = 4, kBits = 128, kDim = 128;
constexpr int64_t kChecked = 512;  // keys
constexpr int64_t kAtOnce = 2048;  // keys scored between two looks at the scores

std::vector<float> Queries() {
  std::mt19937_64 rng(1);
  std::normal_distribution<float> normal;
  std::vector<float> q(static_cast<size_t>(kGroup * kDim));
  for (float& x : q) x = normal(rng);
  return q;
}

std::vector<uint8_t> Bytes(int64_t count) {
  std::mt19937_64 rng(2);
  std::vector<uint8_t> bytes(static_cast<size_t>(count));
  for (int64_t i = 0; i + 8 <= count; i += 8) {
    const uint64_t word = rng();
    std::memcpy(&bytes[static_cast<size_t>(i)], &word, sizeof(word));
  }
  return bytes;
}

void SetRates(benchmark::State& state, int64_t keys, double bytes_per_key) {
  using benchmark::Counter;
  state.counters["ns/key"] = Counter(static_cast<double>(keys) * 1e-9,
                                     Counter::kIsIterationInvariantRate | Counter::kInvert);
  state.counters["GB/s"] =
      Counter(static_cast<double>(keys) * bytes_per_key * 1e-9, Counter::kIsIterationInvariantRate);
}

void BM_CodeScore(benchmark::State& state) {
  const int64_t keys = state.range(0);
  const std::vector<uint8_t> codes = Bytes(keys * kBits / 8);
  const std::vector<float> q = Queries();
  CodeTables tables;
  MakeCodeTables(q.data(), kGroup, kBits, tables);
  std::vector<int16_t> out(kAtOnce), ref(kChecked);
  CodeScore(tables, codes.data(), kChecked / kCodeBlockKeys, out.data());
  RefCodeScore(tables, codes.data(), kChecked / kCodeBlockKeys, ref.data());
  if (!std::equal(ref.begin(), ref.end(), out.begin())) return state.SkipWithError("differs");
  for (auto _ : state) {
    for (int64_t at = 0; at < keys; at += kAtOnce) {
      CodeScore(tables, codes.data() + at * kBits / 8, kAtOnce / kCodeBlockKeys, out.data());
      benchmark::ClobberMemory();
    }
  }
  SetRates(state, keys, kBits / 8.0);
}
BENCHMARK(BM_CodeScore)->Arg(1 << 16)->Arg(1 << 22);

void BM_BlockHamming(benchmark::State& state) {
  const int64_t keys = state.range(0);
  const std::vector<uint8_t> codes = Bytes(keys * kBits / 8);
  const std::vector<float> q = Queries();
  HammingTables tables;
  MakeHammingTables(q.data(), kGroup, kBits, tables);
  std::vector<int16_t> out(kAtOnce), ref(kChecked);
  BlockHammingScore(tables, codes.data(), kChecked / kCodeBlockKeys, out.data());
  RefBlockHammingScore(tables, codes.data(), kChecked / kCodeBlockKeys, ref.data());
  if (!std::equal(ref.begin(), ref.end(), out.begin())) return state.SkipWithError("differs");
  for (auto _ : state) {
    for (int64_t at = 0; at < keys; at += kAtOnce) {
      BlockHammingScore(tables, codes.data() + at * kBits / 8, kAtOnce / kCodeBlockKeys,
                        out.data());
      benchmark::ClobberMemory();
    }
  }
  SetRates(state, keys, kBits / 8.0);
}
BENCHMARK(BM_BlockHamming)->Arg(1 << 16)->Arg(1 << 22);

void BM_Int8Score(benchmark::State& state) {
  const int64_t keys = state.range(0), blocks = keys / kInt8BlockRows;
  const int64_t block_bytes = Int8BlockBytes(kDim);
  std::vector<uint8_t> rows = Bytes(blocks * block_bytes);
  for (int64_t i = 0; i < blocks; ++i) {
    const std::vector<float> scale(kInt8BlockRows, 0.01f);
    std::memcpy(&rows[static_cast<size_t>(i * block_bytes)], scale.data(), 64);
  }
  const std::vector<float> q = Queries();
  Int8Queries queries;
  MakeInt8Queries(q.data(), kGroup, kDim, 1.0f, queries);
  std::vector<float> out(kGroup * kAtOnce), ref(kGroup * kChecked);
  Int8Score(queries, rows.data(), kChecked / kInt8BlockRows, out.data(), kChecked);
  RefInt8Score(queries, rows.data(), kChecked / kInt8BlockRows, ref.data(), kChecked);
  if (!std::equal(ref.begin(), ref.end(), out.begin())) return state.SkipWithError("differs");
  for (auto _ : state) {
    for (int64_t at = 0; at < blocks; at += kAtOnce / kInt8BlockRows) {
      Int8Score(queries, rows.data() + at * block_bytes, kAtOnce / kInt8BlockRows, out.data(),
                kAtOnce);
      benchmark::ClobberMemory();
    }
  }
  SetRates(state, keys, static_cast<double>(block_bytes) / kInt8BlockRows);
}
BENCHMARK(BM_Int8Score)->Arg(1 << 13)->Arg(1 << 20);

void BM_DotScoreScan(benchmark::State& state) {
  const int64_t keys = state.range(0);
  std::mt19937_64 rng(3);
  std::normal_distribution<float> normal;
  std::vector<float> block(static_cast<size_t>(kDim * 1024));
  for (float& x : block) x = normal(rng);
  std::vector<uint16_t> rows(static_cast<size_t>(keys * kDim));
  for (size_t at = 0; at < rows.size(); at += block.size()) FloatToBf16(block, &rows[at]);
  const std::vector<float> q = Queries();
  std::vector<float> out(kGroup * kAtOnce);
  for (auto _ : state) {
    for (int64_t at = 0; at < keys; at += kAtOnce) {
      DotScore(q.data(), kGroup, kDim, &rows[static_cast<size_t>(at * kDim)], kAtOnce, 1.0f,
               out.data(), kAtOnce);
      benchmark::ClobberMemory();
    }
  }
  SetRates(state, keys, 2.0 * kDim);
}
BENCHMARK(BM_DotScoreScan)->Arg(1 << 13)->Arg(1 << 20);

}  // namespace
}  // namespace carrel::kernels
