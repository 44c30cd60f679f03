#include "lab/methods/page_selector.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/status.h"
#include "decoder/select/key_scores.h"
#include "decoder/select/method_type.h"
#include "decoder/select/row_selector.h"
#include "lab/methods/options.h"
#include "lab/methods/zone_pieces.h"

namespace carrel::decoder {
namespace {

// The largest values, then the least: bf16 numbers of the keys themselves, so that nothing is rounded.
void Bounds(const float* keys, int64_t rows, int64_t head_dim, float* bounds) {
  std::copy(keys, keys + head_dim, bounds);
  std::copy(keys, keys + head_dim, bounds + head_dim);
  for (int64_t i = head_dim; i < rows * head_dim; ++i) {
    float& largest = bounds[i % head_dim];
    float& least = bounds[head_dim + i % head_dim];
    largest = std::max(largest, keys[i]);
    least = std::min(least, keys[i]);
  }
}

class PageSelector final : public RowSelector {
 public:
  PageSelector(const AttentionShape& shape, const ZonePieces& pages, StandIns bounds)
      : shape_(shape), pages_(pages), bounds_(std::move(bounds)) {}

  void Select(const SelectRequest& request, SelectedRows& selection) override {
    if (request.budget >= pages_.zone.rows()) return AllRows(pages_.zone, selection.rows);
    // What is positive meets the largest values, what is negative the least.
    thread_local std::vector<float> parts;
    const int64_t d = shape_.head_dim;
    parts.resize(static_cast<size_t>(request.queries * 2 * d));
    for (int64_t h = 0; h < request.queries; ++h) {
      for (int64_t c = 0; c < d; ++c) {
        const float x = request.q[h * d + c];
        parts[static_cast<size_t>(h * 2 * d + c)] = std::max(x, 0.0f);
        parts[static_cast<size_t>((h * 2 + 1) * d + c)] = std::min(x, 0.0f);
      }
    }
    SelectPieces(pages_, parts.data(), request.queries, 2 * d,
                 1.0f / std::sqrt(static_cast<float>(d)),
                 bounds_[static_cast<size_t>(request.layer.value()) * shape_.kv_heads +
                         request.head.value()],
                 {}, request.budget, selection);
  }

 private:
  const AttentionShape shape_;
  const ZonePieces pages_;
  const StandIns bounds_;
};

class PagesMethodType final : public MethodType {
 public:
  absl::string_view name() const override { return "pages"; }
  absl::Status Parse(const MethodSettings& settings, SelectorConfig& config) const override {
    PageConfig pages;
    RETURN_IF_ERROR(settings.Set({{"rows", MethodSettings::Number(pages.rows, 1, 1024)},
                                  {"mask", MethodSettings::Mask(config.mask)}}));
    config.options = pages;
    return absl::OkStatus();
  }
  std::string Describe(const SelectorConfig& config) const override {
    return absl::StrCat(":rows=", OptionsOf<PageConfig>(config).rows,
                        config.mask == SelectorMask::kQHead ? ",mask=q-head" : "");
  }
  bool reads_keys(const SelectorConfig&) const override { return false; }
  bool after_rope() const override { return true; }
  absl::StatusOr<std::unique_ptr<RowSelector>> Make(const SelectorConfig& config,
                                                    const SelectorInput& input) const override {
    const ZonePieces pages{input.zone, OptionsOf<PageConfig>(config).rows};
    return std::make_unique<PageSelector>(
        input.shape, pages,
        MakeStandIns(input.shape, pages, 2 * input.shape.head_dim, input.rows, input.pool, Bounds));
  }
};

}  // namespace

const MethodType& PagesMethod() {
  static const PagesMethodType method;
  return method;
}

}  // namespace carrel::decoder
