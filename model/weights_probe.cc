#include "model/weights_probe.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "common/checksum.h"
#include "common/status.h"
#include "kernels/layer/dequantize/code_values.h"

namespace carrel::model {
namespace {

using kernels::GgufType;

constexpr int64_t kMatrixRuns = 8;
constexpr int64_t kExpertRuns = 2048;  // of all experts together
constexpr int64_t kSampledTokens = 512;
constexpr int64_t kLastTokens = 64;  // where added tokens stand

// The scales that a file has are rounded, and so may be what was quantised, on its way.
constexpr double kScaleRounding = 0x1p-10;
constexpr double kLeastRounding = 0x1p-21;

bool IsExpert(absl::string_view name) { return absl::StrContains(name, ".mlp.experts."); }

// A number that follows from the name and i alone.
uint64_t Draw(absl::string_view name, int64_t i) {
  const std::string digest = Sha256Hex(absl::StrCat(name, " ", i));
  uint64_t number = 0;
  std::memcpy(&number, digest.data(), sizeof(number));  // of hexadecimal digits: 32 bits of chance
  uint64_t mixed = number * 0x9e3779b97f4a7c15u;
  return mixed ^ mixed >> 29;
}

// Runs begin at multiples of their length within a row, so that a block of any type has all of one.
std::vector<int64_t> DrawRuns(absl::string_view name, absl::Span<const int64_t> shape,
                              int64_t count) {
  const int64_t width = shape.back();
  const int64_t rows = shape.size() == 1 ? 1 : shape[0];
  const int64_t per_row = std::max<int64_t>(1, width / kProbeRun);
  std::vector<int64_t> runs;
  for (int64_t i = 0; i < std::min(count, rows * per_row); ++i) {
    const auto drawn = static_cast<int64_t>(Draw(name, i) % static_cast<uint64_t>(rows * per_row));
    runs.push_back(drawn / per_row * width + drawn % per_row * kProbeRun);
  }
  std::sort(runs.begin(), runs.end());
  runs.erase(std::unique(runs.begin(), runs.end()), runs.end());
  return runs;
}

// Elements of a run: fewer at the end of a row.
int64_t RunLength(absl::Span<const int64_t> shape, int64_t first) {
  return std::min(kProbeRun, shape.back() - first % shape.back());
}

// "model.layers.3.mlp.experts.5.up_proj.weight": layer 3, of the kind mlp.experts.up_proj.weight.
struct Place {
  std::string layer, kind;
};
Place PlaceOf(absl::string_view name) {
  constexpr absl::string_view kLayers = "model.layers.", kExperts = "mlp.experts.";
  if (!absl::StartsWith(name, kLayers)) return {"", std::string(name)};
  const size_t dot = name.find('.', kLayers.size());
  if (dot == absl::string_view::npos) return {"", std::string(name)};
  Place place{absl::StrCat("layer ", name.substr(kLayers.size(), dot - kLayers.size())),
              std::string(name.substr(dot + 1))};
  if (absl::StartsWith(place.kind, kExperts)) {
    place.kind =
        absl::StrCat(kExperts, place.kind.substr(place.kind.find('.', kExperts.size()) + 1));
  }
  return place;
}

// What quantisers leave beyond: with scales that were fitted after the numbers had been rounded, as
// an importance matrix has it done for the four oldest types, up to 0.7% were seen; else none.
double BeyondOf(GgufType type) {
  const bool oldest = type == GgufType::kQ4_0 || type == GgufType::kQ4_1 ||
                      type == GgufType::kQ5_0 || type == GgufType::kQ5_1;
  return oldest ? 0.008 : 0.0002;
}

// What was counted over some of the values in blocks.
struct Count {
  int64_t values = 0;
  int64_t beyond = 0;
  double expected = 0;  // of beyond, at most
  int64_t inside = 0;   // values between the least and the largest of their grid
  double square = 0;    // of their v - w, in steps
  double other_square = 0;

