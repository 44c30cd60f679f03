#include "model/gguf_weights.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"
#include "common/shown.h"
#include "common/status.h"
#include "model/gguf_config.h"
#include "model/weights.h"

namespace carrel::model {
namespace {

using kernels::GgufType;

struct NamePair {
  const char* gguf;
  const char* hugging_face;
};
constexpr NamePair kModelNames[] = {
    {"token_embd", "model.embed_tokens"}, {"output_norm", "model.norm"}, {"output", "lm_head"}};
constexpr NamePair kLayerNames[] = {
    {"attn_norm", "input_layernorm"},    {"ffn_norm", "post_attention_layernorm"},
    {"attn_q", "self_attn.q_proj"},      {"attn_k", "self_attn.k_proj"},
    {"attn_v", "self_attn.v_proj"},      {"attn_output", "self_attn.o_proj"},
    {"attn_q_norm", "self_attn.q_norm"}, {"attn_k_norm", "self_attn.k_norm"},
    {"ffn_gate", "mlp.gate_proj"},       {"ffn_up", "mlp.up_proj"},
    {"ffn_down", "mlp.down_proj"},       {"ffn_gate_inp", "mlp.gate"},
};
// Of Gemma, which normalises what attention and MLP add; they come before the others.
constexpr NamePair kGemmaLayerNames[] = {{"post_attention_norm", "post_attention_layernorm"},
                                         {"ffn_norm", "pre_feedforward_layernorm"},
                                         {"post_ffw_norm", "post_feedforward_layernorm"}};
// Of all experts of a layer: one tensor [experts, out, in] in the file, a matrix each elsewhere.
constexpr NamePair kExpertNames[] = {
    {"ffn_gate_exps", "gate_proj"}, {"ffn_up_exps", "up_proj"}, {"ffn_down_exps", "down_proj"}};
constexpr char kExperts[] = ".mlp.experts.";
constexpr char kGgufLayer[] = "blk.";
constexpr char kHuggingFaceLayer[] = "model.layers.";

// "blk.3.attn_q.weight" and "model.layers.3.self_attn.q_proj.weight": the same tensor. Either is
// translated into the other; nothing for other names.
std::optional<std::string> Translate(absl::string_view name, bool gemma,
                                     const char* NamePair::*from, const char* NamePair::*to,
                                     absl::string_view from_layer, absl::string_view to_layer) {
  const size_t dot = name.rfind('.');
  if (dot == absl::string_view::npos) return std::nullopt;
  const absl::string_view suffix = name.substr(dot);  // ".weight", ".bias"
  absl::string_view stem = name.substr(0, dot);
  const auto find = [&](absl::Span<const NamePair> pairs,
                        absl::string_view prefix) -> std::optional<std::string> {
    for (const NamePair& pair : pairs) {
      if (stem == pair.*from) return absl::StrCat(prefix, pair.*to, suffix);
    }
    return std::nullopt;
  };
  if (!absl::ConsumePrefix(&stem, from_layer)) return find(kModelNames, "");
  const size_t end = stem.find('.');
  int32_t layer = 0;
  if (end == absl::string_view::npos || !absl::SimpleAtoi(stem.substr(0, end), &layer) ||
      absl::StrCat(layer) != stem.substr(0, end)) {
    return std::nullopt;
  }
  stem.remove_prefix(end + 1);
  const std::string prefix = absl::StrCat(to_layer, layer, ".");
  if (gemma) {
    if (auto found = find(kGemmaLayerNames, prefix)) return found;
  }
  return find(kLayerNames, prefix);
}

std::optional<std::string> HuggingFaceName(absl::string_view name, bool gemma) {
  return Translate(name, gemma, &NamePair::gguf, &NamePair::hugging_face, kGgufLayer,
                   kHuggingFaceLayer);
}

// "blk.3.ffn_up_exps.weight": "model.layers.3.mlp.experts.", and "up_proj.weight" in *matrix.
std::optional<std::string> ExpertsPrefix(absl::string_view name, std::string* matrix) {
  for (const NamePair& pair : kExpertNames) {
    const std::string suffix = absl::StrCat(".", pair.gguf, ".weight");
    absl::string_view layer = name;
    int32_t number = 0;
    if (!absl::ConsumeSuffix(&layer, suffix) || !absl::ConsumePrefix(&layer, kGgufLayer) ||
        !absl::SimpleAtoi(layer, &number) || absl::StrCat(number) != layer) {
      continue;
    }
    *matrix = absl::StrCat(pair.hugging_face, ".weight");
    return absl::StrCat(kHuggingFaceLayer, number, kExperts);
  }
  return std::nullopt;
}

// The stacked tensor that has an expert's matrix.
std::optional<std::string> StackedName(absl::string_view name) {
  const size_t at = name.find(kExperts);
  if (at == absl::string_view::npos || !absl::ConsumeSuffix(&name, ".weight")) return std::nullopt;
  absl::string_view layer = name.substr(0, at);
  if (!absl::ConsumePrefix(&layer, kHuggingFaceLayer)) return std::nullopt;
  for (const NamePair& pair : kExpertNames) {
    if (absl::EndsWith(name, absl::StrCat(".", pair.hugging_face))) {
      return absl::StrCat(kGgufLayer, layer, ".", pair.gguf, ".weight");
    }
  }
  return std::nullopt;
}

std::string GgufName(absl::string_view name, bool gemma) {
  if (const std::optional<std::string> stacked = StackedName(name)) return *stacked;
  return Translate(name, gemma, &NamePair::hugging_face, &NamePair::gguf, kHuggingFaceLayer,
                   kGgufLayer)
      .value_or(std::string(name));
}

struct Free {
  void operator()(char* memory) const { std::free(memory); }
};

// Memory that is not touched, in large pages if it is large: the pool's threads fault it in.
std::unique_ptr<char, Free> Allocate(size_t bytes) {
  constexpr size_t kLargePage = size_t{2} << 20;
  if (bytes < kLargePage)
    return std::unique_ptr<char, Free>(static_cast<char*>(std::malloc(bytes)));
  const size_t rounded = (bytes + kLargePage - 1) / kLargePage * kLargePage;
  char* const memory = static_cast<char*>(std::aligned_alloc(kLargePage, rounded));
  if (memory != nullptr) (void)madvise(memory, rounded, MADV_HUGEPAGE);  // speed alone
  return std::unique_ptr<char, Free>(memory);
}

// The file, and what was made of its tensors.
struct Storage {
  std::shared_ptr<const Gguf> gguf;
  std::vector<std::unique_ptr<char, Free>> memory;
  std::deque<GgufTensor> experts;  // parts of stacked tensors
};

DType PlainType(GgufType type) {
  if (type == GgufType::kF32) return DType::kF32;
  return type == GgufType::kF16 ? DType::kF16 : DType::kBf16;
}

// One tensor on its way.
struct Plan {
  std::string name;  // Hugging Face's
  const GgufTensor* tensor = nullptr;
  bool blocks = false;        // it stays as it is, a quantised matrix
  DType dtype = DType::kF32;  // else what it becomes
  int64_t heads = 0;          // whose rows alternate; 0: none do
  bool has_one = false;       // 1 was added, as converters do to norms of Gemma
  char* to = nullptr;         // null: it stays mapped

