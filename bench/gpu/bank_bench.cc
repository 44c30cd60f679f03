// What: attention over rows in pinned host memory, read where they lie and through a bank, by how
//       many of them the bank holds: 8B shape, one token of one layer. One JSON object a line.
// Method: as harness.h; a bank for each of 32 layers in turn, so that neither rows nor page tables
//       are in L2. Consecutive tokens of a layer share the wanted part of their rows; what was hit
//       is counted. Output through the bank is compared, bit by bit, with output without.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "bench/gpu/decode_shape.h"
#include "kernels/row_bank/row_bank_cuda.h"
#include "kernels/sparse_attention/sparse_attention_cuda.h"

namespace carrel::gpu_bench {
namespace {

using namespace carrel::kernels;

constexpr int64_t kRows = 128 << 10, kLayers = 32, kTokens = 16;

// [kTokens][kKvHeads][count]: a share of each token's rows are the last token's; the first follows
// the last.
std::vector<int32_t> DrawIds(std::mt19937_64& rng, int64_t count, double share) {
  const auto kept = static_cast<int64_t>(share * static_cast<double>(count));
  std::vector<int32_t> ids(static_cast<size_t>(kTokens * kKvHeads * count));
  std::vector<int32_t> all(kRows);
  for (int64_t i = 0; i < kRows; ++i) all[i] = static_cast<int32_t>(i);
  for (int64_t head = 0; head < kKvHeads; ++head) {
    std::shuffle(all.begin(), all.end(), rng);
    // The rows of token t begin at t (count - kept) of a ring.
    const int64_t step = count - kept, ring = kTokens * step;
    for (int64_t t = 0; t < kTokens; ++t) {
      int32_t* to = &ids[(t * kKvHeads + head) * count];
      for (int64_t i = 0; i < count; ++i) to[i] = all[(t * step + i) % std::max(ring, count)];
      std::sort(to, to + count);
    }
  }
  return ids;
}

struct Host {
  uint16_t *k = nullptr, *v = nullptr;  // [kKvHeads, kRows, kHeadDim], pinned
};

void At(Bench& bench, const Host& host, int64_t count, RowMap map, double share) {
  const RowBankShape shape{.kv_heads = kKvHeads,
                           .head_dim = kHeadDim,
                           .slots = count + count / 4,
                           .rows = kRows,
                           .map = map};
  const int64_t state_bytes = RowBankLayout(shape).bytes, bank_rows = kKvHeads * shape.slots;
  auto* state = Allocate<uint8_t>(kLayers * state_bytes);
  auto* bank = Allocate<uint16_t>(kLayers * 2 * bank_rows * kHeadDim);
  auto* ids = Allocate<int32_t>(kTokens * kKvHeads * count);
  auto* slots = Allocate<int32_t>(kKvHeads * count);
  auto* q = Allocate<uint16_t>(kQHeads * kHeadDim);
  auto* out = Allocate<float>(kQHeads * (kHeadDim + 1));
  auto* counters = Allocate<RowBankCounters>(1);
  auto* bank_workspace =
      Allocate<uint8_t>(static_cast<int64_t>(RowBankWorkspaceBytes(kKvHeads, count)));
  const int64_t splits = DecodeSplits(count, kKvHeads);
  auto* workspace = Allocate<uint8_t>(
      static_cast<int64_t>(DecodeWorkspaceBytes(kKvHeads, kGroup, kHeadDim, splits)));
  const std::vector<int32_t> drawn = DrawIds(bench.rng(), count, share);
  CARREL_CHECK_CUDA(cudaMemcpy(ids, drawn.data(), drawn.size() * 4, cudaMemcpyHostToDevice));
  CARREL_CHECK_CUDA(FillNormalBf16(q, kQHeads * kHeadDim, 1.0f, bench.rng()()));
  for (int64_t layer = 0; layer < kLayers; ++layer)
    CARREL_CHECK_CUDA(RowBankReset(shape, state + layer * state_bytes, nullptr));

  const auto ids_of = [&](int64_t i) { return ids + i / kLayers % kTokens * kKvHeads * count; };
  const auto attend = [&](const uint16_t* k, const uint16_t* v, const int32_t* rows, int64_t stride,
                          cudaStream_t stream) {
    return SparseAttentionCuda({.q = q,
                                .k = k,
                                .v = v,
                                .ids = rows,
                                .kv_heads = kKvHeads,
                                .group = kGroup,
                                .head_dim = kHeadDim,
                                .row_stride = stride,
                                .ids_stride = count,
                                .rows = count,
                                .scale = kScale,
                                .out = out,
                                .lse = out + kQHeads * kHeadDim,
                                .splits = splits,
                                .workspace = workspace},
                               stream);
  };
  const auto without = [&](int64_t i, cudaStream_t stream) {
    return attend(host.k, host.v, ids_of(i), kRows, stream);
  };
  const auto use = [&](int64_t i, cudaStream_t stream) {
    const int64_t layer = i % kLayers;
    uint16_t* rows = bank + layer * 2 * bank_rows * kHeadDim;
    return UseRowBank({.shape = shape,
                       .k = host.k,
                       .v = host.v,
                       .bank_k = rows,
                       .bank_v = rows + bank_rows * kHeadDim,
                       .state = state + layer * state_bytes,
                       .ids = ids_of(i),
                       .ids_stride = count,
                       .count = count,
                       .slots = slots,
                       .counters = counters,
                       .workspace = bank_workspace},
                      stream);
  };
  const auto with = [&](int64_t i, cudaStream_t stream) {
    const uint16_t* rows = bank + i % kLayers * 2 * bank_rows * kHeadDim;
    const cudaError_t error = use(i, stream);
    return error != cudaSuccess
               ? error
               : attend(rows, rows + bank_rows * kHeadDim, slots, shape.slots, stream);
  };
  for (int64_t i = 0; i < 3 * kLayers; i += kLayers) {  // tokens of layer 0
    CARREL_CHECK_CUDA(without(i, nullptr));
    const auto expected = Download(out, kQHeads * (kHeadDim + 1));
    CARREL_CHECK_CUDA(with(i, nullptr));
    const auto got = Download(out, kQHeads * (kHeadDim + 1));
    const bool same = std::memcmp(expected.data(), got.data(), got.size() * 4) == 0;
    bench.Expect("attention through a bank", same ? 0 : 1, 0);
  }
  const Timing direct = bench.Time(kLayers * kTokens, without);
  const Timing look_up = bench.Time(kLayers * kTokens, use);
  CARREL_CHECK_CUDA(cudaMemset(counters, 0, sizeof(RowBankCounters)));
  const Timing banked = bench.Time(kLayers * kTokens, with);
  const RowBankCounters counted = Download(counters, 1)[0];
  std::printf(
      "{\"kernel\": \"row_bank\", \"rows\": %lld, \"slots\": %lld, \"map\": \"%s\", "
      "\"hit_rate\": %.3f, \"us_where_they_lie\": %.1f, \"us_bank_alone\": %.1f, "
      "\"us_through_the_bank\": %.1f, \"p10\": %.1f, \"p90\": %.1f}\n",
      static_cast<long long>(count), static_cast<long long>(shape.slots),
      map == RowMap::kVector ? "vector" : "hash",
      static_cast<double>(counted.hits) / static_cast<double>(counted.wanted), direct.us,
      look_up.us, banked.us, banked.us_p10, banked.us_p90);
  std::fflush(stdout);
  for (void* data : {static_cast<void*>(state), static_cast<void*>(bank), static_cast<void*>(ids),
                     static_cast<void*>(slots), static_cast<void*>(q), static_cast<void*>(out),
                     static_cast<void*>(counters), static_cast<void*>(bank_workspace),
                     static_cast<void*>(workspace)}) {
    CARREL_CHECK_CUDA(cudaFree(data));
  }
}

}  // namespace
}  // namespace carrel::gpu_bench

int main() {
  using namespace carrel::gpu_bench;
  Bench bench(std::random_device{}(), /*quick=*/false);
  Host host;
  for (uint16_t** rows : {&host.k, &host.v}) {
    const int64_t elements = kKvHeads * kRows * kHeadDim;
    auto* filled = Allocate<uint16_t>(elements);
    CARREL_CHECK_CUDA(FillNormalBf16(filled, elements, 1.0f, bench.rng()()));
    CARREL_CHECK_CUDA(cudaMallocHost(reinterpret_cast<void**>(rows), elements * 2));
    CARREL_CHECK_CUDA(cudaMemcpy(*rows, filled, elements * 2, cudaMemcpyDeviceToHost));
    CARREL_CHECK_CUDA(cudaFree(filled));
  }
  for (const int64_t count : {512, 2048}) {
    for (const double share : {0.0, 0.5, 0.75, 0.9, 1.0}) {
      for (const carrel::kernels::RowMap map :
           {carrel::kernels::RowMap::kVector, carrel::kernels::RowMap::kHash}) {
        At(bench, host, count, map, share);
      }
    }
  }
  return 0;
}
