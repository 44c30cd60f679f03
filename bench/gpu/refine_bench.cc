// Attention of one token over rows that a method chooses: everything from the query to the output,
// one layer, at 2,048 rows. What a method keeps for several tokens is timed over a whole cycle of
// its refresh intervals, and a step that keeps nothing by itself.
#include <algorithm>
#include <numeric>
#include <string>

#include "bench/gpu/decode_shape.h"
#include "common/bf16.h"
#include "kernels/attention/sparse_attention/sparse_attention_cuda.h"
#include "kernels/attention/window_attention/window_attention_cuda.h"
#include "kernels/encode/hash_encode/hash_encode.h"
#include "kernels/score/channel_score/channel_score.h"
#include "kernels/score/dot_score/dot_score.h"
#include "kernels/score/dot_score/dot_score_cuda.h"
#include "kernels/score/group_score/group_score.h"
#include "kernels/select/code_topk/code_topk.h"
#include "kernels/select/group_topk/group_topk.h"
#include "kernels/select/hamming_topk/hamming_topk.h"
#include "kernels/select/hip_select/hip_select.h"
#include "kernels/select/infinitehip_stage/infinitehip_stage.h"
#include "kernels/select/rescore_rows/rescore_rows.h"
#include "kernels/select/topk/topk.h"
#include "kernels/select/topk/topk_cuda.h"

namespace carrel::gpu_bench {
namespace {

using namespace carrel::kernels;

constexpr int64_t kHipBlock = 2, kWidth = 32;  // keys of a block; channels of a label: head_dim / 4
// Layers in turn: what a step reads is so old when its layer comes again that L2 has lost it.
constexpr int64_t kLayers = 12;
constexpr int64_t kMostOversample = 8;

struct StageShape {
  int64_t chunk, wanted;
};
constexpr StageShape kStages[] = {{256, 32768}, {32, 8192}, {8, kTopK}};
constexpr int64_t kStageCount = 3;

struct Preset {
  const char* name;
  int64_t refresh[kStageCount];
};
constexpr Preset kPresets[] = {{"infinitehip_default", {16, 8, 4}},
                               {"infinitehip_fast", {32, 16, 8}},
                               {"infinitehip_flash", {96, 24, 8}}};

int64_t PhaseOf(const Preset& preset, int64_t step) {
  for (int64_t i = 0; i < kStageCount; ++i) {
    if (step % preset.refresh[i] == 0) return i;
  }
  return kStageCount;
}

int64_t CycleOf(const Preset& preset) {
  return std::lcm(std::lcm(preset.refresh[0], preset.refresh[1]), preset.refresh[2]);
}

// kLayers layers of n rows; memory for the longest, used anew for each length.
struct Layers {
  int64_t n = 0;
  uint16_t *q = nullptr, *k = nullptr, *v = nullptr, *matrix = nullptr;
  uint32_t *query_codes = nullptr, *codes = nullptr;
  int32_t *ids = nullptr, *candidates = nullptr, *row_count = nullptr, *ranges = nullptr,
          *range_count = nullptr;
  int32_t* channels = nullptr;
  float *least = nullptr, *step = nullptr, *scores = nullptr, *of_q_heads = nullptr;
  float *out = nullptr, *lse = nullptr, *states = nullptr, *base = nullptr;
  void *attention_workspace = nullptr, *hip_workspace = nullptr, *stage_workspace = nullptr;
  void *hash_workspace = nullptr, *channel_workspace = nullptr, *topk_workspace = nullptr,
       *group_workspace = nullptr, *code_workspace = nullptr;