  void Add(const Count& other) {
    values += other.values;
    beyond += other.beyond;
    expected += other.expected;
    inside += other.inside;
    square += other.square;
    other_square += other.other_square;
  }
  // Values of a block go together, so the spread is wider than that of chance alone.
  double allowed() const { return expected + 6 * std::sqrt(expected) + 3; }
  double spread() const { return other_square > 0 ? square / other_square : 0; }
  // Quantisers leave 0.75 or more.
  double least_spread() const { return 0.6 - 4 / std::sqrt(static_cast<double>(inside)); }
};

// One block's values, element by element.
class Grid {
 public:
  Grid(GgufType type, const void* block) : levels_(kernels::CodeLevels(type)) {
    const int64_t elements = kernels::TraitsOf(type).block_elements;
    stored_.resize(static_cast<size_t>(elements));
    kernels::Dequantize(type, block, elements, stored_.data());
    values_.resize(static_cast<size_t>(elements * levels_));
    std::vector<float> level(static_cast<size_t>(elements));
    for (int c = 0; c < levels_; ++c) {
      kernels::CodeValues(type, block, c, level.data());
      for (int64_t i = 0; i < elements; ++i) values_[i * levels_ + c] = level[i];
    }
    for (int64_t i = 0; i < elements; ++i) {
      std::sort(values_.begin() + i * levels_, values_.begin() + (i + 1) * levels_);
    }
  }

  float stored(int64_t i) const { return stored_[i]; }
  float least(int64_t i) const { return values_[i * levels_]; }
  float largest(int64_t i) const { return values_[(i + 1) * levels_ - 1]; }
  double step(int64_t i) const {
    return (double{largest(i)} - double{least(i)}) / static_cast<double>(levels_ - 1);
  }
  // From w to the nearest value.
  double Distance(int64_t i, double w) const {
    const auto begin = values_.begin() + i * levels_, end = begin + levels_;
    const auto above = std::lower_bound(begin, end, w);
    double distance = std::numeric_limits<double>::infinity();
    if (above != end) distance = *above - w;
    if (above != begin) distance = std::min(distance, w - *(above - 1));
    return distance;
  }

 private:
  const int levels_;
  std::vector<float> stored_, values_;  // values [elements, levels], ascending
};

class Checker {
 public:
  Checker(const WeightsProbe& probe, const Weights& weights) : probe_(probe), weights_(weights) {}

  absl::StatusOr<Derivation> Run() {
    if (probe_.tensors.empty()) {
      return absl::FailedPreconditionError(
          "weights=derived: the context holds no sampled weights: it was computed with quantised "
          "ones, or by a program that kept none");
    }
    for (const WeightsProbe::Tensor& tensor : probe_.tensors) RETURN_IF_ERROR(CheckTensor(tensor));
    Count all;
    std::map<std::string, Count> groups;
    for (const auto& [name, count] : matrices_) {
      const Place place = PlaceOf(name);
      all.Add(count);
      groups[place.kind].Add(count);
      if (!place.layer.empty()) groups[place.layer].Add(count);
    }
    RETURN_IF_ERROR(Judge("all matrices", all));
    for (const auto& [name, count] : groups) RETURN_IF_ERROR(Judge(name, count));
    for (const auto& [name, count] : matrices_) RETURN_IF_ERROR(Judge(name, count));
    seen_.quantised = all.values;
    seen_.spread = all.spread();
    if (all.values > 0) {
      seen_.beyond = static_cast<double>(all.beyond) / static_cast<double>(all.values);
      seen_.beyond_allowed = all.allowed() / static_cast<double>(all.values);
    }
    return seen_;
  }

 private:
  static absl::Status Other(absl::string_view what) {
    return absl::FailedPreconditionError(absl::StrCat(
        "weights=derived: these weights were not made from those of the context: ", what));
  }

  absl::Status CheckTensor(const WeightsProbe::Tensor& tensor) {
    RETURN_IF_ERROR(CheckShape(tensor));
    std::vector<float> values(tensor.values.size() / static_cast<size_t>(DTypeBytes(tensor.dtype)));
    WidenToFloat(tensor.dtype, tensor.values.data(), static_cast<int64_t>(values.size()),
                 values.data());
    const auto blocks = weights_.blocks().find(tensor.name);
    if (blocks != weights_.blocks().end()) {
      if (tensor.shape != std::vector<int64_t>{blocks->second.out, blocks->second.in}) {
        return Other(absl::StrCat(tensor.name, " has another shape"));
      }
      CountBlocks(tensor, values, blocks->second);
    } else {
      RETURN_IF_ERROR(ComparePlain(tensor, values));
    }
    seen_.matrices += tensor.shape.size() == 2;
    seen_.values += static_cast<int64_t>(values.size());
    return absl::OkStatus();
  }