  // Its bytes are those of the file, but for the order of rows.
  bool as_it_is() const {
    return blocks || (!has_one && !kernels::TraitsOf(tensor->type).quantized &&
                      PlainType(tensor->type) == dtype);
  }
  int64_t row_elements() const { return tensor->shape.back(); }
  int64_t rows() const { return tensor->elements() / row_elements(); }
};

// The row of the file that row `row` of the checkpoint is.
int64_t RowInFile(int64_t row, int64_t head_dim) {
  const int64_t in_head = row % head_dim, half = head_dim / 2;
  return row - in_head + in_head % half * 2 + in_head / half;
}

class Loader {
 public:
  Loader(std::shared_ptr<const Gguf> gguf, const ModelConfig& config, GgufBlocks blocks,
         ThreadPool* pool)
      : config_(config), blocks_(blocks), pool_(pool) {
    storage_->gguf = std::move(gguf);
  }

  absl::StatusOr<std::shared_ptr<const Weights>> Run() {
    RETURN_IF_ERROR(PlanAll());
    MatchBiases();
    TensorSource source;
    std::map<std::string, TensorView, std::less<>> views;
    for (Plan& plan : plans_) {
      ASSIGN_OR_RETURN(TensorView view, Place(plan));
      if (plan.blocks) {
        source.blocks[plan.name] = {view.bytes.data(), plan.tensor->type, view.shape[0],
                                    view.shape[1]};
      } else {
        views.emplace(plan.name, std::move(view));
      }
    }
    Fill();
    source.where = gguf().path();
    source.tensors = Safetensors::Of(std::move(views));
    source.name_in_file = [gemma = config_.gemma](absl::string_view name) {
      return GgufName(name, gemma);
    };
    source.files = gguf().files();
    for (const auto& [name, tensor] : gguf().tensors()) {
      source.stored.push_back(
          {name, std::string(kernels::TraitsOf(tensor.type).name), tensor.shape, tensor.bytes});
    }
    source.owner = storage_;
    source.widened = [gguf = storage_->gguf, config = config_](ThreadPool* pool) {
      return LoadGgufWeights(gguf, config, pool, GgufBlocks::kWiden);
    };
    return Weights::Build(std::move(source), config_);
  }