  explicit Layers(Bench& bench, int64_t longest) : n(longest) {
    const int64_t rows = kKvHeads * longest;
    q = Allocate<uint16_t>(kLayers * kQHeads * kHeadDim);
    k = Allocate<uint16_t>(kLayers * rows * kHeadDim);
    v = Allocate<uint16_t>(kLayers * rows * kHeadDim);
    matrix = Allocate<uint16_t>(kKvHeads * kBits * kHeadDim);
    query_codes = Allocate<uint32_t>(kQHeads * kBits / 32);
    codes = Allocate<uint32_t>(kLayers * rows * kBits / 32);  // of hash, and labels of channels
    ids = Allocate<int32_t>(kLayers * kKvHeads * kTopK);
    candidates = Allocate<int32_t>(kKvHeads * kTopK * kMostOversample);
    row_count = Allocate<int32_t>(kLayers * kKvHeads);
    ranges = Allocate<int32_t>(kLayers * kStageCount * kKvHeads * MostRanges() * 2);
    range_count = Allocate<int32_t>(kLayers * kStageCount * kKvHeads);
    channels = Allocate<int32_t>(kKvHeads * kWidth);
    least = Allocate<float>(kKvHeads * kWidth);
    step = Allocate<float>(kKvHeads * kWidth);
    scores = Allocate<float>(rows);
    of_q_heads = Allocate<float>(kQHeads * longest);
    states = Allocate<float>(2 * kQHeads * kMaxDotScoreParts);
    base = Allocate<float>(kQHeads);
    out = Allocate<float>(kQHeads * kHeadDim);
    lse = Allocate<float>(kQHeads);
    const auto workspace = [](size_t bytes) {
      return Allocate<uint8_t>(static_cast<int64_t>(bytes));
    };
    attention_workspace =
        workspace(DecodeWorkspaceBytes(kKvHeads, kGroup, kHeadDim, kMaxDecodeSplits));
    hip_workspace = workspace(HipSelectWorkspaceBytes(kKvHeads, kHipBlock, kTopK));
    stage_workspace = workspace(InfiniteHipStageWorkspaceBytes(Stage(0, 0)));
    hash_workspace = workspace(HammingTopKWorkspaceBytes(Hash(0)));
    channel_workspace = workspace(ChannelScoreWorkspaceBytes(kKvHeads, kGroup));
    topk_workspace = workspace(TopKWorkspaceBytes(kKvHeads));
    code_workspace = workspace(CodeTopKWorkspaceBytes(Weighted(0, 1)));
    group_workspace = workspace(GroupTopKWorkspaceBytes(ExactBest(0)));
    const auto seed = [&] { return bench.rng()(); };
    CARREL_CHECK_CUDA(FillNormalBf16(q, kLayers * kQHeads * kHeadDim, 1.0f, seed()));
    CARREL_CHECK_CUDA(FillNormalBf16(k, kLayers * rows * kHeadDim, 1.0f, seed()));
    CARREL_CHECK_CUDA(FillNormalBf16(v, kLayers * rows * kHeadDim, 1.0f, seed()));
    CARREL_CHECK_CUDA(FillNormalBf16(matrix, kKvHeads * kBits * kHeadDim, 1.0f, seed()));
    CARREL_CHECK_CUDA(FillBits(codes, kLayers * rows * kBits / 32, seed()));
    CARREL_CHECK_CUDA(FillNormal(least, kKvHeads * kWidth, seed()));
    CARREL_CHECK_CUDA(FillNormal(step, kKvHeads * kWidth, seed()));
    std::vector<int32_t> some(kKvHeads * kWidth);
    for (int32_t& channel : some) channel = static_cast<int32_t>(bench.rng()() % kHeadDim);
    CARREL_CHECK_CUDA(cudaMemcpy(channels, some.data(), some.size() * 4, cudaMemcpyDefault));
  }

  static int64_t MostRanges() {
    int64_t most = 0;
    for (const StageShape& stage : kStages) most = std::max(most, stage.wanted / stage.chunk);
    return most;
  }
  const uint16_t* Queries(int64_t layer) const { return q + layer * kQHeads * kHeadDim; }
  KvView Rows(int64_t layer) const {
    const int64_t at = layer * kKvHeads * n * kHeadDim;
    return {k + at, v + at, n};
  }
  uint32_t* Codes(int64_t layer) const { return codes + layer * kKvHeads * n * kBits / 32; }
  int32_t* Ids(int64_t layer) const { return ids + layer * kKvHeads * kTopK; }

