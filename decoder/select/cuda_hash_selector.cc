#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/bf16.h"
#include "decoder/select/cuda_candidates.h"
#include "decoder/select/cuda_methods.h"
#include "decoder/select/hash_codes.h"
#include "kernels/encode/hash_encode/hash_encode.h"
#include "kernels/encode/row_sum/row_sum.h"
#include "kernels/of_heads.h"
#include "kernels/select/code_topk/code_topk.h"
#include "kernels/select/hamming_topk/hamming_topk.h"

namespace carrel::decoder {
namespace {

constexpr int64_t kSumParts = 64;  // of the keys' mean

// The kernels' params that size their workspaces.
template <class Params>
Params SelectionOf(const CudaZoneShape& shape, int64_t bits) {
  auto params = kernels::OfHeads<Params>(shape.heads);
  params.bits = bits;
  params.rows = params.code_stride = shape.zone.rows();
  return params;
}

size_t WorkspaceBytes(const HashConfig& config, const CudaZoneShape& shape, int64_t bits) {
  return config.query == HashQuery::kSigns
             ? kernels::HammingTopKWorkspaceBytes(
                   SelectionOf<kernels::HammingTopKParams>(shape, bits))
             : kernels::CodeTopKWorkspaceBytes(SelectionOf<kernels::CodeTopKParams>(shape, bits));
}

// Words of the queries' own codes.
int64_t QueryWords(const HashConfig& config, const CudaZoneShape& shape, int64_t bits) {
  return config.query == HashQuery::kSigns ? shape.heads.q_heads * bits / 32 : 0;
}

class CudaHashSelector final : public CudaRowSelector {
 public:
  CudaHashSelector(const HashConfig& config, const CudaZoneShape& shape, HashSource source,
                   int64_t bits)
      : config_(config), shape_(shape), source_(source), bits_(bits) {}

  void LayKeys(cuda::DeviceArena& arena) {
    for (Layer layer(0); layer.value() < shape_.heads.layers; layer = layer.next()) {
      const int64_t kept = shape_.dense(layer) ? 0 : shape_.heads.kv_heads * bits_;
      LayerKeys state;
      state.codes = arena.Take<uint32_t>(kept * shape_.zone.rows() / 32);
      state.directions = arena.Take<uint16_t>(kept * shape_.heads.head_dim);
      layers_.push_back(state);
    }
  }

  absl::Status LayChoice(int64_t oversample, const CudaKeys& keys, cuda::DeviceArena& arena) {
    ASSIGN_OR_RETURN(CudaCandidates candidates,
                     CudaCandidates::Lay("hash", shape_, oversample, keys, arena));
    LayChoice(std::move(candidates), arena);
    return absl::OkStatus();
  }
  // What is written by a choice.
  void LayChoice(CudaCandidates candidates, cuda::DeviceArena& arena) {
    candidates_ = std::move(candidates);
    for (Layer layer(0); layer.value() < shape_.heads.layers; layer = layer.next()) {
      const int64_t rows = shape_.dense(layer) ? 0 : shape_.budgets[layer.value()];
      ids_.push_back(arena.Take<int32_t>(shape_.heads.kv_heads * rows));
    }
    query_codes_ = arena.Take<uint32_t>(QueryWords(config_, shape_, bits_));
    workspace_ = arena.Take<uint8_t>(static_cast<int64_t>(WorkspaceBytes(config_, shape_, bits_)));
  }

  CudaRowSelectorOr LayAnother(const std::vector<int64_t>* ahead,
                               cuda::DeviceArena& arena) const override {
    CudaZoneShape shape = shape_;
    if (ahead != nullptr) {
      shape.budgets = *ahead;
      shape.head_budgets.clear();
    }
    auto another = std::make_unique<CudaHashSelector>(config_, shape, source_, bits_);
    another->layers_ = layers_;
    if (ahead == nullptr) {
      another->LayChoice(candidates_.LayAnother(arena), arena);
    } else {  // worth no second look
      RETURN_IF_ERROR(another->LayChoice(1, {}, arena));
    }
    return another;
  }

