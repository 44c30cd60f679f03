#include "model/cpu_backend.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "common/status.h"
#include "kernels/layer/gelu_mul/gelu_mul.h"
#include "kernels/layer/linear/linear.h"
#include "kernels/layer/quantized_linear/quantized_linear.h"
#include "kernels/layer/rms_norm/rms_norm.h"
#include "kernels/layer/rope/rope.h"
#include "kernels/layer/silu_mul/silu_mul.h"
#include "model/adapter.h"
#include "model/router.h"
#include "model/scratch_pool.h"
#include "model/weights.h"

namespace carrel::model {
namespace {

using kernels::kLinearGemmTokens;
using kernels::kLinearTokenTile;
using kernels::QuantizedMatrix;
using kernels::WeightMatrix;

// Tokens that one thread takes through a whole step. Several tiles of the GEMM, so that a weight
// panel, once widened, serves them all; a multiple of the tile, so that the cut changes no bit.
constexpr int64_t kBlockTokens = 4 * kLinearTokenTile;
// Where there are many cores, so that each has a block.
constexpr int64_t kManyCores = 8, kFewBlockTokens = 2 * kLinearTokenTile;
// Of a product of many tokens whose output is a model's width.
constexpr int64_t kFewestUnits = 3;
// A unit handed to another core must be worth the handing over, and small beside a product, at whose end
// the others wait for the last one: some 5 us of one token.
constexpr int64_t kUnitMultiplyAdds = 100'000;
// Output rows per unit where the cut changes bits: one number for every pool.
constexpr int64_t kGemmUnitRows = 512;
constexpr int64_t kGemvRowStep = 16;
// An adapter's products of more tokens go as a GEMM.
constexpr int64_t kAlikeWithAdapter = 31;
// Of a product of few tokens: in each the hardware must find the stream of its rows anew.
constexpr int64_t kMostUnits = 128;

// y [n, w.out] = x [n, w.in] W^T + b; rows of x and y are contiguous.
struct LinearCall {
  const float* x;
  const WeightMatrix* w;
  float* y;
  const QuantizedMatrix* blocks = nullptr;  // w as it lies, where it is in blocks
  // With an adapter: y += B low, low [n, rank] = scale A x.
  const LowRank* added = nullptr;
  float* low = nullptr;
  bool of_adapter = false;  // w is an adapter's own
};

LinearCall Product(const float* x, const Matrix& w, float* y) {
  return {x, &w, y, w.blocks ? &*w.blocks : nullptr};
}

constexpr int64_t kCallsTogether = 3;  // q, k and v

int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// What is computed between two waits of all cores.
struct Cut {
  int64_t rows;          // output rows of all products together
  int64_t cores;         // that share them
  int64_t together = 1;  // products whose rows a unit has
};

// Of a product that may be cut anywhere without a change of bits.
int64_t FreeUnitRows(const WeightMatrix& w, int64_t n, int64_t step, const Cut& cut) {
  const int64_t worth = CeilDivide(kUnitMultiplyAdds, w.in * n * step * cut.together);
  const int64_t stream = CeilDivide(cut.rows, kMostUnits * step);
  const int64_t rows = std::max(worth, stream) * step;
  // Units of one size, and as many for each core: the last of three is two cores' wait for one.
  int64_t units = std::max<int64_t>(1, (cut.rows + rows / 2) / rows);
  if (2 * units > cut.cores) units = CeilDivide(units, cut.cores) * cut.cores;
  return CeilDivide(cut.rows, units * step) * step;
}

// Output rows per unit for n tokens.
int64_t UnitRows(const WeightMatrix& w, int64_t n, const Cut& cut) {
  return n >= kLinearGemmTokens ? kGemmUnitRows : FreeUnitRows(w, n, kGemvRowStep, cut);
}

int64_t UnitRowsOfBlocks(const WeightMatrix& w, int64_t n, const Cut& cut) {
  const bool few = n < kernels::kQuantizedPanelTokens;
  return FreeUnitRows(w, n, few ? kGemvRowStep : kernels::kQuantizedPanelRows, cut);
}

int64_t UnitRows(const LinearCall& call, int64_t n, const Cut& cut) {
  if (call.blocks == nullptr) return UnitRows(*call.w, n, cut);
  return n <= kernels::QuantizedTokensAlike(*call.blocks) ? UnitRowsOfBlocks(*call.w, n, cut)
                                                          : kGemmUnitRows;
}

// In the order of Projection.
std::array<const Matrix*, kProjections> ProjectionsOf(const LayerWeights& w) {
  return {&w.q, &w.k, &w.v, &w.o, &w.gate, &w.up, &w.down};
}

class CpuBackend final : public Backend {
 public:
  CpuBackend(const ModelConfig& config, std::shared_ptr<const Weights> weights, ThreadPool* pool,
             RopeStage rope, std::shared_ptr<const Adapter> adapter)
      : config_(config),
        weights_(std::move(weights)),
        adapter_(std::move(adapter)),
        added_(FindAdded(config, *weights_, adapter_.get())),
        pool_(pool),
        rope_(rope),
        inv_freq_(RopeInvFreq(config.rope, config.shape.head_dim)),
        sliding_inv_freq_(RopeInvFreq(config.sliding.rope, config.shape.head_dim)),
        embedding_scale_(config.gemma ? std::sqrt(static_cast<float>(config.hidden_size)) : 1),
        query_scale_(config.query_scalar == 0 ? 1.0f
                                              : static_cast<float>(std::sqrt(config.shape.head_dim /
                                                                             config.query_scalar))),
        eps_(static_cast<float>(config.rms_norm_eps)),
        block_scratch_(kBlockTokens * (config.hidden_size + 2 * config.intermediate_size)),
        expert_scratch_(ExpertFloats(config)),
        choice_scratch_(2 * kBlockTokens * config.experts.per_token),
        linear_scratch_(LargestLinearScratch(config, *weights_, added_)),
        packed_scratch_(LargestPacked(config, *weights_)),
        low_scratch_(LargestLow(added_)),
        tokens_alike_(TokensAlike(config, *weights_, !added_.empty())) {}