  WindowAttentionCudaParams Dense(int64_t layer) const {
    return {.q = Queries(layer),
            .kv = Rows(layer),
            .kv_heads = kKvHeads,
            .group = kGroup,
            .head_dim = kHeadDim,
            .rows = n,
            .scale = kScale,
            .out = out,
            .lse = lse,
            .splits = DecodeSplits(n, kKvHeads),
            .workspace = attention_workspace};
  }
  SparseAttentionCudaParams Sparse(int64_t layer, bool counted) const {
    return {.q = Queries(layer),
            .kv = Rows(layer),
            .ids = Ids(layer),
            .kv_heads = kKvHeads,
            .group = kGroup,
            .head_dim = kHeadDim,
            .ids_stride = kTopK,
            .rows = kTopK,
            .row_count = counted ? row_count + layer * kKvHeads : nullptr,
            .scale = kScale,
            .out = out,
            .lse = lse,
            .splits = DecodeSplits(kTopK, kKvHeads),
            .workspace = attention_workspace};
  }
  HipSelectParams Hip(int64_t layer) const {
    return {.q = Queries(layer),
            .kv = Rows(layer),
            .kv_heads = kKvHeads,
            .group = kGroup,
            .head_dim = kHeadDim,
            .rows = n,
            .block_k = kHipBlock,
            .budget = kTopK,
            .ids = Ids(layer),
            .ids_stride = kTopK,
            .row_count = row_count + layer * kKvHeads,
            .workspace = hip_workspace};
  }
  InfiniteHipRange* Ranges(int64_t layer, int64_t stage) const {
    return reinterpret_cast<InfiniteHipRange*>(ranges + (layer * kStageCount + stage) * kKvHeads *
                                                            MostRanges() * 2);
  }
  int32_t* RangeCount(int64_t layer, int64_t stage) const {
    return range_count + (layer * kStageCount + stage) * kKvHeads;
  }
  InfiniteHipStageParams Stage(int64_t layer, int64_t stage) const {
    InfiniteHipStageParams p{.q = Queries(layer),
                             .kv = Rows(layer),
                             .kv_heads = kKvHeads,
                             .group = kGroup,
                             .head_dim = kHeadDim,
                             .rows = n,
                             .chunk = kStages[stage].chunk,
                             .wanted = kStages[stage].wanted,
                             .out = Ranges(layer, stage),
                             .out_count = RangeCount(layer, stage),
                             .out_stride = kStages[stage].wanted / kStages[stage].chunk,
                             .workspace = stage_workspace};
    if (stage > 0) {
      p.in = Ranges(layer, stage - 1);
      p.in_count = RangeCount(layer, stage - 1);
      p.in_stride = kStages[stage - 1].wanted / kStages[stage - 1].chunk;
      p.in_rows = kStages[stage - 1].chunk;
    }
    if (stage == kStageCount - 1) {
      p.ids = Ids(layer);
      p.ids_stride = kTopK;
      p.row_count = row_count + layer * kKvHeads;
    }
    return p;
  }
  HashEncodeParams Encode(int64_t layer) const {
    return {Queries(layer), matrix, query_codes, kKvHeads, kGroup, kGroup, kGroup, kHeadDim, kBits};
  }
  // Where a method puts its choice.
  int32_t* Chosen(int64_t layer, int64_t oversample) const {
    return oversample == 1 ? Ids(layer) : candidates;
  }
  CodeTopKParams Weighted(int64_t layer, int64_t oversample) const {
    return {.q = Queries(layer),
            .decoder = matrix,
            .codes = Codes(layer),
            .kv_heads = kKvHeads,
            .group = kGroup,
            .head_dim = kHeadDim,
            .bits = kBits,
            .rows = n,
            .code_stride = n,
            .k = oversample * kTopK,
            .scale = kScale / 8,  // of random codes: scores some units apart
            .ids = Chosen(layer, oversample),
            .workspace = code_workspace};
  }
  HammingTopKParams Hash(int64_t layer, int64_t oversample = 1) const {
    return {.queries = query_codes,
            .codes = Codes(layer),
            .kv_heads = kKvHeads,
            .group = kGroup,
            .bits = kBits,
            .rows = n,
            .code_stride = n,
            .k = oversample * kTopK,
            .ids = Chosen(layer, oversample),
            .workspace = hash_workspace};
  }
  ChannelScoreParams Channels(int64_t layer) const {
    return {.q = Queries(layer),
            .channels = channels,
            .least = least,
            .step = step,
            .labels = Codes(layer),
            .kv_heads = kKvHeads,
            .group = kGroup,
            .head_dim = kHeadDim,
            .width = kWidth,
            .rows = n,
            .label_stride = n,
            .score_stride = n,
            .scale = kScale,
            .scores = scores,
            .workspace = channel_workspace};
  }
  TopKCudaParams Best(int64_t layer, int64_t oversample) const {
    return {.scores = scores,
            .kv_heads = kKvHeads,
            .n = n,
            .score_stride = n,
            .k = oversample * kTopK,
            .ids = Chosen(layer, oversample),
            .workspace = topk_workspace};
  }
  RescoreRowsParams Rescore(int64_t layer, int64_t oversample) const {
    return {.q = Queries(layer),
            .kv = Rows(layer),
            .candidates = candidates,
            .kv_heads = kKvHeads,
            .group = kGroup,
            .head_dim = kHeadDim,
            .candidate_stride = oversample * kTopK,
            .count = oversample * kTopK,
            .wanted = kTopK,
            .scale = kScale,
            .ids = Ids(layer),
            .out = out,
            .lse = lse};
  }