 private:
  const Gguf& gguf() const { return *storage_->gguf; }

  absl::Status Bad(absl::string_view name, absl::string_view what) const {
    return absl::InvalidArgumentError(
        absl::StrCat(gguf().path(), ": tensor \"", Shown(name, 200), "\" ", what));
  }

  absl::Status PlanAll() {
    for (const auto& [name, tensor] : gguf().tensors()) {
      if (name == kGgufRopeFactors) continue;  // the config has them
      std::string matrix;
      if (const std::optional<std::string> prefix = ExpertsPrefix(name, &matrix)) {
        RETURN_IF_ERROR(PlanExperts(name, tensor, *prefix, matrix));
        continue;
      }
      const std::optional<std::string> translated = HuggingFaceName(name, config_.gemma);
      if (!translated) return Bad(name, "is not part of a model that is run");
      Plan plan;
      plan.name = *translated;
      plan.tensor = &tensor;
      plan.dtype = PlainType(tensor.type);
      if (tensor.shape.size() == 1 && kernels::TraitsOf(tensor.type).quantized) {
        return Bad(name, absl::StrCat("is a vector of ", kernels::TraitsOf(tensor.type).name,
                                      ", expected F32, F16 or BF16"));
      }
      plan.blocks = blocks_ == GgufBlocks::kKeep && tensor.shape.size() == 2 &&
                    kernels::TraitsOf(tensor.type).quantized;
      if (config_.gemma && absl::EndsWith(plan.name, "norm.weight")) {
        plan.has_one = true;
        plan.dtype = DType::kF32;
      }
      RETURN_IF_ERROR(SetHeads(name, plan));
      plans_.push_back(std::move(plan));
    }
    std::sort(plans_.begin(), plans_.end(),
              [](const Plan& a, const Plan& b) { return a.name < b.name; });
    return absl::OkStatus();
  }

  // A stacked tensor [experts, out, in] as one matrix of each expert.
  absl::Status PlanExperts(absl::string_view name, const GgufTensor& stacked,
                           const std::string& prefix, const std::string& matrix) {
    const int64_t experts = config_.experts.count;
    if (stacked.shape.size() != 3 || stacked.shape[0] != experts || experts == 0) {
      return Bad(name, absl::StrCat("is not a stack of ", experts, " matrices"));
    }
    const size_t bytes = stacked.bytes.size() / static_cast<size_t>(experts);
    for (int64_t e = 0; e < experts; ++e) {
      GgufTensor& one = storage_->experts.emplace_back(stacked);
      one.shape = {stacked.shape[1], stacked.shape[2]};
      one.bytes = stacked.bytes.substr(static_cast<size_t>(e) * bytes, bytes);
      Plan plan;
      plan.name = absl::StrCat(prefix, e, ".", matrix);
      plan.tensor = &one;
      plan.dtype = PlainType(one.type);
      plan.blocks = blocks_ == GgufBlocks::kKeep && kernels::TraitsOf(one.type).quantized;
      plans_.push_back(std::move(plan));
    }
    return absl::OkStatus();
  }

  absl::Status SetHeads(absl::string_view name, Plan& plan) const {
    if (!GgufHasAlternatingHalves(config_)) return absl::OkStatus();
    const bool q = absl::StrContains(plan.name, ".q_proj.");
    if (!q && !absl::StrContains(plan.name, ".k_proj.")) return absl::OkStatus();
    plan.heads = q ? config_.shape.q_heads : config_.shape.kv_heads;
    // Of a bias, an element is a row.
    const int64_t rows = plan.tensor->shape[0];
    if (rows != plan.heads * config_.shape.head_dim) {
      return Bad(name, absl::StrCat("has ", rows, " rows, not ", plan.heads, " heads of ",
                                    config_.shape.head_dim));
    }
    return absl::OkStatus();
  }

  Plan* Find(absl::string_view name) {
    const auto it = std::lower_bound(plans_.begin(), plans_.end(), name,
                                     [](const Plan& p, absl::string_view n) { return p.name < n; });
    return it != plans_.end() && it->name == name ? &*it : nullptr;
  }

  // A product reads its bias in the matrix's type, beside blocks in f32.
  void MatchBiases() {
    for (Plan& bias : plans_) {
      absl::string_view stem = bias.name;
      if (!absl::ConsumeSuffix(&stem, ".bias")) continue;
      Plan* matrix = Find(absl::StrCat(stem, ".weight"));
      if (matrix == nullptr) continue;
      if (matrix->blocks) {
        bias.dtype = DType::kF32;
        continue;
      }
      if (matrix->dtype == bias.dtype) continue;
      const bool exact = matrix->dtype == DType::kBf16 && IsExactInBf16(*bias.tensor);
      if (!exact) matrix->dtype = DType::kF32;
      bias.dtype = matrix->dtype;
    }
  }