  const ModelConfig& config() const override { return config_; }

  int64_t tokens_alike() const override { return tokens_alike_; }
  absl::Status Embed(absl::Span<const TokenId> tokens, float* hidden) override;
  using Backend::ProjectQkv;
  absl::Status ProjectQkv(Layer layer, const float* hidden, absl::Span<const TokenBlock> blocks,
                          float* q, float* k, float* v) override {
    Project(layer, hidden, blocks, q, k, v);
    return absl::OkStatus();
  }
  absl::Status ProjectQuery(Layer layer, const float* hidden, int64_t n, Position first_position,
                            float* q) override {
    Project(layer, hidden, {{first_position, n}}, q, nullptr, nullptr);
    return absl::OkStatus();
  }
  absl::Status FinishLayer(Layer layer, const float* attended, int64_t n, float* hidden) override;
  absl::Status Logits(const float* hidden, int64_t n, float* logits) override;

 private:
  // What the adapter adds to a matrix of weights_.
  using AddedByMatrix = absl::flat_hash_map<const WeightMatrix*, const LowRank*>;

  static AddedByMatrix FindAdded(const ModelConfig& config, const Weights& weights,
                                 const Adapter* adapter) {
    AddedByMatrix added;
    for (Layer layer(0); adapter != nullptr && layer.value() < config.shape.layers;
         layer = layer.next()) {
      const LayerWeights& w = weights.layer(layer);
      for (int p = 0; p < kProjections; ++p) {
        const LowRank* const one = adapter->Find(layer, static_cast<Projection>(p));
        if (one != nullptr) added[ProjectionsOf(w)[p]] = one;
      }
    }
    return added;
  }