  // One step of a layer each, selection and attention.
  cudaError_t RunHip(int64_t layer, bool select, cudaStream_t s) const {
    cudaError_t error = select ? HipSelect(Hip(layer), s) : cudaSuccess;
    return error != cudaSuccess ? error : SparseAttentionCuda(Sparse(layer, true), s);
  }
  cudaError_t RunInfiniteHip(int64_t layer, int64_t phase, cudaStream_t s) const {
    cudaError_t error = cudaSuccess;
    for (int64_t i = phase; i < kStageCount && error == cudaSuccess; ++i) {
      error = InfiniteHipStage(Stage(layer, i), s);
    }
    return error != cudaSuccess ? error : SparseAttentionCuda(Sparse(layer, true), s);
  }
  GroupTopKParams ExactBest(int64_t layer) const {
    return {.scores = of_q_heads,
            .states = states,
            .parts = DotScoreParts(kKvHeads, n),
            .kv_heads = kKvHeads,
            .group = kGroup,
            .n = n,
            .score_stride = n,
            .k = kTopK,
            .ids = Ids(layer),
            .base = base,
            .workspace = group_workspace};
  }
  cudaError_t ScoreExact(int64_t layer, cudaStream_t s) const {
    DotScoreCudaParams dot;
    dot.q = Queries(layer);
    dot.kv = Rows(layer);
    dot.kv_heads = kKvHeads;
    dot.group = kGroup;
    dot.head_dim = kHeadDim;
    dot.rows = dot.score_stride = n;
    dot.scale = kScale;
    dot.scores = of_q_heads;
    dot.states = states;
    return DotScoreCuda(dot, s);
  }
  cudaError_t SelectExact(int64_t layer, cudaStream_t s) const {
    const cudaError_t error = ScoreExact(layer, s);
    return error != cudaSuccess ? error : GroupTopK(ExactBest(layer), s);
  }
  cudaError_t RunExact(int64_t layer, cudaStream_t s) const {
    const cudaError_t error = SelectExact(layer, s);
    return error != cudaSuccess ? error : Attend(layer, 1, s);
  }
  cudaError_t RunHash(int64_t layer, int64_t oversample, cudaStream_t s) const {
    const cudaError_t error = CodeTopK(Weighted(layer, oversample), s);
    return error != cudaSuccess ? error : Attend(layer, oversample, s);
  }
  cudaError_t RunSigns(int64_t layer, int64_t oversample, cudaStream_t s) const {
    cudaError_t error = HashEncode(Encode(layer), s);
    if (error == cudaSuccess) error = HammingTopK(Hash(layer, oversample), s);
    return error != cudaSuccess ? error : Attend(layer, oversample, s);
  }
  cudaError_t RunChannels(int64_t layer, int64_t oversample, cudaStream_t s) const {
    cudaError_t error = ChannelScore(Channels(layer), s);
    if (error == cudaSuccess) error = TopKCuda(Best(layer, oversample), s);
    return error != cudaSuccess ? error : Attend(layer, oversample, s);
  }
  // Of candidates the best by their keys.
  cudaError_t Attend(int64_t layer, int64_t oversample, cudaStream_t s) const {
    return oversample == 1 ? SparseAttentionCuda(Sparse(layer, false), s)
                           : RescoreRows(Rescore(layer, oversample), s);
  }
};

// One KV head of a layer on the host.
struct HostHead {
  int64_t layer, head;
  std::vector<uint16_t> q, k;

