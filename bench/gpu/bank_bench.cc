// What: attention over rows in pinned host memory, without a bank (read where they lie; packed rows
//       are gathered first) and through one, by how many of them the bank holds: 8B shape, one token
//       of one layer. One JSON object a line.
// Method: as harness.h; a bank for each of 32 layers in turn, so that neither rows nor page tables
//       are in L2. Consecutive tokens of a layer share the wanted part of their rows; what was hit
//       is counted. Every output is compared, bit by bit, with attention where rows lie.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <thread>
#include <vector>

#include "bench/gpu/decode_shape.h"
#include "kernels/attention/sparse_attention/sparse_attention_cuda.h"
#include "kernels/attention/window_attention/window_attention_cuda.h"
#include "kernels/rows/packed_rows/packed_rows_cuda.h"
#include "kernels/rows/row_bank/row_bank_cuda.h"

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
  PackedRows packed;                    // the same rows
};

PackedRows Pack(const Host& host) {
  constexpr int64_t kBytes = kRows * PackedRowBytes(kHeadDim);
  uint8_t* rows = nullptr;
  RowPiece* pieces = nullptr;
  CARREL_CHECK_CUDA(cudaMallocHost(reinterpret_cast<void**>(&rows), kKvHeads * kBytes));
  std::vector<PackedHead> heads(kKvHeads);
  ExceptionPieces exceptions;
  std::vector<std::thread> workers;
  for (int64_t g = 0; g < kKvHeads; ++g) {
    workers.emplace_back([&, g, at = g * kRows * kHeadDim] {
      ChooseTopExponents(host.k + at, 4096, kHeadDim, heads[g].top_exponent[0]);
      ChooseTopExponents(host.v + at, 4096, kHeadDim, heads[g].top_exponent[1]);
      PackRows(heads[g], host.k + at, host.v + at, kRows, kHeadDim, rows + g * kBytes, &exceptions);
    });
  }
  for (std::thread& worker : workers) worker.join();
  const size_t bytes = exceptions.all().size() * sizeof(RowPiece);
  CARREL_CHECK_CUDA(cudaMallocHost(reinterpret_cast<void**>(&pieces), bytes + 16));
  std::memcpy(pieces, exceptions.all().data(), bytes);
  auto* device_heads = Allocate<PackedHead>(kKvHeads);
  CARREL_CHECK_CUDA(cudaMemcpy(device_heads, heads.data(), heads.size() * sizeof(PackedHead),
                               cudaMemcpyHostToDevice));
  std::printf("{\"packed_rows\": %lld, \"exceptions_per_piece\": %.5f}\n",
              static_cast<long long>(kKvHeads * kRows),
              static_cast<double>(exceptions.all().size()) * kPackedPiece /
                  static_cast<double>(2 * kKvHeads * kRows * kHeadDim));
  return {rows, device_heads, pieces, kRows};
}