  static void ForMatrices(const ModelConfig& config, const Weights& weights,
                          absl::FunctionRef<void(const Matrix&)> visit) {
    visit(weights.head());
    for (int32_t i = 0; i < config.shape.layers; ++i) {
      const LayerWeights& w = weights.layer(Layer(i));
      for (const Matrix* matrix : ProjectionsOf(w)) visit(*matrix);
      if (!w.experts.empty()) visit(w.router);
      for (const ExpertWeights& expert : w.experts) {
        for (const Matrix* matrix : {&expert.gate, &expert.up, &expert.down}) visit(*matrix);
      }
    }
  }

  // Beyond, sums have another order. One token's experts are added up in the order of its choice,
  // several tokens' in that of the experts.
  static int64_t TokensAlike(const ModelConfig& config, const Weights& weights, bool adapted) {
    if (config.experts.count > 0) return 1;
    int64_t alike = adapted ? kAlikeWithAdapter : kernels::kAnyTokens;
    ForMatrices(config, weights, [&](const Matrix& w) {
      alike = std::min(alike,
                       w.blocks ? kernels::QuantizedTokensAlike(*w.blocks) : kLinearGemmTokens - 1);
    });
    return alike;
  }

  // Router logits of a block; then gathered rows, gate, up and down of one expert's tokens, or of
  // one token's experts.
  static int64_t ExpertFloats(const ModelConfig& config) {
    const ExpertsConfig& experts = config.experts;
    if (experts.count == 0) return 0;
    return kBlockTokens * (experts.count + 2 * config.hidden_size + 2 * experts.intermediate_size);
  }

  static int64_t LargestLow(const AddedByMatrix& added) {
    int64_t rank = 0;
    for (const auto& [matrix, one] : added) rank = std::max(rank, one->a.out);
    return kCallsTogether * kBlockTokens * rank;
  }

  // For calls together, and the most tokens that are packed.
  static int64_t LargestPacked(const ModelConfig& config, const Weights& weights) {
    int64_t floats = 0;
    ForMatrices(config, weights, [&](const Matrix& w) {
      if (!w.blocks) return;
      const int64_t most = std::min(kernels::QuantizedTokensAlike(*w.blocks), kBlockTokens);
      floats = std::max(floats, kernels::PackedTokensFloats(*w.blocks, most));
    });
    return kCallsTogether * floats;
  }

  static int64_t LargestLinearScratch(const ModelConfig& config, const Weights& weights,
                                      const AddedByMatrix& added) {
    int64_t floats = 0;
    for (const auto& [matrix, one] : added) {
      floats = std::max(
          {floats, kernels::LinearScratchFloats(one->a), kernels::LinearScratchFloats(one->b)});
    }
    ForMatrices(config, weights, [&](const Matrix& w) {
      floats = std::max(floats, w.blocks ? kernels::QuantizedLinearScratchFloats(*w.blocks)
                                         : kernels::LinearScratchFloats(w));
    });
    return floats;
  }

  int cores() const { return pool_ == nullptr ? 1 : pool_->threads() + 1; }

  void ParallelFor(int64_t count, absl::FunctionRef<void(int64_t)> body) {
    if (pool_ != nullptr) {
      pool_->ParallelFor(count, body);
    } else {
      for (int64_t i = 0; i < count; ++i) body(i);
    }
  }

  // Each block widens the weights for itself: of few cores each has whole ones. Of many each has half of one, where there
  // are that many; of fewer tokens there are as many blocks as share their products' units, three or more, with all.
  int64_t BlockTokens(int64_t n) const {
    if (cores() < kManyCores || n >= kBlockTokens * cores()) return kBlockTokens;
    if (4 * n >= 3 * kFewBlockTokens * cores()) return kFewBlockTokens;
    const int64_t tiles = CeilDivide(kFewestUnits * n, cores() * kLinearTokenTile);
    return std::min(tiles * kLinearTokenTile, kBlockTokens);
  }

  // body(begin, count, spread) for each block of tokens. `spread`: too few blocks to keep the cores
  // busy, the body should spread its own work; who has no block takes part in it.
  void ForBlocks(int64_t n, absl::FunctionRef<void(int64_t, int64_t, bool)> body) {
    const int64_t tokens = BlockTokens(n), blocks = CeilDivide(n, tokens);
    const bool spread = cores() > 1 && blocks < 2 * cores();
    const auto run = [&](int64_t block) {
      const int64_t begin = block * tokens;
      body(begin, std::min(tokens, n - begin), spread);
    };
    if (spread) {
      pool_->ParallelForOfLoops(blocks, run);
    } else {
      ParallelFor(blocks, run);
    }
  }

