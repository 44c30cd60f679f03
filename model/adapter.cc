#include "model/adapter.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_split.h"
#include "common/checksum.h"
#include "common/file.h"
#include "common/json.h"
#include "common/shown.h"
#include "common/status.h"
#include "model/full_match.h"
#include "nlohmann/json.hpp"

namespace carrel::model {
namespace {

using nlohmann::json;

constexpr int64_t kMaxRank = 4096;
constexpr double kMaxAlpha = 1e6;
constexpr char kConfigFile[] = "adapter_config.json";
constexpr char kTensorFile[] = "adapter_model.safetensors";

constexpr const char* kModules[kProjections] = {
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj",    "mlp.up_proj",      "mlp.down_proj"};

// Fields that change no result once the tensors are there, and those that ParseAdapter reads.
constexpr absl::string_view kKnownFields =
    "auto_mapping base_model_name_or_path bias corda_config eva_config inference_mode "
    "init_lora_weights layers_pattern layers_to_transform loftq_config lora_alpha "
    "lora_dropout megatron_core peft_type peft_version qalora_group_size r revision "
    "target_modules task_type use_rslora";

// What adapter_config.json says.
struct AdapterFields {
  int64_t rank = 0;
  float scale = 1;
  std::vector<std::string> targets;
  std::optional<FullMatch> pattern;  // instead of targets
  bool all_layers = true;
  std::set<int64_t> layers;  // unless all_layers
};

// Initialisations that leave the base's weights alone; others need a base that they have changed.
absl::Status CheckInitialisation(const JsonFields& fields) {
  const json* value = fields.Find("init_lora_weights");
  if (value == nullptr || value->is_boolean()) return absl::OkStatus();
  for (const char* harmless : {"gaussian", "orthogonal", "eva"}) {
    if (*value == harmless) return absl::OkStatus();
  }
  return fields.Unsupported("init_lora_weights",
                            "is not run: it changes the weights of the base as well");
}

absl::Status ParseTargets(const JsonFields& fields, AdapterFields& result) {
  const json* targets = fields.Find("target_modules");
  if (targets == nullptr) return fields.Invalid("target_modules", "names no module");
  if (*targets == "all-linear") {
    result.targets.assign(std::begin(kModules), std::end(kModules));
    return absl::OkStatus();
  }
  if (targets->is_string()) {
    for (const char* list_alone : {"layers_to_transform", "layers_pattern"}) {
      if (!fields.Has(list_alone)) continue;
      return fields.Invalid(list_alone, "stands beside target_modules that are a pattern");
    }
    auto pattern = FullMatch::Compile(targets->get<std::string>());
    if (!pattern.ok()) return fields.Invalid("target_modules", pattern.status().message());
    result.pattern = *std::move(pattern);
    return absl::OkStatus();
  }
  if (!targets->is_array()) {
    return fields.Unsupported("target_modules", "is not a list of names, a pattern or all-linear");
  }
  for (const json& target : *targets) {
    if (!target.is_string()) return fields.Invalid("target_modules", "is not a list of names");
    result.targets.push_back(target.get<std::string>());
  }
  return absl::OkStatus();
}

absl::Status ParseLayers(const JsonFields& fields, int32_t layers, AdapterFields& result) {
  const json* value = fields.Find("layers_to_transform");
  if (value == nullptr) return absl::OkStatus();
  const json one = value->is_array() ? json() : json::array({*value});
  for (const json& layer : value->is_array() ? *value : one) {
    if (!layer.is_number_unsigned() || layer.get<uint64_t>() >= static_cast<uint64_t>(layers)) {
      return fields.Invalid("layers_to_transform",
                            absl::StrCat("is not a layer, or list of them, in [0, ", layers, ")"));
    }
    result.layers.insert(layer.get<int64_t>());
  }
  result.all_layers = result.layers.empty();
  return absl::OkStatus();
}

absl::StatusOr<AdapterFields> ParseAdapter(const JsonFields& fields, int32_t layers) {
  ASSIGN_OR_RETURN(const std::string type, fields.String("peft_type"));
  if (type != "LORA") return fields.Unsupported("peft_type", "is not LORA");
  const std::vector<absl::string_view> known = absl::StrSplit(kKnownFields, ' ');
  RETURN_IF_ERROR(RefuseUnknownFields(fields, known));
  if (const json* bias = fields.Find("bias"); bias != nullptr && *bias != "none") {
    return fields.Unsupported("bias", "is not none: trained biases are not run");
  }
  RETURN_IF_ERROR(CheckInitialisation(fields));
  AdapterFields result;
  ASSIGN_OR_RETURN(result.rank, fields.Int("r", 1, kMaxRank));
  ASSIGN_OR_RETURN(const double alpha, fields.Number("lora_alpha", 0.0, kMaxAlpha));
  ASSIGN_OR_RETURN(const bool rank_stable, fields.BoolOr("use_rslora", false));
  const double rank = static_cast<double>(result.rank);
  result.scale = static_cast<float>(alpha / (rank_stable ? std::sqrt(rank) : rank));
  RETURN_IF_ERROR(ParseTargets(fields, result));
  RETURN_IF_ERROR(ParseLayers(fields, layers, result));
  return result;
}

absl::StatusOr<bool> Targeted(const AdapterFields& fields, const std::string& module) {
  if (fields.pattern) return fields.pattern->Matches(module);
  return std::any_of(fields.targets.begin(), fields.targets.end(), [&](const std::string& target) {
    return module == target || absl::EndsWith(module, absl::StrCat(".", target));
  });
}

struct Extent {
  int64_t out, in;
};

Extent ExtentOf(const ModelConfig& config, Projection projection) {
  const int64_t hidden = config.hidden_size, inner = config.intermediate_size;
  const int64_t q = int64_t{config.shape.q_heads} * config.shape.head_dim;
  const int64_t kv = int64_t{config.shape.kv_heads} * config.shape.head_dim;
  const Extent extents[] = {{q, hidden},     {kv, hidden},    {kv, hidden},   {hidden, q},
                            {inner, hidden}, {inner, hidden}, {hidden, inner}};
  return extents[static_cast<size_t>(projection)];
}

}  // namespace

// Takes the tensors one by one out of the file; what is left at the end is unexpected.
class AdapterBuilder {
 public:
  AdapterBuilder(std::string adapter_dir, const ModelConfig& config, AdapterFields fields,
                 Safetensors file)
      : path_((std::filesystem::path(adapter_dir) / kTensorFile).string()),
        config_(config),
        fields_(std::move(fields)),
        adapter_(new Adapter(std::move(file), config.shape.layers)) {}

