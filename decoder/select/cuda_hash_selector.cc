#include <algorithm>
#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/bf16.h"
#include "decoder/select/cuda_candidates.h"
#include "decoder/select/cuda_methods.h"
#include "decoder/select/hash_selector.h"
#include "decoder/select/rotations.h"
#include "kernels/encode/hash_encode/hash_encode.h"
#include "kernels/encode/row_sum/row_sum.h"
#include "kernels/select/code_topk/code_topk.h"
#include "kernels/select/hamming_topk/hamming_topk.h"

namespace carrel::decoder {
namespace {

constexpr int64_t kSumParts = 64;  // of the keys' mean

// The kernels' params that size their workspaces.
template <class Params>
Params SelectionOf(const CudaZoneShape& shape, int64_t bits) {
  Params params;
  params.kv_heads = shape.heads.kv_heads;
  params.group = shape.heads.group();
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
  CudaHashSelector(const HashConfig& config, const CudaZoneShape& shape)
      : config_(config), shape_(shape), ids_(static_cast<size_t>(shape.heads.layers)) {}

  absl::Status AllocateKeys(int64_t bits) {
    const int64_t heads = shape_.heads.kv_heads;
    auto keys = std::make_shared<std::vector<LayerKeys>>(ids_.size());
    for (Layer layer(0); layer.value() < shape_.heads.layers; layer = layer.next()) {
      if (shape_.dense(layer)) continue;
      LayerKeys& state = (*keys)[layer.value()];
      ASSIGN_OR_RETURN(state.codes, cuda::DeviceBuffer<uint32_t>::Create(
                                        heads * shape_.zone.rows() * bits / 32));
      ASSIGN_OR_RETURN(state.directions,
                       cuda::DeviceBuffer<uint16_t>::Create(heads * bits * shape_.heads.head_dim));
      key_bytes_ += state.codes.bytes() + state.directions.bytes();
    }
    layers_ = std::move(keys);
    return absl::OkStatus();
  }

  // What is written by a choice.
  absl::Status AllocateChoice(int64_t bits, int64_t oversample, const CudaKeys& keys) {
    bits_ = bits;
    ASSIGN_OR_RETURN(candidates_, CudaCandidates::Make("hash", shape_, oversample, keys));
    for (Layer layer(0); layer.value() < shape_.heads.layers; layer = layer.next()) {
      if (shape_.dense(layer)) continue;
      ASSIGN_OR_RETURN(ids_[layer.value()],
                       cuda::DeviceBuffer<int32_t>::Create(shape_.heads.kv_heads *
                                                           shape_.budgets[layer.value()]));
    }
    ASSIGN_OR_RETURN(query_codes_,
                     cuda::DeviceBuffer<uint32_t>::Create(QueryWords(config_, shape_, bits)));
    ASSIGN_OR_RETURN(workspace_, ZeroedDeviceBytes(WorkspaceBytes(config_, shape_, bits)));
    return absl::OkStatus();
  }

  CudaRowSelectorOr Fork(const std::vector<int64_t>& budgets) const override {
    CudaZoneShape shape = shape_;
    shape.budgets = budgets;
    shape.head_budgets.clear();
    auto fork = std::make_unique<CudaHashSelector>(config_, shape);
    fork->layers_ = layers_;
    // What a predicted query fetches ahead is worth no second look.
    RETURN_IF_ERROR(fork->AllocateChoice(bits_, 1, {}));
    return fork;
  }

  int64_t bytes() const override {
    int64_t bytes = key_bytes_ + query_codes_.bytes() + workspace_.bytes() + candidates_.bytes();
    for (const auto& ids : ids_) bytes += ids.bytes();
    return bytes;
  }

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
      const LayerKeys& state = (*layers_)[layer.value()];
      ASSIGN_OR_RETURN(const kernels::KvView of_layer, keys.ToMakeOf(layer));
      kernels::RowSumParams sum;
      sum.x = of_layer.k;
      sum.kv_heads = heads;
      sum.rows = shape_.zone.rows();
      sum.row_stride = of_layer.row_stride;
      sum.head_dim = d;
      sum.parts = kSumParts;
      sum.sums = sums.data();
      RETURN_IF_CUDA_ERROR(kernels::RowSum(sum, stream.get()));
      RETURN_IF_ERROR(stream.Synchronize());
      RETURN_IF_CUDA_ERROR(
          cudaMemcpy(host_sums.data(), sums.data(), host_sums.size() * 4, cudaMemcpyDeviceToHost));
      const std::vector<float> of_mean = ScoresOfMeans(host_sums, rotations);
      RETURN_IF_ERROR(CopyToDevice(thresholds.data(), of_mean.data(), of_mean.size() * 4));
      RETURN_IF_ERROR(LoadRotations(state, rotations, directions, of_mean, of_layer));
      kernels::HashEncodeParams encode;
      encode.x = of_layer.k;
      encode.matrix = matrix.data();
      encode.codes = state.codes.data();
      encode.kv_heads = heads;
      encode.rows = encode.code_stride = shape_.zone.rows();
      encode.row_stride = of_layer.row_stride;
      encode.head_dim = d;
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
      const LayerKeys& state = (*layers_)[layer.value()];
      for (KvHead head(0); head.value() < shape_.heads.kv_heads; head = head.next()) {
        ASSIGN_OR_RETURN(const HeadCodes codes, CodesOf(rows, layer, head));
        const int64_t count = shape_.zone.rows() * words;
        RETURN_IF_ERROR(CopyToDevice(state.codes.data() + head.value() * count,
                                     codes.words.data() + shape_.zone.begin * words,
                                     static_cast<size_t>(count) * 4));
        std::vector<uint16_t> directions;
        const bool signs = config_.query == HashQuery::kSigns;
        for (const float x : signs ? codes.directions : codes.decoder) {
          directions.push_back(FloatToBf16(x));
        }
        RETURN_IF_ERROR(CopyToDevice(state.directions.data() + head.value() * bits_ * d,
                                     directions.data(), directions.size() * 2));
      }
    }
    return absl::OkStatus();
  }

