// Attention of one token: dense, over chosen rows, and the way from a query to its attention by
// codes.
#include <algorithm>
#include <numeric>

#include "bench/gpu/decode_shape.h"
#include "common/test_random.h"
#include "kernels/attention/merge_states/merge_states_cuda.h"
#include "kernels/attention/sparse_attention/sparse_attention_cuda.h"
#include "kernels/attention/window_attention/window_attention.h"
#include "kernels/attention/window_attention/window_attention_cuda.h"
#include "kernels/select/hamming_topk/hamming_topk.h"
#include "kernels/select/topk/topk.h"

namespace carrel::gpu_bench {
namespace {

using namespace carrel::kernels;

// Layers of one length; each has rows, codes and ids of its own.
struct Layers {
  int64_t n = 0, count = 0, splits = 0, sparse_splits = 0;
  uint16_t *q = nullptr, *k = nullptr, *v = nullptr;
  uint32_t *queries = nullptr, *codes = nullptr;
  int32_t* ids = nullptr;
  float *out = nullptr, *lse = nullptr;
  void *workspace = nullptr, *select_workspace = nullptr;

  int64_t RowElements() const { return kKvHeads * n * kHeadDim; }
  int64_t CodeWords() const { return kKvHeads * n * kBits / 32; }

  WindowAttentionCudaParams Dense(int64_t layer) const {
    return {.q = q + layer * kQHeads * kHeadDim,
            .kv = {k + layer * RowElements(), v + layer * RowElements(), n},
            .kv_heads = kKvHeads,
            .group = kGroup,
            .head_dim = kHeadDim,
            .rows = n,
            .scale = kScale,
            .out = out,
            .lse = lse,
            .splits = splits,
            .workspace = workspace};
  }
  SparseAttentionCudaParams Sparse(int64_t layer) const {
    return {.q = q + layer * kQHeads * kHeadDim,
            .kv = {k + layer * RowElements(), v + layer * RowElements(), n},
            .ids = ids + layer * kKvHeads * kTopK,
            .kv_heads = kKvHeads,
            .group = kGroup,
            .head_dim = kHeadDim,
            .ids_stride = kTopK,
            .rows = kTopK,
            .scale = kScale,
            .out = out,
            .lse = lse,
            .splits = sparse_splits,
            .workspace = workspace};
  }
  HammingTopKParams Select(int64_t layer) const {
    return {.queries = queries + layer * kQHeads * kBits / 32,
            .codes = codes + layer * CodeWords(),
            .kv_heads = kKvHeads,
            .group = kGroup,
            .bits = kBits,
            .rows = n,
            .code_stride = n,
            .k = kTopK,
            .ids = ids + layer * kKvHeads * kTopK,
            .workspace = select_workspace};
  }
};

// Memory for the longest, cut up anew for each length.
struct Pool {
  int64_t row_elements = 0, code_words = 0, most_layers = 64;
  uint16_t *q = nullptr, *k = nullptr, *v = nullptr;
  uint32_t *queries = nullptr, *codes = nullptr;
  int32_t* ids = nullptr;
  float *out = nullptr, *lse = nullptr;
  void *workspace = nullptr, *select_workspace = nullptr;

  Pool(Bench& bench, int64_t longest, int64_t layers) {
    row_elements = layers * kKvHeads * longest * kHeadDim;
    code_words = row_elements / kHeadDim * kBits / 32;
    q = Allocate<uint16_t>(most_layers * kQHeads * kHeadDim);
    k = Allocate<uint16_t>(row_elements);
    v = Allocate<uint16_t>(row_elements);
    queries = Allocate<uint32_t>(most_layers * kQHeads * kBits / 32);
    codes = Allocate<uint32_t>(code_words);
    ids = Allocate<int32_t>(most_layers * kKvHeads * kTopK);
    out = Allocate<float>(kQHeads * kHeadDim);
    lse = Allocate<float>(kQHeads);
    workspace = Allocate<uint8_t>(
        static_cast<int64_t>(DecodeWorkspaceBytes(kKvHeads, kGroup, kHeadDim, kMaxDecodeSplits)));
    CARREL_CHECK_CUDA(FillNormalBf16(q, most_layers * kQHeads * kHeadDim, 1.0f, bench.rng()()));
    CARREL_CHECK_CUDA(FillNormalBf16(k, row_elements, 1.0f, bench.rng()()));
    CARREL_CHECK_CUDA(FillNormalBf16(v, row_elements, 1.0f, bench.rng()()));
    CARREL_CHECK_CUDA(FillBits(queries, most_layers * kQHeads * kBits / 32, bench.rng()()));
    CARREL_CHECK_CUDA(FillBits(codes, code_words, bench.rng()()));
  }