void At(Bench& bench, const Host& host, bool packed, int64_t count, RowMap map, double share) {
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
  auto* gathered = Allocate<uint16_t>(2 * kKvHeads * count * kHeadDim);
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
  const auto attend = [&](const KvView& kv, const int32_t* rows, cudaStream_t stream) {
    return SparseAttentionCuda({.q = q,
                                .kv = kv,
                                .ids = rows,
                                .kv_heads = kKvHeads,
                                .group = kGroup,
                                .head_dim = kHeadDim,
                                .ids_stride = count,
                                .rows = count,
                                .scale = kScale,
                                .out = out,
                                .lse = out + kQHeads * kHeadDim,
                                .splits = splits,
                                .workspace = workspace},
                               stream);
  };
  const auto where_they_lie = [&](int64_t i, cudaStream_t stream) {
    return attend({host.k, host.v, kRows}, ids_of(i), stream);
  };
  const auto gather_first = [&](int64_t i, cudaStream_t stream) {
    const KvRows to{gathered, gathered + kKvHeads * count * kHeadDim, count};
    const cudaError_t error = GatherPackedRowsCuda({.packed = host.packed,
                                                    .ids = ids_of(i),
                                                    .kv_heads = kKvHeads,
                                                    .head_dim = kHeadDim,
                                                    .ids_stride = count,
                                                    .count = count,
                                                    .to = to},
                                                   stream);
    if (error != cudaSuccess) return error;
    return WindowAttentionCuda({.q = q,
                                .kv = to,
                                .kv_heads = kKvHeads,
                                .group = kGroup,
                                .head_dim = kHeadDim,
                                .rows = count,
                                .scale = kScale,
                                .out = out,
                                .lse = out + kQHeads * kHeadDim,
                                .splits = splits,
                                .workspace = workspace},
                               stream);
  };
  const auto without = [&](int64_t i, cudaStream_t stream) {
    return packed ? gather_first(i, stream) : where_they_lie(i, stream);
  };
  const auto use = [&](int64_t i, cudaStream_t stream) {
    const int64_t layer = i % kLayers;
    uint16_t* rows = bank + layer * 2 * bank_rows * kHeadDim;
    return UseRowBank({.shape = shape,
                       .kv = {host.k, host.v, kRows},
                       .packed = packed ? host.packed : PackedRows(),
                       .bank = {rows, rows + bank_rows * kHeadDim, shape.slots},
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
    const Bf16* rows = bank + i % kLayers * 2 * bank_rows * kHeadDim;
    const cudaError_t error = use(i, stream);
    return error != cudaSuccess
               ? error
               : attend({rows, rows + bank_rows * kHeadDim, shape.slots}, slots, stream);
  };
  for (int64_t i = 0; i < 3 * kLayers; i += kLayers) {  // tokens of layer 0
    CARREL_CHECK_CUDA(where_they_lie(i, nullptr));
    const auto expected = Download(out, kQHeads * (kHeadDim + 1));
    const auto expect_same = [&](const char* what) {
      const auto got = Download(out, kQHeads * (kHeadDim + 1));
      const bool same = std::memcmp(expected.data(), got.data(), got.size() * 4) == 0;
      bench.Expect(what, same ? 0 : 1, 0);
    };
    CARREL_CHECK_CUDA(without(i, nullptr));
    expect_same("attention without a bank");
    CARREL_CHECK_CUDA(with(i, nullptr));
    expect_same("attention through a bank");
  }
  const Timing direct = bench.Time(kLayers * kTokens, without);
  const Timing look_up = bench.Time(kLayers * kTokens, use);
  CARREL_CHECK_CUDA(cudaMemset(counters, 0, sizeof(RowBankCounters)));
  const Timing banked = bench.Time(kLayers * kTokens, with);
  const RowBankCounters counted = Download(counters, 1)[0];
  std::printf(
      "{\"kernel\": \"row_bank\", \"rows\": %lld, \"slots\": %lld, \"map\": \"%s\", "
      "\"packed\": %s, \"hit_rate\": %.3f, \"us_without_bank\": %.1f, \"us_bank_alone\": %.1f, "
      "\"us_through_the_bank\": %.1f, \"p10\": %.1f, \"p90\": %.1f}\n",
      static_cast<long long>(count), static_cast<long long>(shape.slots),
      map == RowMap::kVector ? "vector" : "hash", packed ? "true" : "false",
      static_cast<double>(counted.hits) / static_cast<double>(counted.wanted), direct.us,
      look_up.us, banked.us, banked.us_p10, banked.us_p90);
  std::fflush(stdout);
  for (void* data : {static_cast<void*>(state), static_cast<void*>(bank), static_cast<void*>(ids),
                     static_cast<void*>(slots), static_cast<void*>(gathered), static_cast<void*>(q),
                     static_cast<void*>(out), static_cast<void*>(counters),
                     static_cast<void*>(bank_workspace), static_cast<void*>(workspace)}) {
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
  host.packed = Pack(host);
  for (const int64_t count : {512, 2048}) {
    for (const bool packed : {false, true}) {
      for (const double share : {0.0, 0.5, 0.75, 0.9, 1.0}) {
        for (const carrel::kernels::RowMap map :
             {carrel::kernels::RowMap::kVector, carrel::kernels::RowMap::kHash}) {
          At(bench, host, packed, count, map, share);
        }
      }
    }
  }
  return 0;
}