  absl::Status Select(Layer layer, const uint16_t* q, int64_t,
                      const cuda::Stream& stream) const override {
    return Choose(layer, q, nullptr, stream);
  }
  bool attends(Layer layer) const override { return candidates_.rescores(layer); }
  absl::Status SelectAndAttend(Layer layer, const uint16_t* q, int64_t,
                               const CudaAttendSelected& attend,
                               const cuda::Stream& stream) const override {
    return Choose(layer, q, &attend, stream);
  }

  CudaSelection selection(Layer layer) const override {
    return candidates_.selection(layer, ids_[layer.value()].data());
  }

 private:
  struct LayerKeys {
    cuda::DeviceBuffer<uint32_t> codes;  // [kv_heads, rows, bits / 32]
    // [kv_heads, bits, head_dim]: what queries are multiplied with: of signs the codes' directions, of
    // weights what each bit stands for.
    cuda::DeviceBuffer<uint16_t> directions;
  };

  absl::Status Choose(Layer layer, const uint16_t* q, const CudaAttendSelected* attend,
                      const cuda::Stream& stream) const {
    int32_t* chosen = ids_[layer.value()].data();
    RETURN_IF_ERROR(config_.query == HashQuery::kSigns ? SelectBySigns(layer, q, chosen, stream)
                                                       : SelectByWeights(layer, q, chosen, stream));
    return candidates_.Keep(layer, q, chosen, attend, stream);
  }

  absl::Status SelectBySigns(Layer layer, const uint16_t* q, int32_t* chosen,
                             const cuda::Stream& stream) const {
    const LayerKeys& state = (*layers_)[layer.value()];
    kernels::HashEncodeParams encode;
    encode.x = q;
    encode.matrix = state.directions.data();
    encode.codes = query_codes_.data();
    encode.kv_heads = shape_.heads.kv_heads;
    encode.rows = encode.row_stride = encode.code_stride = shape_.heads.group();
    encode.head_dim = shape_.heads.head_dim;
    encode.bits = bits_;
    RETURN_IF_CUDA_ERROR(kernels::HashEncode(encode, stream.get()));
    auto select = SelectionOf<kernels::HammingTopKParams>(shape_, bits_);
    select.queries = query_codes_.data();
    select.codes = state.codes.data();
    select.k = candidates_.Count(layer);
    select.ids = candidates_.Ids(layer, chosen);
    select.workspace = workspace_.data();
    RETURN_IF_CUDA_ERROR(kernels::HammingTopK(select, stream.get()));
    return absl::OkStatus();
  }

  absl::Status SelectByWeights(Layer layer, const uint16_t* q, int32_t* chosen,
                               const cuda::Stream& stream) const {
    const LayerKeys& state = (*layers_)[layer.value()];
    auto select = SelectionOf<kernels::CodeTopKParams>(shape_, bits_);
    select.q = q;
    select.decoder = state.directions.data();
    select.codes = state.codes.data();
    select.head_dim = shape_.heads.head_dim;
    select.scale = 1.0f / std::sqrt(static_cast<float>(shape_.heads.head_dim));
    select.k = candidates_.Count(layer);
    select.ids = candidates_.Ids(layer, chosen);
    select.workspace = workspace_.data();
    RETURN_IF_CUDA_ERROR(kernels::CodeTopK(select, stream.get()));
    return absl::OkStatus();
  }