  // The probe comes from a store: nothing in it is believed.
  static absl::Status CheckShape(const WeightsProbe::Tensor& tensor) {
    const auto bad = [&](absl::string_view what) {
      return absl::DataLossError(
          absl::StrCat("the context's sampled weights: tensor \"", tensor.name, "\" ", what));
    };
    constexpr int64_t kMaxDim = int64_t{1} << 30;
    if (tensor.shape.empty() || tensor.shape.size() > 2) return bad("is no vector and no matrix");
    int64_t elements = 1;
    for (const int64_t dim : tensor.shape) {
      if (dim < 1 || dim > kMaxDim) return bad(absl::StrCat("has a dimension of ", dim));
      elements *= dim;
    }
    if (DTypeBytes(tensor.dtype) > 4) return bad("has no floating type");
    int64_t sampled = 0;
    for (const int64_t run : tensor.runs) {
      if (run < 0 || run >= elements || run % tensor.shape.back() % kProbeRun != 0) {
        return bad(absl::StrCat("has a run at element ", run, " of ", elements));
      }
      sampled += RunLength(tensor.shape, run);
    }
    const auto bytes = static_cast<int64_t>(tensor.values.size());
    if (bytes != sampled * DTypeBytes(tensor.dtype)) {
      return bad(absl::StrCat("has ", bytes, " bytes for ", sampled, " values"));
    }
    return absl::OkStatus();
  }

  absl::Status ComparePlain(const WeightsProbe::Tensor& tensor, absl::Span<const float> values) {
    const absl::StatusOr<TensorView> view = weights_.checkpoint().Get(tensor.name);
    if (!view.ok()) return Other(absl::StrCat("there is no ", tensor.name));
    if (view->shape != tensor.shape) return Other(absl::StrCat(tensor.name, " has another shape"));
    std::array<float, kProbeRun> here{};
    size_t at = 0;
    for (const int64_t run : tensor.runs) {
      const int64_t length = RunLength(tensor.shape, run);
      WidenToFloat(view->dtype, view->bytes.data() + run * DTypeBytes(view->dtype), length,
                   here.data());
      for (int64_t i = 0; i < length; ++i, ++at) {
        const double w = values[at], off = std::abs(double{here[i]} - w);
        if (off <= Rounding(view->dtype, w)) continue;
        return Other(absl::StrFormat("%s[%d] is %g there and %g (%s) here", tensor.name, run + i, w,
                                     here[i], DTypeName(view->dtype)));
      }
    }
    return absl::OkStatus();
  }

  // Half a unit of the type's last place.
  static double Rounding(DType dtype, double w) {
    if (dtype == DType::kF16) return std::abs(w) * 0x1p-11 + 0x1p-25;
    return dtype == DType::kBf16 ? std::abs(w) * 0x1p-8 : 0;
  }

  void CountBlocks(const WeightsProbe::Tensor& tensor, absl::Span<const float> values,
                   const kernels::QuantizedMatrix& matrix) {
    const int64_t block_elements = kernels::TraitsOf(matrix.type).block_elements;
    Count count;
    bool same = true;  // all of them, but for a rounding: w was dequantised from this file
    size_t at = 0;
    for (const int64_t run : tensor.runs) {
      const int64_t in_block = run % block_elements;
      const Grid grid(matrix.type, static_cast<const char*>(matrix.data) +
                                       kernels::GgufBytes(matrix.type, run - in_block));
      const int64_t length = RunLength(tensor.shape, run);
      const bool dequantised = ManyTwice(values.subspan(at, static_cast<size_t>(length)));
      for (int64_t i = 0; i < length; ++i) {
        const double w = values[at++];
        const double off = std::abs(double{grid.stored(in_block + i)} - w);
        same = same && off <= std::abs(w) * 0x1p-8 + kLeastRounding;
        CountValue(grid, in_block + i, w, off, !dequantised, count);
      }
    }
    count.expected = BeyondOf(matrix.type) * static_cast<double>(count.values);
    if (same) count.inside = 0, count.square = count.other_square = 0;
    matrices_[tensor.name] = count;
  }

  // Values that were dequantised once, and are nothing else: few of 32 differ. A quantiser finds such
  // a grid again, or one like it, and how near w lies to it tells nothing.
  static bool ManyTwice(absl::Span<const float> run) {
    constexpr size_t kRepeats = 6;  // 16 bits of float alone leave one or two
    const std::set<float> distinct(run.begin(), run.end());
    return distinct.size() + kRepeats <= run.size();
  }