  absl::StatusOr<std::shared_ptr<const Adapter>> Build() {
    for (int32_t layer = 0; layer < config_.shape.layers; ++layer) {
      for (int p = 0; p < kProjections; ++p) RETURN_IF_ERROR(BuildOne(layer, p));
    }
    for (const auto& [name, view] : adapter_->file_.tensors()) {
      if (taken_.count(name) > 0) continue;
      return Bad(name, absl::StrCat("(", DTypeName(view.dtype), " ", ShapeText(view.shape),
                                    ") is of no projection of this model that target_modules of ",
                                    kConfigFile, " names"));
    }
    if (taken_.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(path_, ": adds to no projection"));
    }
    adapter_->sha256_ = Digest();
    return std::shared_ptr<const Adapter>(std::move(adapter_));
  }

 private:
  absl::Status Bad(absl::string_view name, absl::string_view what) const {
    return absl::InvalidArgumentError(
        absl::StrCat(path_, ": tensor \"", Shown(name, 200), "\" ", what));
  }

  absl::Status BuildOne(int32_t layer, int p) {
    const std::string module = absl::StrCat("model.layers.", layer, ".", kModules[p]);
    ASSIGN_OR_RETURN(const bool targeted, Targeted(fields_, module));
    if (!targeted) return absl::OkStatus();
    if (!fields_.all_layers && fields_.layers.count(layer) == 0) return absl::OkStatus();
    const Extent extent = ExtentOf(config_, static_cast<Projection>(p));
    const std::string prefix = absl::StrCat("base_model.model.", module, ".lora_");
    LowRank& added = adapter_->layers_[static_cast<size_t>(layer)][static_cast<size_t>(p)];
    RETURN_IF_ERROR(Take(prefix + "A.weight", fields_.rank, extent.in, added.a));
    RETURN_IF_ERROR(Take(prefix + "B.weight", extent.out, fields_.rank, added.b));
    added.scale = fields_.scale;
    return absl::OkStatus();
  }

  absl::Status Take(const std::string& name, int64_t out, int64_t in,
                    kernels::WeightMatrix& matrix) {
    const absl::StatusOr<TensorView> view = adapter_->file_.Get(name);
    const std::string expected = absl::StrCat("f32, f16 or bf16 ", ShapeText({out, in}));
    if (!view.ok()) return Bad(name, absl::StrCat("is missing; expected ", expected));
    if (!view->floating() ||
        absl::MakeConstSpan(view->shape) != absl::Span<const int64_t>({out, in})) {
      return Bad(name, absl::StrCat("is ", DTypeName(view->dtype), " ", ShapeText(view->shape),
                                    ", expected ", expected));
    }
    matrix.data = view->bytes.data();
    matrix.dtype = view->dtype;
    matrix.out = out;
    matrix.in = in;
    taken_.insert(name);
    return absl::OkStatus();
  }