  // What a layer's queries are multiplied with. directions: the rotations of every KV head in bf16;
  // of_mean [kv_heads, bits]: what the keys' means score.
  absl::Status LoadRotations(const LayerKeys& state, const std::vector<float>& rotations,
                             const std::vector<uint16_t>& directions,
                             const std::vector<float>& of_mean, const kernels::KvView& keys) {
    if (config_.query == HashQuery::kSigns) {
      return CopyToDevice(state.directions.data(), directions.data(), directions.size() * 2);
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
    return CopyToDevice(state.directions.data(), decoder.data(), decoder.size() * 2);
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

  absl::StatusOr<HeadCodes> CodesOf(const HostRows& rows, Layer layer, KvHead head) const {
    absl::StatusOr<HeadCodes> codes = rows.StoredCodes(layer, head);
    const std::string what =
        absl::StrCat("method=hash: layer ", layer.value(), " kv_head ", head.value());
    RETURN_IF_ERROR(Annotate(codes.status(), what));
    if (codes->bits != bits_ ||
        static_cast<int64_t>(codes->words.size()) != rows.tokens() * bits_ / 32 ||
        static_cast<int64_t>(codes->directions.size()) != bits_ * shape_.heads.head_dim ||
        codes->decoder.size() != codes->directions.size()) {
      return absl::DataLossError(absl::StrCat(what, ": codes do not fit the context"));
    }
    return codes;
  }

  const HashConfig config_;
  const CudaZoneShape shape_;
  int64_t bits_ = 0;
  std::shared_ptr<const std::vector<LayerKeys>> layers_;  // shared with forks
  int64_t key_bytes_ = 0;                                 // of them, if they are this one's own
  std::vector<cuda::DeviceBuffer<int32_t>> ids_;          // [layers]: [kv_heads, budget]
  CudaCandidates candidates_;
  cuda::DeviceBuffer<uint32_t> query_codes_;
  cuda::DeviceBuffer<uint8_t> workspace_;
};

absl::StatusOr<int64_t> BitsOf(const HashConfig& config, const HostRows* host_rows) {
  ASSIGN_OR_RETURN(const HashSource source, SourceOfCodes(config, host_rows));
  if (source == HashSource::kRandom) return config.bits;
  ASSIGN_OR_RETURN(const HeadCodes codes, host_rows->StoredCodes(Layer(0), KvHead(0)));
  if (codes.bits == 64 || codes.bits == 128 || codes.bits == 256) return codes.bits;
  return absl::UnimplementedError(absl::StrCat("method=hash: the context's codes have ", codes.bits,
                                               " bits; a GPU takes 64, 128 or 256"));
}

absl::StatusOr<int64_t> CudaHashForkBytes(const HashConfig& config, const CudaZoneShape& shape,
                                          const HostRows* host_rows) {
  ASSIGN_OR_RETURN(const int64_t bits, BitsOf(config, host_rows));
  int64_t bytes = 4 * QueryWords(config, shape, bits) +
                  static_cast<int64_t>(WorkspaceBytes(config, shape, bits));
  for (Layer layer(0); layer.value() < shape.heads.layers; layer = layer.next()) {
    if (!shape.dense(layer)) bytes += shape.heads.kv_heads * shape.budgets[layer.value()] * 4;
  }
  return bytes;
}

absl::StatusOr<int64_t> CudaHashBytes(const HashConfig& config, const CudaZoneShape& shape,
                                      const HostRows* host_rows) {
  ASSIGN_OR_RETURN(const int64_t bits, BitsOf(config, host_rows));
  ASSIGN_OR_RETURN(int64_t bytes, CudaHashForkBytes(config, shape, host_rows));
  bytes += CudaCandidates::Bytes(shape, config.oversample);
  for (Layer layer(0); layer.value() < shape.heads.layers; layer = layer.next()) {
    if (shape.dense(layer)) continue;
    bytes +=
        shape.heads.kv_heads * (shape.zone.rows() * bits / 8 + bits * shape.heads.head_dim * 2);
  }
  return bytes;
}

CudaRowSelectorOr MakeCudaHashSelector(const HashConfig& config, const CudaZoneShape& shape,
                                       const CudaKeys& keys, const HostRows* host_rows,
                                       const cuda::Stream& stream) {
  ASSIGN_OR_RETURN(const int64_t bits, BitsOf(config, host_rows));
  ASSIGN_OR_RETURN(const HashSource source, SourceOfCodes(config, host_rows));
  auto selector = std::make_unique<CudaHashSelector>(config, shape);
  RETURN_IF_ERROR(selector->AllocateKeys(bits));
  RETURN_IF_ERROR(selector->AllocateChoice(bits, config.oversample, keys));
  RETURN_IF_ERROR(source == HashSource::kRandom ? selector->EncodeKeys(keys, stream)
                                                : selector->LoadCodes(*host_rows));
  return selector;
}

}  // namespace

const CudaMethod& CudaHashMethod() {
  static constexpr CudaMethod method = {
      .bytes = [](const SelectorConfig& config, const CudaZoneShape& shape,
                  const HostRows* rows) { return CudaHashBytes(config.hash, shape, rows); },
      .make =
          [](const SelectorConfig& config, const CudaSelectorInput& input) {
            return MakeCudaHashSelector(config.hash, input.shape, input.keys, input.host_rows,
                                        input.stream);
          },
      .fork_bytes =
          [](const SelectorConfig& config, const CudaZoneShape& shape, const HostRows* rows) {
            return CudaHashForkBytes(config.hash, shape, rows);
          }};
  return method;
}

}  // namespace carrel::decoder
