#include "lab/methods/landmark_selector.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "common/dtype.h"
#include "common/status.h"
#include "decoder/select/key_scores.h"
#include "decoder/select/method_type.h"
#include "decoder/select/row_selector.h"
#include "lab/methods/options.h"
#include "lab/methods/zone_pieces.h"

namespace carrel::decoder {
namespace {

void Mean(const float* keys, int64_t rows, int64_t head_dim, float* mean) {
  std::vector<double> sum(static_cast<size_t>(head_dim));
  for (int64_t i = 0; i < rows * head_dim; ++i) sum[static_cast<size_t>(i % head_dim)] += keys[i];
  for (int64_t c = 0; c < head_dim; ++c) {
    mean[c] = static_cast<float>(sum[static_cast<size_t>(c)] / static_cast<double>(rows));
  }
}

double Cosine(const float* a, const float* b, int64_t n) {
  double dot = 0, aa = 0, bb = 0;
  for (int64_t i = 0; i < n; ++i) {
    dot += double{a[i]} * b[i];
    aa += double{a[i]} * a[i];
    bb += double{b[i]} * b[i];
  }
  return aa == 0 || bb == 0 ? 0 : dot / std::sqrt(aa * bb);
}

// Chunks in the order in which their landmark, a row of `landmarks`, stands for them worse.
std::vector<int64_t> Outliers(const ZonePieces& chunks, const HeadView& rows, int64_t head_dim,
                              const std::vector<uint16_t>& landmarks, int64_t wanted) {
  std::vector<std::pair<double, int64_t>> least;
  std::vector<float> key(static_cast<size_t>(head_dim)), mean(key.size());
  for (int64_t chunk = 0; chunk < chunks.count(); ++chunk) {
    WidenToFloat(DType::kBf16, &landmarks[static_cast<size_t>(chunk * head_dim)], head_dim,
                 mean.data());
    double worst = std::numeric_limits<double>::infinity();
    const RowRange range = chunks.Of(chunk);
    for (Position row = range.begin; row < range.end; ++row) {
      WidenToFloat(DType::kBf16, rows.Key(row), head_dim, key.data());
      worst = std::min(worst, Cosine(key.data(), mean.data(), head_dim));
    }
    least.emplace_back(worst, chunk);
  }
  std::sort(least.begin(), least.end());
  least.resize(std::min(least.size(), static_cast<size_t>(wanted)));
  std::vector<int64_t> outliers;
  for (const auto& [cosine, chunk] : least) outliers.push_back(chunk);
  return outliers;
}

class LandmarkSelector final : public RowSelector {
 public:
  LandmarkSelector(const AttentionShape& shape, const ZonePieces& chunks, StandIns landmarks,
                   std::vector<std::vector<int64_t>> outliers)
      : shape_(shape),
        chunks_(chunks),
        landmarks_(std::move(landmarks)),
        outliers_(std::move(outliers)) {}

  void Select(const SelectRequest& request, SelectedRows& selection) override {
    if (request.budget >= chunks_.zone.rows()) return AllRows(chunks_.zone, selection.rows);
    const size_t head =
        static_cast<size_t>(request.layer.value()) * shape_.kv_heads + request.head.value();
    SelectPieces(chunks_, request.q, request.queries, shape_.head_dim,
                 1.0f / std::sqrt(static_cast<float>(shape_.head_dim)), landmarks_[head],
                 outliers_[head], request.budget, selection);
  }

 private:
  const AttentionShape shape_;
  const ZonePieces chunks_;
  const StandIns landmarks_;
  const std::vector<std::vector<int64_t>> outliers_;  // [layers * kv_heads]
};

class LandmarksMethodType final : public MethodType {
 public:
  absl::string_view name() const override { return "landmarks"; }
  absl::Status Parse(const MethodSettings& settings, SelectorConfig& config) const override {
    LandmarkConfig landmarks;
    RETURN_IF_ERROR(
        settings.Set({{"chunk", MethodSettings::Number(landmarks.chunk, 1, 1024)},
                      {"outliers", MethodSettings::Number(landmarks.outliers, 0, 65536)},
                      {"mask", MethodSettings::Mask(config.mask)}}));
    config.options = landmarks;
    return absl::OkStatus();
  }
  std::string Describe(const SelectorConfig& config) const override {
    const auto landmarks = OptionsOf<LandmarkConfig>(config);
    return absl::StrCat(":chunk=", landmarks.chunk, ",outliers=", landmarks.outliers,
                        config.mask == SelectorMask::kQHead ? ",mask=q-head" : "");
  }
  bool reads_keys(const SelectorConfig&) const override { return false; }
  bool after_rope() const override { return true; }
  absl::StatusOr<std::unique_ptr<RowSelector>> Make(const SelectorConfig& config,
                                                    const SelectorInput& input) const override {
    const auto given = OptionsOf<LandmarkConfig>(config);
    const ZonePieces chunks{input.zone, given.chunk};
    StandIns landmarks =
        MakeStandIns(input.shape, chunks, input.shape.head_dim, input.rows, input.pool, Mean);
    std::vector<std::vector<int64_t>> outliers(landmarks.size());
    input.pool->ParallelFor(static_cast<int64_t>(outliers.size()), [&](int64_t i) {
      if (given.outliers == 0) return;
      const HeadView& head = input.rows.At(Layer(static_cast<int32_t>(i / input.shape.kv_heads)),
                                           KvHead(static_cast<int32_t>(i % input.shape.kv_heads)));
      outliers[static_cast<size_t>(i)] = Outliers(
          chunks, head, input.shape.head_dim, landmarks[static_cast<size_t>(i)], given.outliers);
    });
    return std::make_unique<LandmarkSelector>(input.shape, chunks, std::move(landmarks),
                                              std::move(outliers));
  }
};

}  // namespace

const MethodType& LandmarksMethod() {
  static const LandmarksMethodType method;
  return method;
}

}  // namespace carrel::decoder