  static bool IsExactInBf16(const GgufTensor& tensor) {
    const size_t elements = static_cast<size_t>(tensor.elements());
    std::vector<float> wide(elements), back(elements);
    std::vector<uint16_t> narrow(elements);
    kernels::Dequantize(tensor.type, tensor.bytes.data(), tensor.elements(), wide.data());
    FloatToBf16(wide, narrow.data());
    Bf16ToFloat(narrow, back.data());
    return std::memcmp(wide.data(), back.data(), elements * sizeof(float)) == 0;
  }

  absl::StatusOr<TensorView> Place(Plan& plan) {
    TensorView view;
    view.dtype = plan.dtype;
    view.shape = plan.tensor->shape;
    if (plan.as_it_is() && plan.heads == 0) {
      view.bytes = plan.tensor->bytes;
      return view;
    }
    const size_t bytes =
        plan.as_it_is() ? plan.tensor->bytes.size()
                        : static_cast<size_t>(plan.tensor->elements() * DTypeBytes(plan.dtype));
    storage_->memory.push_back(Allocate(bytes));
    plan.to = storage_->memory.back().get();
    if (plan.to == nullptr) {
      return absl::ResourceExhaustedError(absl::StrCat(gguf().path(), ": no memory for the ", bytes,
                                                       " bytes of ",
                                                       GgufName(plan.name, config_.gemma)));
    }
    view.bytes = absl::string_view(plan.to, bytes);
    return view;
  }

  // Rows of every tensor that does not stay mapped, in units.
  void Fill() {
    struct Unit {
      const Plan* plan;
      int64_t begin, end;  // rows
    };
    constexpr int64_t kUnitElements = int64_t{1} << 18;
    std::vector<Unit> units;
    for (const Plan& plan : plans_) {
      if (plan.to == nullptr) continue;
      const int64_t rows = plan.rows();
      const int64_t step = std::max<int64_t>(1, kUnitElements / plan.row_elements());
      for (int64_t begin = 0; begin < rows; begin += step) {
        units.push_back({&plan, begin, std::min(begin + step, rows)});
      }
    }
    const auto fill = [&](int64_t i) {
      FillRows(*units[static_cast<size_t>(i)].plan, units[static_cast<size_t>(i)].begin,
               units[static_cast<size_t>(i)].end);
    };
    const int64_t count = static_cast<int64_t>(units.size());
    if (pool_ != nullptr) {
      pool_->ParallelFor(count, fill);
    } else {
      for (int64_t i = 0; i < count; ++i) fill(i);
    }
  }

  void FillRows(const Plan& plan, int64_t begin, int64_t end) const {
    const GgufTensor& tensor = *plan.tensor;
    const int64_t head_dim = config_.shape.head_dim;
    // The elements of a permuted bias are its rows.
    const bool bias = tensor.shape.size() == 1 && plan.heads != 0;
    const int64_t width = bias ? 1 : plan.row_elements();
    const int64_t file_bytes = kernels::GgufBytes(tensor.type, width);
    const int64_t row_bytes = plan.as_it_is() ? file_bytes : width * DTypeBytes(plan.dtype);
    if (bias) end = tensor.elements();
    std::vector<float> wide(static_cast<size_t>(width));
    for (int64_t row = begin; row < end; ++row) {
      const int64_t in_file = plan.heads != 0 ? RowInFile(row, head_dim) : row;
      const char* from = tensor.bytes.data() + in_file * file_bytes;
      char* const to = plan.to + row * row_bytes;
      if (plan.as_it_is()) {
        std::memcpy(to, from, static_cast<size_t>(row_bytes));
        continue;
      }
      kernels::Widen(tensor.type, from, width, wide.data());
      if (plan.has_one) {
        for (float& value : wide) value -= 1.0f;
      }
      if (plan.dtype == DType::kF32) {
        std::memcpy(to, wide.data(), static_cast<size_t>(row_bytes));
      } else {
        CARREL_CHECK(plan.dtype == DType::kBf16);
        FloatToBf16(wide, reinterpret_cast<uint16_t*>(to));
      }
    }
  }

  const ModelConfig& config_;
  const GgufBlocks blocks_;
  ThreadPool* const pool_;
  std::shared_ptr<Storage> storage_ = std::make_shared<Storage>();
  std::vector<Plan> plans_;  // by name
};

}  // namespace

absl::StatusOr<std::shared_ptr<const Weights>> LoadGgufWeights(std::shared_ptr<const Gguf> gguf,
                                                               const ModelConfig& config,
                                                               ThreadPool* pool,
                                                               GgufBlocks blocks) {
  return Loader(std::move(gguf), config, blocks, pool).Run();
}

}  // namespace carrel::model