  Layers Cut(int64_t n) {
    Layers l{.n = n,
             .count = std::min(most_layers, row_elements / (kKvHeads * n * kHeadDim)),
             .splits = DecodeSplits(n, kKvHeads),
             .sparse_splits = DecodeSplits(kTopK, kKvHeads),
             .q = q,
             .k = k,
             .v = v,
             .queries = queries,
             .codes = codes,
             .ids = ids,
             .out = out,
             .lse = lse,
             .workspace = workspace};
    select_workspace =
        Allocate<uint8_t>(static_cast<int64_t>(HammingTopKWorkspaceBytes(l.Select(0))));
    l.select_workspace = select_workspace;
    return l;
  }
};

// Attention of one KV head's queries in double precision.
struct Expected {
  std::vector<float> out, lse;
};
Expected Reference(const Layers& l, int64_t layer, int64_t head, const std::vector<int32_t>* ids) {
  const int64_t d = kHeadDim, row0 = layer * l.RowElements() + head * l.n * d;
  std::vector<uint16_t> k = Download(l.k + row0, l.n * d), v = Download(l.v + row0, l.n * d);
  int64_t rows = l.n;
  if (ids != nullptr) {
    rows = static_cast<int64_t>(ids->size());
    std::vector<uint16_t> chosen_k, chosen_v;
    for (int32_t j : *ids) {
      chosen_k.insert(chosen_k.end(), k.begin() + j * d, k.begin() + (j + 1) * d);
      chosen_v.insert(chosen_v.end(), v.begin() + j * d, v.begin() + (j + 1) * d);
    }
    k.swap(chosen_k);
    v.swap(chosen_v);
  }
  const std::vector<float> wide_q =
      Widen(Download(l.q + (layer * kQHeads + head * kGroup) * d, kGroup * d));
  const std::vector<float> wide_k = Widen(k), wide_v = Widen(v);
  Expected e{std::vector<float>(kGroup * d), std::vector<float>(kGroup)};
  RefWindowAttention({wide_q.data(), kGroup, wide_k.data(), wide_v.data(), rows, d, kScale,
                      e.out.data(), e.lse.data()});
  return e;
}

double CheckAttention(Bench& bench, const Layers& l, int64_t layer, int64_t head,
                      const std::vector<int32_t>* ids, const char* what) {
  const Expected e = Reference(l, layer, head, ids);
  const auto out = Download(l.out + head * kGroup * kHeadDim, kGroup * kHeadDim);
  const auto lse = Download(l.lse + head * kGroup, kGroup);
  const double error = RelativeError(out.data(), e.out.data(), kGroup * kHeadDim);
  bench.Expect(std::string(what) + ", out", error, 5e-3);
  bench.Expect(std::string(what) + ", lse", RelativeError(lse.data(), e.lse.data(), kGroup), 1e-5);
  return error;
}

// The ids of one KV head, ascending, are those of the reference.
void CheckSelection(Bench& bench, const Layers& l, int64_t layer, int64_t head,
                    std::vector<int32_t> ids) {
  const int64_t words = kBits / 32;
  const auto queries =
      Download(l.queries + (layer * kQHeads + head * kGroup) * words, kGroup * words);
  const auto codes = Download(l.codes + layer * l.CodeWords() + head * l.n * words, l.n * words);
  std::vector<uint16_t> scores(static_cast<size_t>(l.n));
  RefHammingScores({queries.data(), codes.data(), 1, kGroup, kBits, l.n, l.n}, scores.data());
  const std::vector<float> wide(scores.begin(), scores.end());
  std::vector<int64_t> expected(kTopK);
  RefTopK(wide.data(), l.n, kTopK, expected.data());
  std::sort(expected.begin(), expected.end());
  std::sort(ids.begin(), ids.end());
  const bool same = std::equal(ids.begin(), ids.end(), expected.begin(), expected.end());
  bench.Expect("hamming_topk, ids", same ? 0 : 1, 0);
}

void AtLength(Bench& bench, Pool& pool, int64_t n) {
  const Layers l = pool.Cut(n);
  const std::string shape = DecodeShapeName(n);
  const auto any = [&](int64_t bound) {
    return static_cast<int64_t>(bench.rng()() % static_cast<uint64_t>(bound));
  };
  const double row_bytes = 2.0 * kHeadDim * 2;  // of K and V

  // Correct first, on one KV head of one layer.
  int64_t layer = any(l.count), head = any(kKvHeads);
  CARREL_CHECK_CUDA(WindowAttentionCuda(l.Dense(layer), nullptr));
  const double dense_error = CheckAttention(bench, l, layer, head, nullptr, "window_attention");
  for (int64_t i = 0; i < l.count; ++i) CARREL_CHECK_CUDA(HammingTopK(l.Select(i), nullptr));
  layer = any(l.count), head = any(kKvHeads);
  const auto ids = Download(l.ids + (layer * kKvHeads + head) * kTopK, kTopK);
  CheckSelection(bench, l, layer, head, ids);
  CARREL_CHECK_CUDA(SparseAttentionCuda(l.Sparse(layer), nullptr));
  const double sparse_error = CheckAttention(bench, l, layer, head, &ids, "sparse_attention");

  bench.Report(
      {.kernel = "window_attention",
       .shape = shape,
       .n = n,
       .time = bench.Time(
           l.count, [&](int64_t i, cudaStream_t s) { return WindowAttentionCuda(l.Dense(i), s); }),
       .bytes = kKvHeads * n * row_bytes,
       .error = dense_error,
       .error_of = "out"});
  bench.Report(
      {.kernel = "hamming_topk",
       .shape = shape + ", 128 bits, k 2048",
       .n = n,
       .time = bench.Time(l.count,
                          [&](int64_t i, cudaStream_t s) { return HammingTopK(l.Select(i), s); }),
       .bytes = kKvHeads * n * kBits / 8.0,
       .error_of = "ids"});
  bench.Report(
      {.kernel = "sparse_attention",
       .shape = shape + ", 2048 rows",
       .n = n,
       .time = bench.Time(
           l.count, [&](int64_t i, cudaStream_t s) { return SparseAttentionCuda(l.Sparse(i), s); }),
       .bytes = kKvHeads * kTopK * row_bytes,
       .error = sparse_error,
       .error_of = "out"});
  bench.Report({.kernel = "select_and_attend",
                .shape = shape + ", 128 bits, 2048 rows",
                .n = n,
                .time = bench.Time(l.count,
                                   [&](int64_t i, cudaStream_t s) {
                                     const cudaError_t error = HammingTopK(l.Select(i), s);
                                     return error != cudaSuccess
                                                ? error
                                                : SparseAttentionCuda(l.Sparse(i), s);
                                   }),
                .bytes = kKvHeads * (n * kBits / 8.0 + kTopK * row_bytes),
                .error = sparse_error,
                .error_of = "out"});
  CARREL_CHECK_CUDA(cudaFree(pool.select_workspace));
}

// 2,048 random rows of each KV head in pinned host memory, read where they lie.
void FromPinnedMemory(Bench& bench, Pool& pool) {
  constexpr int64_t kN = 64 << 10, kBytes = kKvHeads * kN * kHeadDim * 2;
  Layers l = pool.Cut(kN);
  l.count = 1;
  void *k = nullptr, *v = nullptr;
  CARREL_CHECK_CUDA(cudaMallocHost(&k, kBytes));
  CARREL_CHECK_CUDA(cudaMallocHost(&v, kBytes));
  CARREL_CHECK_CUDA(cudaMemcpy(k, l.k, kBytes, cudaMemcpyDefault));
  CARREL_CHECK_CUDA(cudaMemcpy(v, l.v, kBytes, cudaMemcpyDefault));
  CARREL_CHECK_CUDA(HammingTopK(l.Select(0), nullptr));
  SparseAttentionCudaParams p = l.Sparse(0);
  p.kv = {static_cast<Bf16*>(k), static_cast<Bf16*>(v), kN};
  CARREL_CHECK_CUDA(SparseAttentionCuda(p, nullptr));
  const auto ids = Download(l.ids, kTopK);
  const double error = CheckAttention(bench, l, 0, 0, &ids, "sparse_attention, pinned");
  bench.Report(
      {.kernel = "sparse_attention_pinned",
       .shape = DecodeShapeName(kN) + ", 2048 rows in host memory",
       .n = kN,
       .time = bench.Time(1, [&](int64_t, cudaStream_t s) { return SparseAttentionCuda(p, s); }),
       .bytes = kKvHeads * kTopK * kHeadDim * 4.0,
       .error = error,
       .error_of = "out"});
  CARREL_CHECK_CUDA(cudaFreeHost(k));
  CARREL_CHECK_CUDA(cudaFreeHost(v));
  CARREL_CHECK_CUDA(cudaFree(pool.select_workspace));
}

void Merge(Bench& bench, Pool& pool) {
  float* other = Allocate<float>(kQHeads * kHeadDim);
  float* other_lse = Allocate<float>(kQHeads);
  const MergeStatesCudaParams p{pool.out, pool.lse, other, other_lse, pool.q, kQHeads, kHeadDim};
  bench.Report(
      {.kernel = "merge_states",
       .shape = "32 heads, head_dim 128",
       .n = kQHeads,
       .time = bench.Time(32, [&](int64_t, cudaStream_t s) { return MergeStatesCuda(p, s); }),
       .bytes = kQHeads * kHeadDim * 14.0});
}

}  // namespace

void DecodeBenches(Bench& bench) {
  const std::vector<int64_t> lengths = DecodeLengths(bench.quick());
  Pool pool(bench, std::max<int64_t>(lengths.back(), 64 << 10), bench.quick() ? 2 : 3);
  for (int64_t n : lengths) AtLength(bench, pool, n);
  FromPinnedMemory(bench, pool);
  Merge(bench, pool);
  for (void* data :
       {static_cast<void*>(pool.k), static_cast<void*>(pool.v), static_cast<void*>(pool.codes)}) {
    CARREL_CHECK_CUDA(cudaFree(data));
  }
}

}  // namespace carrel::gpu_bench