  // The calls are independent of each other; what an adapter adds to them comes with them.
  void Apply(absl::Span<const LinearCall> calls, int64_t n, bool spread) {
    if (added_.empty()) return Multiply(calls, n, spread);
    CARREL_CHECK(static_cast<int64_t>(calls.size()) <= kCallsTogether);
    const ScratchPool::Lease lease(&low_scratch_);
    float* low = lease.data();
    absl::InlinedVector<LinearCall, kCallsTogether> down, up(calls.begin(), calls.end());
    for (LinearCall& call : up) {
      const auto found = added_.find(call.w);
      if (found == added_.end()) continue;
      call.added = found->second;
      call.low = low;
      down.push_back({call.x, &call.added->a, low, nullptr, nullptr, nullptr, true});
      low += n * call.added->a.out;
    }
    Multiply(down, n, spread);
    for (const LinearCall& call : up) {
      if (call.added == nullptr) continue;
      for (int64_t i = 0; i < n * call.added->a.out; ++i) call.low[i] *= call.added->scale;
    }
    Multiply(up, n, spread);
  }

  // An adapter's product, with the bits that few tokens have wherever quantised rows have them too.
  static void LinearAlike(const float* x, int64_t n, const WeightMatrix& w, float* y,
                          int64_t y_stride, float* scratch) {
    const int64_t step = n <= kAlikeWithAdapter ? kLinearGemmTokens - 1 : n;
    for (int64_t i = 0; i < n; i += step) {
      kernels::Linear(x + i * w.in, std::min(step, n - i), w.in, w, y + i * y_stride, y_stride,
                      scratch);
    }
  }

  // Output rows [begin, begin + rows) of what an adapter adds to a call.
  void AddLowRank(const LinearCall& call, int64_t begin, int64_t rows, int64_t n,
                  float* linear_scratch) {
    thread_local std::vector<float> delta;  // B low
    delta.resize(static_cast<size_t>(n * rows));
    const WeightMatrix part = call.added->b.Rows(begin, begin + rows);
    LinearAlike(call.low, n, part, delta.data(), rows, linear_scratch);
    for (int64_t i = 0; i < n; ++i) {
      float* const y = call.y + i * call.w->out + begin;
      for (int64_t o = 0; o < rows; ++o) y[o] += delta.data()[i * rows + o];
    }
  }

  // Of each call, its tokens as products with quantised rows need them, once for all units; null
  // where nothing is needed, and beyond the first kCallsTogether, which pack for each unit.
  void PackTokens(absl::Span<const LinearCall> calls, int64_t n, bool spread, float* room,
                  absl::Span<const float*> packed) {
    const size_t count = std::min<size_t>(calls.size(), kCallsTogether);
    for (size_t i = 0; i < count; ++i) {
      const LinearCall& call = calls[i];
      const int64_t floats =
          call.blocks == nullptr ? 0 : kernels::PackedTokensFloats(*call.blocks, n);
      if (floats == 0) continue;
      if (i > 0 && packed[i - 1] != nullptr && calls[i - 1].x == call.x &&
          calls[i - 1].blocks->type == call.blocks->type) {
        packed[i] = packed[i - 1];
        continue;
      }
      const int64_t tile = spread ? kLinearTokenTile : n;
      const auto pack = [&](int64_t unit) {
        const int64_t begin = unit * tile;
        kernels::PackTokens(call.x + begin * call.w->in, std::min(tile, n - begin), call.w->in,
                            *call.blocks, room + floats / n * begin);
      };
      if (n > tile) {
        ParallelFor(CeilDivide(n, tile), pack);
      } else {
        pack(0);
      }
      packed[i] = room;
      room += floats;
    }
  }

