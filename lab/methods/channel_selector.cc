// What:   rows with the best scores over a few important channels of the keys are candidates; those
//         of them with the best exact scores are taken.
// Math:   C = the head_dim / share channels (rounded up to an even number) with the largest mean
//         |q_c| over the head's sampled queries, mean |k_c| over the zone's keys, or the product of
//         both, which is the mean of |q_c k_c| over all pairs. L = K[:, C] in 4 bits: per channel,
//         16 levels from its least to its largest value. s~[h, j] = scale * sum_c q[h, c] L[j, c];
//         the group's candidates, oversample x budget, by group score (kernels/score/group_score) of s~,
//         ties by smaller id; of them the best `budget` as hash_selector.cc says.
// Source: Double Sparsity (docs/methods.md): section 4, algorithm 1; outlier variants of its
//         table 3 (q under GQA). Differs: calibrated on the document's own queries instead of a
//         text corpus; q heads of a group are joined by group score, where the paper has one q head
//         per KV head.
// Errors: NotFound no sampled queries are stored (by = q, qk).
// Ownership: the rows outlive it.
// Cost:   head_dim / share / 2 bytes per key and token (a lookup per byte and q head); with
//         oversample > 1 the candidates' keys.
#include <array>
#include <cmath>
#include <utility>

#include "common/status.h"
#include "decoder/select/key_scores.h"
#include "decoder/select/method_type.h"
#include "decoder/select/row_selector.h"
#include "lab/methods/channel_labels.h"
#include "lab/methods/options.h"

namespace carrel::decoder {
namespace {

class ChannelSelector final : public RowSelector {
 public:
  ChannelSelector(const AttentionShape& shape, RowRange zone, int64_t oversample,
                  const HostRows& rows, std::vector<ChannelLabels> labels)
      : shape_(shape),
        zone_(zone),
        oversample_(oversample),
        rows_(rows),
        labels_(std::move(labels)) {}

  void Select(const SelectRequest& request, SelectedRows& selection) override {
    const int64_t candidates = CandidateCount(request.budget, oversample_, zone_);
    if (candidates == zone_.rows()) {
      AllRows(zone_, selection.rows);
    } else {
      ChooseCandidates(request, candidates, selection);
    }
    KeepBestByKeys(request, rows_.At(request.layer, request.head), shape_.head_dim, selection);
  }

 private:
  void ChooseCandidates(const SelectRequest& request, int64_t candidates,
                        SelectedRows& selection) const {
    thread_local std::vector<float> scores, products;
    const ChannelLabels& labels =
        labels_[static_cast<size_t>(request.layer.value()) * shape_.kv_heads +
                request.head.value()];
    const int64_t n = zone_.rows(), pairs = static_cast<int64_t>(labels.channels.size()) / 2;
    scores.resize(static_cast<size_t>(request.queries * n));
    products.resize(static_cast<size_t>(pairs * 256));
    for (int64_t h = 0; h < request.queries; ++h) {
      MakeProducts(labels, request.q + h * shape_.head_dim, products.data());
      const uint8_t* bytes = labels.bytes.data();
      float* out = &scores[static_cast<size_t>(h * n)];
      for (int64_t j = 0; j < n; ++j, bytes += pairs) {
        float sum = 0;
        for (int64_t p = 0; p < pairs; ++p)
          sum += products[static_cast<size_t>(p * 256 + bytes[p])];
        out[j] = sum;
      }
    }
    selection.visited += n;
    selection.bytes_read += n * pairs;
    SelectByGroupScore(scores, request.queries, zone_, candidates, selection.rows, selection.bound);
    selection.bound.clear();  // of labels, not of scores
  }

  // [pairs, 256]: what each byte of a label adds to the score.
  void MakeProducts(const ChannelLabels& labels, const float* q, float* products) const {
    const float scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
    for (size_t i = 0; i < labels.channels.size(); i += 2) {
      std::array<float, kChannelLevels> of[2];
      for (size_t half = 0; half < 2; ++half) {
        const float weight = scale * q[labels.channels[i + half]];
        for (int level = 0; level < kChannelLevels; ++level) {
          of[half][static_cast<size_t>(level)] =
              weight * (labels.least[i + half] + labels.step[i + half] * static_cast<float>(level));
        }
      }
      for (size_t byte = 0; byte < 256; ++byte) {
        products[i / 2 * 256 + byte] = of[0][byte % kChannelLevels] + of[1][byte / kChannelLevels];
      }
    }
  }

  const AttentionShape shape_;
  const RowRange zone_;
  const int64_t oversample_;
  const HostRows& rows_;
  const std::vector<ChannelLabels> labels_;  // [layers, kv_heads]
};

class ChannelsMethodType final : public MethodType {
 public:
  absl::string_view name() const override { return "channels"; }
  absl::Status Parse(const MethodSettings& settings, SelectorConfig& config) const override {
    ChannelConfig channels;
    RETURN_IF_ERROR(settings.Set(
        {{"by", MethodSettings::OneOf<ChannelScore>(
                    channels.by,
                    {{"q", ChannelScore::kQ}, {"k", ChannelScore::kK}, {"qk", ChannelScore::kQK}})},
         {"share", MethodSettings::Number(channels.share, 4, 16)},
         {"oversample", MethodSettings::Oversample(config.oversample)}}));
    config.options = channels;
    return absl::OkStatus();
  }
  std::string Describe(const SelectorConfig& config) const override {
    constexpr absl::string_view kScores[] = {"q", "k", "qk"};
    const auto channels = OptionsOf<ChannelConfig>(config);
    return absl::StrCat(
        ":by=", kScores[static_cast<size_t>(channels.by)], ",share=", channels.share,
        ",oversample=",
        config.oversample == kAutoOversample ? "auto" : absl::StrCat(config.oversample));
  }
  bool needs_host_rows(const SelectorConfig&) const override { return true; }
  bool reads_keys(const SelectorConfig& config) const override { return config.oversample != 1; }
  bool after_rope() const override { return true; }
  absl::Status ValidateCuda(const SelectorConfig&) const override { return absl::OkStatus(); }
  absl::StatusOr<std::unique_ptr<RowSelector>> Make(const SelectorConfig& config,
                                                    const SelectorInput& input) const override {
    ASSIGN_OR_RETURN(std::vector<ChannelLabels> labels,
                     MakeChannelLabels(OptionsOf<ChannelConfig>(config), input.shape, input.zone,
                                       input.rows, input.pool));
    return std::make_unique<ChannelSelector>(input.shape, input.zone, config.oversample, input.rows,
                                             std::move(labels));
  }
};

}  // namespace

const MethodType& ChannelsMethod() {
  static const ChannelsMethodType method;
  return method;
}

}  // namespace carrel::decoder
