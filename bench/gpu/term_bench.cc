// The estimation term of one token and layer: 256 rows are selected, clusters of 40 rows tell of the
// rest.
#include <algorithm>
#include <numeric>

#include "bench/gpu/decode_shape.h"
#include "kernels/attention/summary_attention/summary_attention_cuda.h"

namespace carrel::gpu_bench {
namespace {

using namespace carrel::kernels;

constexpr int64_t kSelected = 256, kClusterRows = 40;

struct Term {
  int64_t n, clusters;
  int64_t layers;  // in turn: L2 has lost one when it comes again
  uint16_t *q, *k, *v;
  int32_t* ids;
  int8_t *keys, *values;
  SummaryTable::Cluster* of_cluster;
  uint8_t* row_cluster;
  float *centre, *base, *out, *lse;
  void* workspace;

  Term(Bench& bench, int64_t rows) : n(rows) {
    const SummarySegments s = Segments();
    clusters = (n / s.segment_rows) * s.segment_clusters;
    layers = Copies(2.0 * kKvHeads * static_cast<double>(clusters) * kHeadDim, 256);
    q = Allocate<uint16_t>(kQHeads * kHeadDim);
    k = Allocate<uint16_t>(kKvHeads * kSelected * kHeadDim);
    v = Allocate<uint16_t>(kKvHeads * kSelected * kHeadDim);
    ids = Allocate<int32_t>(kKvHeads * kSelected);
    keys = Allocate<int8_t>(layers * kKvHeads * clusters * kHeadDim);
    values = Allocate<int8_t>(layers * kKvHeads * clusters * kHeadDim);
    of_cluster = Allocate<SummaryTable::Cluster>(kKvHeads * clusters);
    row_cluster = Allocate<uint8_t>(kKvHeads * n);
    centre = Allocate<float>(kKvHeads * kHeadDim);
    base = Allocate<float>(kQHeads);
    out = Allocate<float>(kQHeads * kHeadDim);
    lse = Allocate<float>(kQHeads);
    workspace = Allocate<uint8_t>(
        static_cast<int64_t>(SummaryWorkspaceBytes(kKvHeads, kGroup, kHeadDim, clusters)));
    const auto seed = [&] { return bench.rng()(); };
    CARREL_CHECK_CUDA(FillNormalBf16(q, kQHeads * kHeadDim, 1.0f, seed()));
    CARREL_CHECK_CUDA(FillNormalBf16(k, kKvHeads * kSelected * kHeadDim, 1.0f, seed()));
    CARREL_CHECK_CUDA(FillNormalBf16(v, kKvHeads * kSelected * kHeadDim, 1.0f, seed()));
    const int64_t words = layers * kKvHeads * clusters * kHeadDim / 4;
    CARREL_CHECK_CUDA(FillBits(reinterpret_cast<uint32_t*>(keys), words, seed()));
    CARREL_CHECK_CUDA(FillBits(reinterpret_cast<uint32_t*>(values), words, seed()));
    FillClusters(bench);
  }

  static SummarySegments Segments() { return {0, 8192, (8192 + kClusterRows - 1) / kClusterRows}; }

  void FillClusters(Bench& bench) {
    const SummarySegments s = Segments();
    std::vector<SummaryTable::Cluster> host(static_cast<size_t>(kKvHeads * clusters),
                                            {0.002f, 0.1f, 0.01f, 0});
    std::vector<uint8_t> of_row;
    std::vector<int32_t> selected;
    for (int64_t g = 0; g < kKvHeads; ++g) {
      for (int64_t r = 0; r < n; ++r) {
        of_row.push_back(static_cast<uint8_t>(bench.rng()() % s.segment_clusters));
        host[static_cast<size_t>(g * clusters + r / s.segment_rows * s.segment_clusters +
                                 of_row.back())]
            .rows += 1;
      }
      for (int64_t j = 0; j < kSelected; ++j) {
        selected.push_back(static_cast<int32_t>(n / kSelected * j));
      }
    }
    CARREL_CHECK_CUDA(
        cudaMemcpy(of_cluster, host.data(), host.size() * sizeof(host[0]), cudaMemcpyDefault));
    CARREL_CHECK_CUDA(cudaMemcpy(row_cluster, of_row.data(), of_row.size(), cudaMemcpyDefault));
    CARREL_CHECK_CUDA(cudaMemcpy(ids, selected.data(), selected.size() * 4, cudaMemcpyDefault));
    const std::vector<float> bases(kQHeads, 12.0f);
    CARREL_CHECK_CUDA(cudaMemcpy(base, bases.data(), bases.size() * 4, cudaMemcpyDefault));
    CARREL_CHECK_CUDA(cudaMemset(centre, 0, kKvHeads * kHeadDim * 4));
    CARREL_CHECK_CUDA(cudaMemset(out, 0, kQHeads * kHeadDim * 4));
    CARREL_CHECK_CUDA(cudaMemset(lse, 0, kQHeads * 4));
    CARREL_CHECK_CUDA(
        cudaMemset(workspace, 0, SummaryWorkspaceBytes(kKvHeads, kGroup, kHeadDim, clusters)));
  }