  // Output rows [begin, end) of a call.
  void MultiplyRows(const LinearCall& call, int64_t begin, int64_t end, int64_t n,
                    const float* packed) {
    const ScratchPool::Lease scratch(&linear_scratch_);
    if (call.blocks != nullptr) {
      kernels::QuantizedLinear(call.x, n, call.w->in, call.blocks->Rows(begin, end), call.y + begin,
                               call.w->out, scratch.data(), packed);
    } else if (call.of_adapter) {
      LinearAlike(call.x, n, call.w->Rows(begin, end), call.y + begin, call.w->out, scratch.data());
    } else {
      kernels::Linear(call.x, n, call.w->in, call.w->Rows(begin, end), call.y + begin, call.w->out,
                      scratch.data());
    }
    if (call.added != nullptr) AddLowRank(call, begin, end - begin, n, scratch.data());
  }

  // gate [n, intermediate_size] = act(x W_gate) * (x W_up): who has rows of both makes their product, too,
  // while they are in his cache.
  void Gate(const LayerWeights& w, const float* x, int64_t n, bool spread, float* gate, float* up) {
    const auto act = config_.gemma ? kernels::GeluMul : kernels::SiluMul;
    const int64_t out = w.gate.out;
    const LinearCall calls[] = {Product(x, w.gate, gate), Product(x, w.up, up)};
    const Cut cut{out, cores(), 2};
    const int64_t rows = UnitRows(calls[0], n, cut);
    const bool few_parts = rows >= kGemmUnitRows;  // which are not to be half as many
    if (few_parts || !added_.empty() || w.up.out != out || UnitRows(calls[1], n, cut) != rows) {
      Apply(calls, n, spread);
      return act(gate, up, n * out);
    }
    const ScratchPool::Lease room(&packed_scratch_);
    const float* packed[] = {nullptr, nullptr};
    PackTokens(calls, n, spread, room.data(), packed);
    const int64_t units = CeilDivide(out, rows);
    const auto run = [&](int64_t unit) {
      const int64_t begin = unit * rows, end = std::min(begin + rows, out);
      for (size_t i = 0; i < 2; ++i) MultiplyRows(calls[i], begin, end, n, packed[i]);
      for (int64_t i = begin; i < begin + n * out; i += out) act(gate + i, up + i, end - begin);
    };
    if (spread && 2 * out * w.gate.in * n > kUnitMultiplyAdds) {
      ParallelFor(units, [&](int64_t i) { run(InStretches(i, units)); });
    } else {
      for (int64_t unit = 0; unit < units; ++unit) run(unit);
    }
  }

  // Units of work are the same whether spread or not.
  void Multiply(absl::Span<const LinearCall> calls, int64_t n, bool spread) {
    const ScratchPool::Lease room(&packed_scratch_);
    absl::InlinedVector<const float*, kCallsTogether> packed(calls.size(), nullptr);
    PackTokens(calls, n, spread, room.data(), absl::MakeSpan(packed));
    Cut cut{0, cores()};
    for (const LinearCall& call : calls) cut.rows += call.w->out;
    int64_t units = 0;
    int64_t multiply_adds = 0;
    for (const LinearCall& call : calls) {
      units += CeilDivide(call.w->out, UnitRows(call, n, cut));
      multiply_adds += call.w->out * call.w->in * n;
    }
    const auto run = [&](int64_t unit) {
      for (size_t i = 0; i < calls.size(); ++i) {
        const LinearCall& call = calls[i];
        const int64_t rows = UnitRows(call, n, cut);
        const int64_t here = CeilDivide(call.w->out, rows);
        if (unit < here) {
          const int64_t begin = unit * rows;
          MultiplyRows(call, begin, std::min(begin + rows, call.w->out), n, packed[i]);
          return;
        }
        unit -= here;
      }
    };
    if (spread && multiply_adds > kUnitMultiplyAdds) {
      ParallelFor(units, [&](int64_t i) { run(InStretches(i, units)); });
    } else {
      for (int64_t unit = 0; unit < units; ++unit) run(unit);
    }
  }