  static void CountValue(const Grid& grid, int64_t i, double w, double off, bool spreads,
                         Count& count) {
    // Grids that know nothing of w: the same one, for w made smaller, but not so that it leaves it.
    constexpr double kOthers[] = {0.9, 0.8, 0.7};
    ++count.values;
    const double step = grid.step(i);
    if (step <= 0) return;  // all codes mean the same: nothing was chosen
    const double least = grid.least(i), largest = grid.largest(i);
    const double rounding =
        kScaleRounding * std::max({std::abs(w), std::abs(least), std::abs(largest)}) +
        kLeastRounding;
    count.beyond += off - grid.Distance(i, w) > 2 * rounding;
    if (!spreads || w <= least || w >= largest) return;
    ++count.inside;
    count.square += off * off / (step * step);
    const double anchor = std::clamp(0.0, least, largest);
    for (const double other : kOthers) {
      const double distance = grid.Distance(i, anchor + other * (w - anchor)) / step;
      count.other_square += distance * distance / std::size(kOthers);
    }
  }

  static absl::Status Judge(absl::string_view what, const Count& count) {
    if (static_cast<double>(count.beyond) > count.allowed()) {
      return Other(absl::StrFormat(
          "%s: of %d sampled values %d are not the nearest that their type has, at most %d may be",
          what, count.values, count.beyond, static_cast<int64_t>(count.allowed())));
    }
    if (count.inside > 0 && count.spread() < count.least_spread()) {
      return Other(absl::StrFormat(
          "%s: the context's lie nearer to them than rounding leaves any (%.2f of the mean square "
          "distance, at least %.2f), and are not the same: something was added to dequantised "
          "weights",
          what, count.spread(), count.least_spread()));
    }
    return absl::OkStatus();
  }

  const WeightsProbe& probe_;
  const Weights& weights_;
  std::map<std::string, Count> matrices_;  // those in blocks
  Derivation seen_;
};

// Rotary tables of older checkpoints, and a second copy of a tied matrix.
bool IsNoWeight(absl::string_view name, const Weights& weights) {
  if (absl::EndsWith(name, ".rotary_emb.inv_freq")) return true;
  return name == "lm_head.weight" && weights.head().data == weights.embedding().data;
}

}  // namespace

WeightsProbe TakeWeightsProbe(const Weights& weights, const Tokenizer* tokenizer) {
  WeightsProbe probe;
  if (!weights.blocks().empty()) return probe;
  const auto& tensors = weights.checkpoint().tensors();
  const int64_t experts = std::count_if(tensors.begin(), tensors.end(),
                                        [](const auto& entry) { return IsExpert(entry.first); });
  const int64_t stride = std::max<int64_t>(1, experts / kExpertRuns);
  int64_t expert = 0;
  for (const auto& [name, view] : tensors) {
    if (IsNoWeight(name, weights) || view.shape.empty()) continue;
    int64_t runs = view.shape.size() == 1 ? 1 : kMatrixRuns;
    if (IsExpert(name)) {
      if (expert++ % stride != 0) continue;
      runs = std::clamp<int64_t>(kExpertRuns / experts, 1, kMatrixRuns);
    }
    WeightsProbe::Tensor tensor{name, view.dtype, view.shape, DrawRuns(name, view.shape, runs), ""};
    const int64_t bytes = DTypeBytes(view.dtype);
    for (const int64_t run : tensor.runs) {
      absl::StrAppend(&tensor.values,
                      view.bytes.substr(static_cast<size_t>(run * bytes),
                                        static_cast<size_t>(RunLength(view.shape, run) * bytes)));
    }
    probe.tensors.push_back(std::move(tensor));
  }
  if (tokenizer == nullptr) return probe;
  const int64_t ids = tokenizer->vocab_size();
  const int64_t token_stride = std::max<int64_t>(1, ids / kSampledTokens);
  for (int64_t id = 0; id < ids; ++id) {
    if (id % token_stride != 0 && id < ids - kLastTokens) continue;
    // Where a text goes on: SentencePiece drops the space before its first token.
    Tokenizer::DecodeState state{.at_start = false};
    WeightsProbe::Token token{static_cast<TokenId>(id), ""};
    if (!tokenizer->DecodeNext(token.id, false, &state, &token.text).ok()) continue;
    probe.tokens.push_back(std::move(token));
  }
  return probe;
}

absl::StatusOr<Derivation> CheckDerivedWeights(const WeightsProbe& probe, const Weights& weights) {
  return Checker(probe, weights).Run();
}

absl::Status CheckSameTokens(const WeightsProbe& probe, const Tokenizer& tokenizer) {
  for (const WeightsProbe::Token& token : probe.tokens) {
    Tokenizer::DecodeState state{.at_start = false};
    std::string text;
    if (!tokenizer.DecodeNext(token.id, false, &state, &text).ok()) continue;  // an unused id
    if (text == token.text) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("weights=derived: token ", token.id, " is ", token.text.size(),
                     " other bytes in the context's tokenizer than in this model's"));
  }
  return absl::OkStatus();
}

}  // namespace carrel::model