  SummaryAttentionCudaParams At(int64_t layer) const {
    const int64_t means = layer * kKvHeads * clusters * kHeadDim;
    SummaryAttentionCudaParams p;
    p.q = q;
    p.kv = {k, v, kSelected};
    p.kv_heads = kKvHeads;
    p.group = kGroup;
    p.head_dim = kHeadDim;
    p.ids = ids;
    p.ids_stride = p.selected = kSelected;
    p.gathered = true;
    p.base = base;
    p.table = {Segments(),     clusters,   n,           keys + means,
               values + means, of_cluster, row_cluster, centre};
    p.scale = kScale;
    p.out = out;
    p.lse = lse;
    p.workspace = workspace;
    return p;
  }
};

// The largest difference of an output from the reference's.
double Check(const Term& t) {
  SummaryAttentionCudaParams p = t.At(0);
  CARREL_CHECK_CUDA(AttendSummariesCuda(p, nullptr));
  const auto got = Download(t.out, kQHeads * kHeadDim);
  const auto q = Download(t.q, kQHeads * kHeadDim);
  const auto k = Download(t.k, kKvHeads * kSelected * kHeadDim);
  const auto v = Download(t.v, kKvHeads * kSelected * kHeadDim);
  const auto ids = Download(t.ids, kKvHeads * kSelected);
  const auto keys = Download(t.keys, kKvHeads * t.clusters * kHeadDim);
  const auto values = Download(t.values, kKvHeads * t.clusters * kHeadDim);
  const auto of_cluster = Download(t.of_cluster, kKvHeads * t.clusters);
  const auto row_cluster = Download(t.row_cluster, kKvHeads * t.n);
  const auto centre = Download(t.centre, kKvHeads * kHeadDim);
  const auto base = Download(t.base, kQHeads);
  std::vector<float> out(kQHeads * kHeadDim), lse(kQHeads);
  p.q = q.data(), p.kv = {k.data(), v.data(), kSelected}, p.ids = ids.data(), p.base = base.data();
  p.table.keys = keys.data(), p.table.values = values.data();
  p.table.of_cluster = of_cluster.data(), p.table.row_cluster = row_cluster.data();
  p.table.centre = centre.data(), p.out = out.data(), p.lse = lse.data();
  RefAttendSummariesCuda(p);
  double largest = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    largest = std::max(largest, std::abs(double{got[i]} - out[i]));
  }
  return largest;
}

}  // namespace

void TermBenches(Bench& bench) {
  for (const int64_t n : DecodeLengths(bench.quick())) {
    const Term term(bench, n);
    const double error = n <= 32 << 10 ? Check(term) : 0;
    if (n <= 32 << 10) bench.Expect("estimation term, outputs", error, 1e-2);
    bench.Report({.kernel = "estimation_term",
                  .shape = DecodeShapeName(n) + ", 256 selected, clusters of 40 rows",
                  .n = n,
                  .time = bench.Time(term.layers,
                                     [&](int64_t i, cudaStream_t s) {
                                       return AttendSummariesCuda(term.At(i), s);
                                     }),
                  .bytes = static_cast<double>(kKvHeads * term.clusters * (2 * kHeadDim + 16)),
                  .error = error,
                  .error_of = "largest difference of an output, at 32k"});
  }
}

}  // namespace carrel::gpu_bench