  // The i-th unit to be handed out: threads that take units in turn get a stretch of rows each, so that what
  // is asked for behind a unit's end is the beginning of the next one of the same thread.
  int64_t InStretches(int64_t i, int64_t units) const {
    const int64_t stretch = i % cores();
    return stretch * (units / cores()) + std::min(stretch, units % cores()) + i / cores();
  }

  void Norm(const float* x, int64_t n, const std::vector<float>& w, float* y) const {
    const int64_t dim = static_cast<int64_t>(w.size());
    kernels::RmsNorm(x, n, dim, dim, w.data(), eps_, y, dim);
  }

  const LayerWeights& LayerOf(Layer layer) const {
    CARREL_CHECK(layer.value() >= 0 && layer.value() < config_.shape.layers);
    return weights_->layer(layer);
  }

  // hidden += the experts of each token; normed [count, hidden_size], count <= kBlockTokens.
  void AddExperts(const LayerWeights& w, const float* normed, int64_t count, bool spread,
                  float* hidden);
  void AddExpertsOfOne(const LayerWeights& w, const Choice* chosen, const float* normed,
                       float* scratch, bool spread, float* hidden);

  // k and v may be null: the query alone.
  void Project(Layer layer, const float* hidden, absl::Span<const TokenBlock> blocks, float* q,
               float* k, float* v);
  // RoPE on tokens [begin, begin + count) of those of all blocks.
  void Turn(absl::Span<const TokenBlock> blocks, int64_t begin, int64_t count, int64_t heads,
            const float* inv_freq, float* x) const;

  const ModelConfig config_;
  const std::shared_ptr<const Weights> weights_;
  const std::shared_ptr<const Adapter> adapter_;  // may be null
  const AddedByMatrix added_;
  ThreadPool* const pool_;  // may be null
  const RopeStage rope_;
  const std::vector<float> inv_freq_, sliding_inv_freq_;
  const float embedding_scale_;
  const float query_scale_;  // who attends divides scores by the root of head_dim
  const float eps_;
  ScratchPool block_scratch_;   // a block's hidden_size + twice intermediate_size columns
  ScratchPool expert_scratch_;  // ExpertFloats
  ScratchPool choice_scratch_;  // a block's choices of experts
  ScratchPool linear_scratch_;  // what one kernels::Linear needs
  ScratchPool packed_scratch_;  // tokens for products with quantised rows
  ScratchPool low_scratch_;     // a block's scale A x of calls that go together
  const int64_t tokens_alike_;
};

absl::Status CpuBackend::Embed(absl::Span<const TokenId> tokens, float* hidden) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || tokens[i] >= config_.vocab_size) {
      return absl::InvalidArgumentError(absl::StrCat("token id ", tokens[i], " at index ", i,
                                                     " is outside the vocabulary [0, ",
                                                     config_.vocab_size, ")"));
    }
  }
  const Matrix& table = weights_->embedding();
  const bool blocks = table.blocks.has_value();
  const char* rows = static_cast<const char*>(blocks ? table.blocks->data : table.data);
  const int64_t row_bytes = blocks ? kernels::GgufBytes(table.blocks->type, table.in)
                                   : table.in * DTypeBytes(table.dtype);
  ForBlocks(static_cast<int64_t>(tokens.size()), [&](int64_t begin, int64_t count, bool) {
    for (int64_t i = begin; i < begin + count; ++i) {
      const char* row = rows + tokens[i] * row_bytes;
      if (blocks) {
        kernels::Widen(table.blocks->type, row, table.in, hidden + i * table.in);
      } else {
        WidenToFloat(table.dtype, row, table.in, hidden + i * table.in);
      }
      if (embedding_scale_ == 1) continue;
      for (int64_t c = 0; c < table.in; ++c) hidden[i * table.in + c] *= embedding_scale_;
    }
  });
  return absl::OkStatus();
}