  absl::Status Load(const CudaSelectorInput& input) override {
    RETURN_IF_ERROR(candidates_.Load());
    return source_ == HashSource::kRandom ? EncodeKeys(input.keys, *input.stream)
                                          : LoadCodes(*input.host_rows);
  }

  bool attends(Layer layer) const override { return candidates_.rescores(layer); }
  bool shares_launches() const override { return config_.query != HashQuery::kSigns; }
  void Add(const CudaChoice& choice, CudaChoices& to) const override {
    int32_t* const chosen = ids_[choice.layer.value()];
    if (shares_launches()) {
      to.by_codes.push_back(ByWeights(choice.layer, choice.q, chosen));
    } else {
      to.alone.emplace_back(this, choice);
    }
    candidates_.AddKept(choice, chosen, to);
  }
  absl::Status Enqueue(const CudaChoice& choice, const cuda::Stream& stream) const override {
    return SelectBySigns(choice.layer, choice.q, ids_[choice.layer.value()], stream);
  }

  CudaSelection selection(Layer layer) const override {
    return candidates_.selection(layer, ids_[layer.value()]);
  }

 private:
  // Shared with forks and others.
  struct LayerKeys {
    uint32_t* codes = nullptr;  // [kv_heads, rows, bits / 32]
    // [kv_heads, bits, head_dim]: what queries are multiplied with: of signs the codes' directions, of
    // weights what each bit stands for.
    uint16_t* directions = nullptr;
  };

  // Codes of all keys by random rotations, less what their mean scores.
  absl::Status EncodeKeys(const CudaKeys& keys, const cuda::Stream& stream) {
    const int64_t d = shape_.heads.head_dim, heads = shape_.heads.kv_heads;
    const std::vector<float> rotations = RandomRotations(bits_, d, config_.seed);
    std::vector<uint16_t> directions;
    for (int64_t head = 0; head < heads; ++head) {
      for (const float x : rotations) directions.push_back(FloatToBf16(x));
    }
    ASSIGN_OR_RETURN(const auto matrix, ToDevice(directions));
    ASSIGN_OR_RETURN(auto sums, cuda::DeviceBuffer<float>::Create(heads * kSumParts * d));
    ASSIGN_OR_RETURN(auto thresholds, cuda::DeviceBuffer<float>::Create(heads * bits_));
    std::vector<float> host_sums(static_cast<size_t>(sums.size()));
    for (Layer layer(0); layer.value() < shape_.heads.layers; layer = layer.next()) {
      if (shape_.dense(layer)) continue;
      const LayerKeys& state = layers_[layer.value()];
      ASSIGN_OR_RETURN(const kernels::KvView of_layer, keys.ToMakeOf(layer));
      auto sum = kernels::OfHeads<kernels::RowSumParams>(shape_.heads);
      sum.x = of_layer.k;
      sum.rows = shape_.zone.rows();
      sum.row_stride = of_layer.row_stride;
      sum.parts = kSumParts;
      sum.sums = sums.data();
      RETURN_IF_CUDA_ERROR(kernels::RowSum(sum, stream.get()));
      RETURN_IF_ERROR(stream.Synchronize());
      RETURN_IF_CUDA_ERROR(
          cudaMemcpy(host_sums.data(), sums.data(), host_sums.size() * 4, cudaMemcpyDeviceToHost));
      const std::vector<float> of_mean = ScoresOfMeans(host_sums, rotations);
      RETURN_IF_ERROR(CopyToDevice(thresholds.data(), of_mean.data(), of_mean.size() * 4));
      RETURN_IF_ERROR(LoadRotations(state, rotations, directions, of_mean, of_layer));
      auto encode = kernels::OfHeads<kernels::HashEncodeParams>(shape_.heads);
      encode.x = of_layer.k;
      encode.matrix = matrix.data();
      encode.codes = state.codes;
      encode.rows = encode.code_stride = shape_.zone.rows();
      encode.row_stride = of_layer.row_stride;
      encode.bits = bits_;
      encode.threshold = thresholds.data();
      RETURN_IF_CUDA_ERROR(kernels::HashEncode(encode, stream.get()));
      RETURN_IF_ERROR(stream.Synchronize());  // the thresholds are overwritten
    }
    return absl::OkStatus();
  }