  HostHead(Bench& bench, const Layers& l)
      : layer(static_cast<int64_t>(bench.rng()() % kLayers)),
        head(static_cast<int64_t>(bench.rng()() % kKvHeads)),
        q(Download(l.Queries(layer) + head * kGroup * kHeadDim, kGroup * kHeadDim)),
        k(Download(l.Rows(layer).k + head * l.n * kHeadDim, l.n * kHeadDim)) {}
};

// The share of the rows that are not in both. Random scores hardly tie, but two that fp32 and fp64
// order differently may send a descent another way.
double Differing(std::vector<int32_t> a, std::vector<int32_t> b) {
  std::sort(a.begin(), a.end());
  std::sort(b.begin(), b.end());
  std::vector<int32_t> both;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(both));
  const size_t most = std::max<size_t>(1, std::max(a.size(), b.size()));
  return 1.0 - static_cast<double>(both.size()) / static_cast<double>(most);
}

std::vector<int32_t> SelectedOf(const Layers& l, const HostHead& h, bool counted) {
  int64_t count = kTopK;
  if (counted) count = Download(l.row_count + h.layer * kKvHeads + h.head, 1)[0];
  return Download(l.Ids(h.layer) + h.head * kTopK, count);
}

double CheckHip(Bench& bench, const Layers& l) {
  const HostHead h(bench, l);
  CARREL_CHECK_CUDA(l.RunHip(h.layer, true, nullptr));
  std::vector<int32_t> expected(kTopK);
  int32_t count = 0;
  HipSelectParams p = l.Hip(h.layer);
  p.q = h.q.data();
  p.kv.k = h.k.data();
  p.kv_heads = 1;
  p.ids = expected.data();
  p.row_count = &count;
  RefHipSelect(p);
  expected.resize(static_cast<size_t>(count));
  const double error = Differing(SelectedOf(l, h, true), expected);
  bench.Expect("hip, ids", error, 0.01);
  return error;
}

double CheckInfiniteHip(Bench& bench, const Layers& l) {
  const HostHead h(bench, l);
  CARREL_CHECK_CUDA(l.RunInfiniteHip(h.layer, 0, nullptr));
  std::vector<int32_t> expected(kTopK);
  std::vector<InfiniteHipRange> in, out;
  int32_t in_count = 0, out_count = 0, rows = 0;
  for (int64_t i = 0; i < kStageCount; ++i) {
    InfiniteHipStageParams p = l.Stage(h.layer, i);
    out.assign(static_cast<size_t>(p.out_stride), {});
    p.q = h.q.data();
    p.kv.k = h.k.data();
    p.kv_heads = 1;
    p.in = i == 0 ? nullptr : in.data();
    p.in_count = &in_count;
    p.out = out.data();
    p.out_count = &out_count;
    if (p.ids != nullptr) p.ids = expected.data();
    p.row_count = &rows;
    RefInfiniteHipStage(p);
    in = out;
    in_count = out_count;
  }
  expected.resize(static_cast<size_t>(rows));
  const double error = Differing(SelectedOf(l, h, true), expected);
  bench.Expect("infinitehip, ids", error, 0.01);
  return error;
}

double CheckChannels(Bench& bench, const Layers& l) {
  const HostHead h(bench, l);
  CARREL_CHECK_CUDA(l.RunChannels(h.layer, 1, nullptr));
  const int64_t words = l.n / 8 * kWidth;
  const auto labels = Download(l.Codes(h.layer) + h.head * words, words);
  const auto channels = Download(l.channels + h.head * kWidth, kWidth);
  const auto least = Download(l.least + h.head * kWidth, kWidth);
  const auto step = Download(l.step + h.head * kWidth, kWidth);
  std::vector<float> scores(static_cast<size_t>(l.n));
  ChannelScoreParams p = l.Channels(h.layer);
  p.q = h.q.data();
  p.channels = channels.data();
  p.least = least.data();
  p.step = step.data();
  p.labels = labels.data();
  p.kv_heads = 1;
  p.scores = scores.data();
  RefChannelScore(p);
  std::vector<int64_t> best(kTopK);
  RefTopK(scores.data(), l.n, kTopK, best.data());
  const double error =
      Differing(SelectedOf(l, h, false), std::vector<int32_t>(best.begin(), best.end()));
  bench.Expect("channels, ids", error, 0.01);
  return error;
}

// The rows of the best group scores, in double precision.
double CheckExact(Bench& bench, const Layers& l) {
  const HostHead h(bench, l);
  CARREL_CHECK_CUDA(l.RunExact(h.layer, nullptr));
  std::vector<const void*> rows;
  for (int64_t j = 0; j < l.n; ++j) rows.push_back(h.k.data() + j * kHeadDim);
  std::vector<float> wide, scores(static_cast<size_t>(kGroup * l.n)),
      group(static_cast<size_t>(l.n));
  for (const uint16_t x : h.q) wide.push_back(Bf16ToFloat(x));
  RefDotScoreRows(wide.data(), kGroup, kHeadDim, rows.data(), l.n, kScale, scores.data(), l.n);
  std::vector<float> base;
  for (int64_t i = 0; i < kGroup; ++i) {
    base.push_back(static_cast<float>(RefLogSumExp(scores.data() + i * l.n, l.n)));
  }
  RefGroupScore(scores.data(), kGroup, l.n, l.n, base.data(), group.data());
  std::vector<int64_t> best(kTopK);
  RefTopK(group.data(), l.n, kTopK, best.data());
  const double error =
      Differing(SelectedOf(l, h, false), std::vector<int32_t>(best.begin(), best.end()));
  bench.Expect("exact, ids", error, 0.01);
  return error;
}

// Candidates as hash chooses them.
double CheckRescored(Bench& bench, const Layers& l) {
  constexpr int64_t kOversample = 4;
  const HostHead h(bench, l);
  CARREL_CHECK_CUDA(l.RunHash(h.layer, kOversample, nullptr));
  RescoreRowsParams p = l.Rescore(h.layer, kOversample);
  const auto candidates = Download(l.candidates + h.head * p.candidate_stride, p.candidate_stride);
  std::vector<int32_t> expected(kTopK);
  p.q = h.q.data();
  p.kv.k = h.k.data();
  p.candidates = candidates.data();
  p.kv_heads = 1;
  p.ids = expected.data();
  RefRescoreRows(p);
  const double error = Differing(SelectedOf(l, h, false), expected);
  bench.Expect("hash, rescored, ids", error, 0.02);  // scores are compared in steps
  return error;
}

void AtLength(Bench& bench, Layers& l, int64_t n) {
  l.n = n;
  const std::string shape = DecodeShapeName(n) + ", 2048 rows";
  const double attended = kKvHeads * kTopK * 2.0 * kHeadDim * 2;  // bytes
  const auto report = [&](const char* kernel, double bytes, double error, int64_t steps,
                          const std::function<cudaError_t(int64_t, int64_t, cudaStream_t)>& run) {
    bench.Report({.kernel = kernel,
                  .shape = shape,
                  .n = n,
                  .time = bench.Time(
                      steps * kLayers,
                      [&](int64_t i, cudaStream_t s) { return run(i / kLayers, i % kLayers, s); }),
                  .bytes = bytes + attended,
                  .error = error,
                  .error_of = "share of the rows that the reference does not choose"});
  };
  bench.Report(
      {.kernel = "refine_dense",
       .shape = DecodeShapeName(n),
       .n = n,
       .time = bench.Time(
           kLayers, [&](int64_t i, cudaStream_t s) { return WindowAttentionCuda(l.Dense(i), s); }),
       .bytes = kKvHeads * n * 2.0 * kHeadDim * 2});

  const double hip = CheckHip(bench, l);
  for (const int64_t refresh : {1, 2, 4, 8}) {
    const std::string name = refresh == 1 ? "hip" : "hip_refresh_" + std::to_string(refresh);
    report(name.c_str(), 0, hip, refresh, [&](int64_t step, int64_t layer, cudaStream_t s) {
      return l.RunHip(layer, step == 0, s);
    });
  }

  const double infinite_hip = CheckInfiniteHip(bench, l);
  // Every layer has its ranges before some are kept.
  for (int64_t i = 0; i < kLayers; ++i) CARREL_CHECK_CUDA(l.RunInfiniteHip(i, 0, nullptr));
  for (int64_t phase = 0; phase <= kStageCount; ++phase) {
    const std::string name = "infinitehip_from_stage_" + std::to_string(phase + 1);
    report(
        phase == kStageCount ? "infinitehip_kept" : name.c_str(), 0, infinite_hip, 1,
        [&](int64_t, int64_t layer, cudaStream_t s) { return l.RunInfiniteHip(layer, phase, s); });
  }
  for (const Preset& preset : kPresets) {
    report(preset.name, 0, infinite_hip, CycleOf(preset),
           [&](int64_t step, int64_t layer, cudaStream_t s) {
             return l.RunInfiniteHip(layer, PhaseOf(preset, step), s);
           });
  }

  const double exact = CheckExact(bench, l);
  report("exact", kKvHeads * n * 2.0 * kHeadDim, exact, 1,
         [&](int64_t, int64_t layer, cudaStream_t s) { return l.RunExact(layer, s); });
  report("exact_scores", kKvHeads * n * 2.0 * kHeadDim, 0, 1,
         [&](int64_t, int64_t layer, cudaStream_t s) { return l.ScoreExact(layer, s); });
  report("exact_selection", kKvHeads * n * 2.0 * kHeadDim, 0, 1,
         [&](int64_t, int64_t layer, cudaStream_t s) { return l.SelectExact(layer, s); });
  for (const int64_t oversample : {1, 2, 4}) {
    report(("hash_selection_" + std::to_string(oversample)).c_str(), kKvHeads * n * kBits / 8.0, 0,
           1, [&](int64_t, int64_t layer, cudaStream_t s) {
             return CodeTopK(l.Weighted(layer, oversample), s);
           });
  }

  // hamming_topk is held to its reference by DecodeBenches.
  const double channels = CheckChannels(bench, l), rescored = CheckRescored(bench, l);
  for (const int64_t oversample : {int64_t{1}, int64_t{2}, int64_t{4}, kMostOversample}) {
    const std::string suffix = oversample == 1 ? "" : "_rescored_" + std::to_string(oversample);
    const double keys = oversample == 1 ? 0 : kKvHeads * (oversample - 1) * kTopK * 2.0 * kHeadDim;
    report(("hash" + suffix).c_str(), kKvHeads * n * kBits / 8.0 + keys,
           oversample == 1 ? 0 : rescored, 1,
           [&](int64_t, int64_t layer, cudaStream_t s) { return l.RunHash(layer, oversample, s); });
    report(("hash_signs" + suffix).c_str(), kKvHeads * n * kBits / 8.0 + keys,
           oversample == 1 ? 0 : rescored, 1, [&](int64_t, int64_t layer, cudaStream_t s) {
             return l.RunSigns(layer, oversample, s);
           });
    report(("channels" + suffix).c_str(), kKvHeads * n * (kWidth + 8.0) + keys,
           oversample == 1 ? channels : rescored, 1, [&](int64_t, int64_t layer, cudaStream_t s) {
             return l.RunChannels(layer, oversample, s);
           });
  }
}

}  // namespace

void RefineBenches(Bench& bench) {
  // The published stages prune from 32k rows on.
  std::vector<int64_t> lengths = {128 << 10, 256 << 10, 1 << 20};
  if (bench.quick()) lengths.resize(1);
  Layers layers(bench, lengths.back());
  for (const int64_t n : lengths) AtLength(bench, layers, n);
}

}  // namespace carrel::gpu_bench