void CpuBackend::Turn(absl::Span<const TokenBlock> blocks, int64_t begin, int64_t count,
                      int64_t heads, const float* inv_freq, float* x) const {
  const int64_t width = heads * config_.shape.head_dim;
  int64_t at = 0;  // the block's first token among all
  for (const TokenBlock& block : blocks) {
    const int64_t from = std::max(begin, at), to = std::min(begin + count, at + block.n);
    if (from < to) {
      kernels::Rope(x + (from - begin) * width, to - from, heads, config_.shape.head_dim,
                    block.first_position + (from - at), inv_freq);
    }
    at += block.n;
  }
}

void CpuBackend::Project(Layer layer, const float* hidden, absl::Span<const TokenBlock> blocks,
                         float* q, float* k, float* v) {
  const LayerWeights& w = LayerOf(layer);
  const AttentionShape& shape = config_.shape;
  const int64_t width = config_.hidden_size;
  const float* const inv_freq = (config_.sliding.In(layer) ? sliding_inv_freq_ : inv_freq_).data();
  const float rope_scale = static_cast<float>(config_.rope.attention_factor);
  const auto finish = [&](float* x, int64_t begin, int64_t count, int64_t heads,
                          const std::vector<float>& head_norm, float scale) {
    if (config_.qk_norm) Norm(x, count * heads, head_norm, x);
    if (scale != 1.0f) {
      for (int64_t i = 0; i < count * heads * shape.head_dim; ++i) x[i] *= scale;
    }
    if (rope_ == RopeStage::kLeftOut) return;
    Turn(blocks, begin, count, heads, inv_freq, x);
  };
  int64_t n = 0;
  for (const TokenBlock& block : blocks) n += block.n;
  ForBlocks(n, [&](int64_t begin, int64_t count, bool spread) {
    const ScratchPool::Lease scratch(&block_scratch_);
    float* normed = scratch.data();
    Norm(hidden + begin * width, count, w.attention_norm, normed);
    float* block_q = q + begin * w.q.out;
    if (k == nullptr) {
      Apply({Product(normed, w.q, block_q)}, count, spread);
      finish(block_q, begin, count, shape.q_heads, w.q_norm, rope_scale * query_scale_);
      return;
    }
    float* block_k = k + begin * w.k.out;
    Apply({Product(normed, w.q, block_q), Product(normed, w.k, block_k),
           Product(normed, w.v, v + begin * w.v.out)},
          count, spread);
    finish(block_q, begin, count, shape.q_heads, w.q_norm, rope_scale * query_scale_);
    finish(block_k, begin, count, shape.kv_heads, w.k_norm, rope_scale);
  });
}

absl::Status CpuBackend::FinishLayer(Layer layer, const float* attended, int64_t n, float* hidden) {
  const LayerWeights& w = LayerOf(layer);
  const int64_t width = config_.hidden_size;
  ForBlocks(n, [&](int64_t begin, int64_t count, bool spread) {
    const ScratchPool::Lease scratch(&block_scratch_);
    float* column = scratch.data();  // first what is added to hidden, then its norm, then again
    float* gate = column + kBlockTokens * width;
    float* up = gate + kBlockTokens * config_.intermediate_size;
    float* block = hidden + begin * width;

    Apply({Product(attended + begin * w.o.in, w.o, column)}, count, spread);
    if (!w.attention_post_norm.empty()) Norm(column, count, w.attention_post_norm, column);
    for (int64_t i = 0; i < count * width; ++i) block[i] += column[i];
    Norm(block, count, w.mlp_norm, column);
    if (!w.experts.empty()) return AddExperts(w, column, count, spread, block);
    Gate(w, column, count, spread, gate, up);
    Apply({Product(gate, w.down, column)}, count, spread);
    if (!w.mlp_post_norm.empty()) Norm(column, count, w.mlp_post_norm, column);
    for (int64_t i = 0; i < count * width; ++i) block[i] += column[i];
  });
  return absl::OkStatus();
}