  // Those of the context's code index.
  absl::Status LoadCodes(const HostRows& rows) {
    const int64_t words = bits_ / 32, d = shape_.heads.head_dim;
    for (Layer layer(0); layer.value() < shape_.heads.layers; layer = layer.next()) {
      if (shape_.dense(layer)) continue;
      const LayerKeys& state = layers_[layer.value()];
      for (KvHead head(0); head.value() < shape_.heads.kv_heads; head = head.next()) {
        ASSIGN_OR_RETURN(const HeadCodes codes, StoredCodesOf(rows, layer, head, d));
        if (codes.bits != bits_) {
          return absl::DataLossError(absl::StrCat("method=hash: layer ", layer.value(), " kv_head ",
                                                  head.value(), ": codes do not fit the context"));
        }
        const int64_t count = shape_.zone.rows() * words;
        RETURN_IF_ERROR(CopyToDevice(state.codes + head.value() * count,
                                     codes.words.data() + shape_.zone.begin * words,
                                     static_cast<size_t>(count) * 4));
        std::vector<uint16_t> directions;
        const bool signs = config_.query == HashQuery::kSigns;
        for (const float x : signs ? codes.directions : codes.decoder) {
          directions.push_back(FloatToBf16(x));
        }
        RETURN_IF_ERROR(CopyToDevice(state.directions + head.value() * bits_ * d, directions.data(),
                                     directions.size() * 2));
      }
    }
    return absl::OkStatus();
  }

  absl::Status SelectBySigns(Layer layer, const uint16_t* q, int32_t* chosen,
                             const cuda::Stream& stream) const {
    const LayerKeys& state = layers_[layer.value()];
    auto encode = kernels::OfHeads<kernels::HashEncodeParams>(shape_.heads);
    encode.x = q;
    encode.matrix = state.directions;
    encode.codes = query_codes_;
    encode.rows = encode.row_stride = encode.code_stride = shape_.heads.group();
    encode.bits = bits_;
    RETURN_IF_CUDA_ERROR(kernels::HashEncode(encode, stream.get()));
    auto select = SelectionOf<kernels::HammingTopKParams>(shape_, bits_);
    select.queries = query_codes_;
    select.codes = state.codes;
    select.k = candidates_.Count(layer);
    select.ids = candidates_.Ids(layer, chosen);
    select.workspace = workspace_;
    RETURN_IF_CUDA_ERROR(kernels::HammingTopK(select, stream.get()));
    return absl::OkStatus();
  }

  kernels::CodeTopKParams ByWeights(Layer layer, const uint16_t* q, int32_t* chosen) const {
    const LayerKeys& state = layers_[layer.value()];
    auto select = SelectionOf<kernels::CodeTopKParams>(shape_, bits_);
    select.q = q;
    select.decoder = state.directions;
    select.codes = state.codes;
    select.k = candidates_.Count(layer);
    select.ids = candidates_.Ids(layer, chosen);
    select.workspace = workspace_;
    return select;
  }