  // As the weights' digest; the length keeps a name with a newline from imitating a line.
  std::string Digest() const {
    Sha256 all;
    all.Update(absl::StrCat("scale ", fields_.scale, "\n"));
    for (const auto& [name, view] : adapter_->file_.tensors()) {
      all.Update(absl::StrCat(name.size(), " ", name, " ", DTypeName(view.dtype), " ",
                              ShapeText(view.shape), " ", Sha256Hex(view.bytes), "\n"));
    }
    return all.FinishHex();
  }

  const std::string path_;
  const ModelConfig& config_;
  const AdapterFields fields_;
  std::unique_ptr<Adapter> adapter_;
  std::set<std::string, std::less<>> taken_;
};

absl::StatusOr<std::shared_ptr<const Adapter>> Adapter::Load(const std::string& adapter_dir,
                                                             const ModelConfig& config) {
  const std::filesystem::path folder(adapter_dir);
  const std::string path = (folder / kConfigFile).string();
  ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  ASSIGN_OR_RETURN(const json object, ParseJsonObject(text, path, {.unique_names = true}));
  ASSIGN_OR_RETURN(AdapterFields fields,
                   ParseAdapter(JsonFields(path, object), config.shape.layers));
  ASSIGN_OR_RETURN(Safetensors file, Safetensors::OpenFile((folder / kTensorFile).string()));
  return AdapterBuilder(adapter_dir, config, std::move(fields), std::move(file)).Build();
}

const LowRank* Adapter::Find(Layer layer, Projection projection) const {
  const LowRank& added =
      layers_[static_cast<size_t>(layer.value())][static_cast<size_t>(projection)];
  return added.a.data == nullptr ? nullptr : &added;
}

absl::Status ReadAdapterConfig(const std::string& adapter_dir, ModelConfig& config) {
  const std::string path = (std::filesystem::path(adapter_dir) / "config.json").string();
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return absl::OkStatus();
  ASSIGN_OR_RETURN(const ModelConfig own, LoadModelConfig(adapter_dir));
  // Both lists hold the same fields, but for those of rope.
  const auto without_rope = [](const ModelConfig& of) {
    auto fields = of.FingerprintFields();
    std::erase_if(fields, [](const auto& field) { return absl::StartsWith(field.first, "rope_"); });
    return fields;
  };
  const auto mine = without_rope(own), base = without_rope(config);
  for (size_t i = 0; i < std::min(mine.size(), base.size()); ++i) {
    if (mine[i] == base[i]) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": ", mine[i].first, "=", mine[i].second, " is not the base's ",
                     base[i].first, "=", base[i].second,
                     ": an adapter's config.json may change rope and max_position_embeddings "
                     "alone"));
  }
  config.rope = own.rope;
  config.max_position_embeddings = own.max_position_embeddings;
  config.window_limit = own.window_limit;
  return absl::OkStatus();
}

absl::Status CheckNoOtherAdapter(const std::string& model_dir, const std::string& adapter_dir) {
  const std::filesystem::path folder(model_dir);
  std::error_code error;
  if (!adapter_dir.empty() && std::filesystem::equivalent(folder, adapter_dir, error)) {
    return absl::OkStatus();
  }
  for (const char* file : {kConfigFile, kTensorFile, "adapter_model.bin"}) {
    if (!std::filesystem::exists(folder / file, error)) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        model_dir, ": holds an adapter (", file, "), which changes the model: give ", "--adapter ",
        model_dir, ", and the folder of its base as --model; or take ", "the file away"));
  }
  return absl::OkStatus();
}

LowRankProduct::LowRankProduct(const LowRank& added)
    : rank_(added.a.out),
      in_(added.a.in),
      a_(static_cast<size_t>(added.a.out * added.a.in)),
      b_(static_cast<size_t>(added.b.out * added.b.in)) {
  WidenToFloat(added.a.dtype, added.a.data, static_cast<int64_t>(a_.size()), a_.data());
  WidenToFloat(added.b.dtype, added.b.data, static_cast<int64_t>(b_.size()), b_.data());
  for (float& x : b_) x *= added.scale;
}

void LowRankProduct::AddTo(int64_t begin, int64_t count, float* values) const {
  while (count > 0) {
    const int64_t row = begin / in_, column = begin % in_;
    const int64_t here = std::min(count, in_ - column);
    for (int64_t r = 0; r < rank_; ++r) {
      const float factor = b_[static_cast<size_t>(row * rank_ + r)];
      const float* a = a_.data() + r * in_ + column;
      for (int64_t i = 0; i < here; ++i) values[i] += factor * a[i];
    }
    values += here;
    begin += here;
    count -= here;
  }
}

}  // namespace carrel::model