void CpuBackend::AddExperts(const LayerWeights& w, const float* normed, int64_t count, bool spread,
                            float* hidden) {
  const int64_t width = config_.hidden_size, per_token = config_.experts.per_token;
  const int64_t experts = config_.experts.count, inner = config_.experts.intermediate_size;
  static_assert(sizeof(Choice) == 2 * sizeof(float));
  const ScratchPool::Lease scratch(&expert_scratch_), choices(&choice_scratch_);
  float* const logits = scratch.data();
  float* const rows = logits + kBlockTokens * experts;  // of the tokens that one expert has
  float* const gate = rows + kBlockTokens * width;
  float* const up = gate + kBlockTokens * inner;
  float* const down = up + kBlockTokens * inner;
  auto* const chosen = reinterpret_cast<Choice*>(choices.data());

  Multiply({Product(normed, w.router, logits)}, count, spread);
  for (int64_t i = 0; i < count; ++i) {
    ChooseExperts(logits + i * experts, experts, per_token, config_.experts.normalize,
                  chosen + i * per_token);
  }
  if (count == 1) return AddExpertsOfOne(w, chosen, normed, rows, spread, hidden);
  for (int64_t e = 0; e < experts; ++e) {
    const auto for_tokens = [&](absl::FunctionRef<void(int64_t, float)> body) {
      for (int64_t i = 0; i < count * per_token; ++i) {
        if (chosen[i].expert == e) body(i / per_token, chosen[i].weight);
      }
    };
    int64_t n = 0;
    for_tokens([&](int64_t token, float) {
      std::copy_n(normed + token * width, width, rows + n++ * width);
    });
    if (n == 0) continue;
    const ExpertWeights& expert = w.experts[static_cast<size_t>(e)];
    Multiply({Product(rows, expert.gate, gate), Product(rows, expert.up, up)}, n, spread);
    kernels::SiluMul(gate, up, n * inner);
    Multiply({Product(gate, expert.down, down)}, n, spread);
    const float* from = down;
    for_tokens([&](int64_t token, float weight) {
      float* const to = hidden + token * width;
      for (int64_t c = 0; c < width; ++c) to[c] += weight * from[c];
      from += width;
    });
  }
}

// All experts of a token at once: two rounds of products instead of two for each.
void CpuBackend::AddExpertsOfOne(const LayerWeights& w, const Choice* chosen, const float* normed,
                                 float* scratch, bool spread, float* hidden) {
  const int64_t width = config_.hidden_size, inner = config_.experts.intermediate_size;
  const int64_t per_token = config_.experts.per_token;
  float* const gate = scratch;
  float* const up = gate + per_token * inner;
  float* const down = up + per_token * inner;
  absl::InlinedVector<LinearCall, 32> first, second;
  for (int64_t j = 0; j < per_token; ++j) {
    const ExpertWeights& expert = w.experts[static_cast<size_t>(chosen[j].expert)];
    first.push_back(Product(normed, expert.gate, gate + j * inner));
    first.push_back(Product(normed, expert.up, up + j * inner));
    second.push_back(Product(gate + j * inner, expert.down, down + j * width));
  }
  Multiply(first, 1, spread);
  kernels::SiluMul(gate, up, per_token * inner);
  Multiply(second, 1, spread);
  for (int64_t j = 0; j < per_token; ++j) {
    for (int64_t c = 0; c < width; ++c) hidden[c] += chosen[j].weight * down[j * width + c];
  }
}

absl::Status CpuBackend::Logits(const float* hidden, int64_t n, float* logits) {
  const int64_t width = config_.hidden_size;
  ForBlocks(n, [&](int64_t begin, int64_t count, bool spread) {
    const ScratchPool::Lease scratch(&block_scratch_);
    Norm(hidden + begin * width, count, weights_->final_norm(), scratch.data());
    Apply({Product(scratch.data(), weights_->head(), logits + begin * config_.vocab_size)}, count,
          spread);
  });
  return absl::OkStatus();
}

}  // namespace

std::unique_ptr<Backend> MakeCpuBackend(const ModelConfig& config,
                                        std::shared_ptr<const Weights> weights, ThreadPool* pool,
                                        RopeStage rope, std::shared_ptr<const Adapter> adapter) {
  CARREL_CHECK(weights != nullptr);
  return std::make_unique<CpuBackend>(config, std::move(weights), pool, rope, std::move(adapter));
}

}  // namespace carrel::model