  // What a layer's queries are multiplied with. directions: the rotations of every KV head in bf16;
  // of_mean [kv_heads, bits]: what the keys' means score.
  absl::Status LoadRotations(const LayerKeys& state, const std::vector<float>& rotations,
                             const std::vector<uint16_t>& directions,
                             const std::vector<float>& of_mean, const kernels::KvView& keys) {
    if (config_.query == HashQuery::kSigns) {
      return CopyToDevice(state.directions, directions.data(), directions.size() * 2);
    }
    const int64_t d = shape_.heads.head_dim;
    const SpreadSample sample(shape_.zone.rows());
    std::vector<uint16_t> rows(static_cast<size_t>(sample.count * d)), decoder;
    std::vector<float> wide(rows.size());
    for (int64_t head = 0; head < shape_.heads.kv_heads; ++head) {
      const auto row_bytes = static_cast<size_t>(2 * d);
      RETURN_IF_CUDA_ERROR(cudaMemcpy2D(rows.data(), row_bytes, keys.k + head * keys.row_stride * d,
                                        row_bytes * static_cast<size_t>(sample.stride), row_bytes,
                                        static_cast<size_t>(sample.count), cudaMemcpyDefault));
      for (size_t i = 0; i < rows.size(); ++i) wide[i] = Bf16ToFloat(rows[i]);
      const std::vector<float> threshold(of_mean.begin() + head * bits_,
                                         of_mean.begin() + (head + 1) * bits_);
      for (const float x : RotationDecoder(rotations, threshold, wide, d)) {
        decoder.push_back(FloatToBf16(x));
      }
    }
    return CopyToDevice(state.directions, decoder.data(), decoder.size() * 2);
  }

  // sums [kv_heads, kSumParts, head_dim] -> [kv_heads, bits]
  std::vector<float> ScoresOfMeans(const std::vector<float>& sums,
                                   const std::vector<float>& rotations) const {
    const auto d = static_cast<size_t>(shape_.heads.head_dim);
    const double rows = static_cast<double>(shape_.zone.rows());
    std::vector<float> scores;
    std::vector<double> mean(d);
    for (size_t head = 0; head < sums.size() / d / kSumParts; ++head) {
      std::fill(mean.begin(), mean.end(), 0.0);
      for (size_t i = 0; i < d * kSumParts; ++i) mean[i % d] += sums[head * d * kSumParts + i];
      for (size_t b = 0; b < rotations.size() / d; ++b) {
        double sum = 0;
        for (size_t c = 0; c < d; ++c) sum += mean[c] * rotations[b * d + c];
        scores.push_back(static_cast<float>(sum / rows));
      }
    }
    return scores;
  }

  const HashConfig config_;
  const CudaZoneShape shape_;
  const HashSource source_;
  const int64_t bits_;
  std::vector<LayerKeys> layers_;  // [layers]
  std::vector<int32_t*> ids_;      // [layers]: [kv_heads, budget]
  CudaCandidates candidates_;
  uint32_t* query_codes_ = nullptr;
  uint8_t* workspace_ = nullptr;
};

absl::StatusOr<int64_t> BitsOf(const HashConfig& config, const HostRows* host_rows) {
  ASSIGN_OR_RETURN(const HashSource source, SourceOfCodes(config, host_rows));
  if (source == HashSource::kRandom) return config.bits;
  ASSIGN_OR_RETURN(const HeadCodes codes, host_rows->StoredCodes(Layer(0), KvHead(0)));
  if (codes.bits == 64 || codes.bits == 128 || codes.bits == 256) return codes.bits;
  return absl::UnimplementedError(absl::StrCat("method=hash: the context's codes have ", codes.bits,
                                               " bits; a GPU takes 64, 128 or 256"));
}

}  // namespace

CudaRowSelectorOr LayCudaHash(const SelectorConfig& config, const CudaSelectorInput& input,
                              cuda::DeviceArena& arena) {
  ASSIGN_OR_RETURN(const int64_t bits, BitsOf(config.hash, input.host_rows));
  ASSIGN_OR_RETURN(const HashSource source, SourceOfCodes(config.hash, input.host_rows));
  auto selector = std::make_unique<CudaHashSelector>(config.hash, input.shape, source, bits);
  selector->LayKeys(arena);
  RETURN_IF_ERROR(selector->LayChoice(config.oversample, input.keys, arena));
  return selector;
}

}  // namespace carrel::decoder
