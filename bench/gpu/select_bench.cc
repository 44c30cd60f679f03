// What selection is made of, one kernel at a time: codes, scores, the k best.
#include <algorithm>

#include "bench/gpu/decode_shape.h"
#include "common/test_random.h"
#include "kernels/encode/hash_encode/hash_encode.h"
#include "kernels/score/dot_score/dot_score.h"
#include "kernels/score/dot_score/dot_score_cuda.h"
#include "kernels/select/topk/topk.h"
#include "kernels/select/topk/topk_cuda.h"

namespace carrel::gpu_bench {
namespace {

using namespace carrel::kernels;

void TopKAt(Bench& bench, int64_t n) {
  const double bytes = kKvHeads * n * 4.0;
  const int64_t copies = Copies(bytes, 64);
  auto* scores = Allocate<float>(copies * kKvHeads * n);
  auto* ids = Allocate<int32_t>(kKvHeads * kTopK);
  auto* workspace = Allocate<uint8_t>(static_cast<int64_t>(TopKWorkspaceBytes(kKvHeads)));
  CARREL_CHECK_CUDA(FillNormal(scores, copies * kKvHeads * n, bench.rng()()));
  const auto params = [&](int64_t i) {
    return TopKCudaParams{scores + i * kKvHeads * n, kKvHeads, n, n, kTopK, ids, workspace};
  };
  CARREL_CHECK_CUDA(TopKCuda(params(0), nullptr));
  const int64_t head = static_cast<int64_t>(bench.rng()() % kKvHeads);
  const auto host = Download(scores + head * n, n);
  std::vector<int64_t> expected(kTopK);
  RefTopK(host.data(), n, kTopK, expected.data());
  auto out = Download(ids + head * kTopK, kTopK);
  std::sort(out.begin(), out.end());
  std::sort(expected.begin(), expected.end());
  bench.Expect("topk", std::equal(out.begin(), out.end(), expected.begin()) ? 0 : 1, 0);
  bench.Report({.kernel = "topk",
                .shape = "[8, " + std::to_string(n) + "] fp32, k 2048",
                .n = n,
                .time = bench.Time(
                    copies, [&](int64_t i, cudaStream_t s) { return TopKCuda(params(i), s); }),
                .bytes = bytes,
                .error_of = "ids"});
  for (void* data :
       {static_cast<void*>(scores), static_cast<void*>(ids), static_cast<void*>(workspace)}) {
    CARREL_CHECK_CUDA(cudaFree(data));
  }
}

// Both read the same keys.
void KeysAt(Bench& bench, int64_t n) {
  const double key_bytes = kKvHeads * n * kHeadDim * 2.0;
  const int64_t copies = Copies(key_bytes, 8), elements = kKvHeads * n * kHeadDim;
  auto* keys = Allocate<uint16_t>(copies * elements);
  auto* q = Allocate<uint16_t>(kQHeads * kHeadDim);
  auto* matrix = Allocate<uint16_t>(kKvHeads * kBits * kHeadDim);
  auto* codes = Allocate<uint32_t>(kKvHeads * n * kBits / 32);
  auto* scores = Allocate<float>(kQHeads * n);
  CARREL_CHECK_CUDA(FillNormalBf16(keys, copies * elements, 1.0f, bench.rng()()));
  CARREL_CHECK_CUDA(FillNormalBf16(q, kQHeads * kHeadDim, 1.0f, bench.rng()()));
  CARREL_CHECK_CUDA(FillNormalBf16(matrix, kKvHeads * kBits * kHeadDim, 1.0f, bench.rng()()));
  const int64_t head = static_cast<int64_t>(bench.rng()() % kKvHeads);

  const auto score = [&](int64_t i) {
    return DotScoreCudaParams{.q = q,
                              .kv = {.k = keys + i * elements, .row_stride = n},
                              .kv_heads = kKvHeads,
                              .group = kGroup,
                              .head_dim = kHeadDim,
                              .rows = n,
                              .score_stride = n,
                              .scale = kScale,
                              .scores = scores};
  };
  CARREL_CHECK_CUDA(DotScoreCuda(score(0), nullptr));
  const auto host = Download(keys + head * n * kHeadDim, n * kHeadDim);
  std::vector<const void*> rows;
  for (int64_t j = 0; j < n; ++j) rows.push_back(host.data() + j * kHeadDim);
  const auto wide_q = Widen(Download(q + head * kGroup * kHeadDim, kGroup * kHeadDim));
  std::vector<float> expected(static_cast<size_t>(kGroup * n));
  RefDotScoreRows(wide_q.data(), kGroup, kHeadDim, rows.data(), n, kScale, expected.data(), n);
  const auto out = Download(scores + head * kGroup * n, kGroup * n);
  const double error = RelativeError(out.data(), expected.data(), kGroup * n);
  bench.Expect("dot_score", error, 1e-6);
  bench.Report({.kernel = "dot_score",
                .shape = DecodeShapeName(n),
                .n = n,
                .time = bench.Time(
                    copies, [&](int64_t i, cudaStream_t s) { return DotScoreCuda(score(i), s); }),
                .bytes = key_bytes + kQHeads * n * 4.0,
                .error = error,
                .error_of = "scores"});

  const auto encode = [&](int64_t i) {
    return HashEncodeParams{keys + i * elements, matrix, codes, kKvHeads, n, n, n, kHeadDim, kBits};
  };
  CARREL_CHECK_CUDA(HashEncode(encode(0), nullptr));
  const int64_t checked = std::min<int64_t>(n, 8192), words = kBits / 32;
  const auto host_matrix = Download(matrix + head * kBits * kHeadDim, kBits * kHeadDim);
  std::vector<uint32_t> expected_codes(static_cast<size_t>(checked * words));
  std::vector<float> margin(static_cast<size_t>(checked * kBits));
  RefHashEncode({host.data(), host_matrix.data(), expected_codes.data(), 1, checked, checked,
                 checked, kHeadDim, kBits},
                margin.data());
  const auto out_codes = Download(codes + head * n * words, checked * words);
  double worst = 0;  // margin of a bit that differs
  for (int64_t i = 0; i < checked * kBits; ++i) {
    const uint32_t differ = out_codes[i / 32] ^ expected_codes[i / 32];
    if (differ >> (i % 32) & 1) worst = std::max(worst, double{std::abs(margin[i])});
  }
  bench.Expect("hash_encode", worst, 1e-6);
  bench.Report({.kernel = "hash_encode",
                .shape = "8 KV heads, head_dim 128, 128 bits, N " + std::to_string(n),
                .n = n,
                .time = bench.Time(
                    copies, [&](int64_t i, cudaStream_t s) { return HashEncode(encode(i), s); }),
                .bytes = key_bytes + kKvHeads * n * kBits / 8.0,
                .flops = 2.0 * kKvHeads * n * kHeadDim * kBits,
                .error = worst,
                .error_of = "cosine of a bit that differs"});
  for (void* data : {static_cast<void*>(keys), static_cast<void*>(q), static_cast<void*>(matrix),
                     static_cast<void*>(codes), static_cast<void*>(scores)}) {
    CARREL_CHECK_CUDA(cudaFree(data));
  }
}

// One token's queries: a launch's latency.
void EncodeQueries(Bench& bench) {
  auto* q = Allocate<uint16_t>(kQHeads * kHeadDim);
  auto* matrix = Allocate<uint16_t>(kKvHeads * kBits * kHeadDim);
  auto* codes = Allocate<uint32_t>(kQHeads * kBits / 32);
  CARREL_CHECK_CUDA(FillNormalBf16(q, kQHeads * kHeadDim, 1.0f, bench.rng()()));
  CARREL_CHECK_CUDA(FillNormalBf16(matrix, kKvHeads * kBits * kHeadDim, 1.0f, bench.rng()()));
  const HashEncodeParams p{q, matrix, codes, kKvHeads, kGroup, kGroup, kGroup, kHeadDim, kBits};
  bench.Report({.kernel = "hash_encode_queries",
                .shape = "32 queries, 128 bits",
                .n = kGroup,
                .time = bench.Time(32, [&](int64_t, cudaStream_t s) { return HashEncode(p, s); }),
                .bytes = kKvHeads * kBits * kHeadDim * 2.0});
}

}  // namespace

void SelectBenches(Bench& bench) {
  for (int64_t n : DecodeLengths(bench.quick())) {
    TopKAt(bench, n);
    KeysAt(bench, n);
  }
  EncodeQueries(bench);
}

}  // namespace carrel::gpu_bench
