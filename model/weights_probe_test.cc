#include "model/weights_probe.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>
#include <random>

#include "common/f16.h"
#include "common/status.h"
#include "common/test_util.h"
#include "kernels/layer/dequantize/code_values.h"
#include "model/config.h"
#include "model/gguf_test_model.h"
#include "model/safetensors.h"
#include "model/test_models.h"

namespace carrel::model {
namespace {

using kernels::GgufType;
using Code = absl::StatusCode;

// Weights in memory, by the names of a checkpoint.
struct Made {
  std::map<std::string, TensorView, std::less<>> views;
  std::vector<std::string> bytes;
};

std::vector<float> Wide(const TensorView& view) {
  std::vector<float> values(view.bytes.size() / static_cast<size_t>(DTypeBytes(view.dtype)));
  WidenToFloat(view.dtype, view.bytes.data(), static_cast<int64_t>(values.size()), values.data());
  return values;
}

std::string Bytes(const std::vector<float>& values, DType dtype) {
  if (dtype == DType::kF32) {
    return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
  }
  std::string bytes(values.size() * sizeof(uint16_t), '\0');
  FloatToBf16(values, reinterpret_cast<uint16_t*>(bytes.data()));
  return bytes;
}

// Every tensor of the checkpoint as `dtype`, each matrix after `change` (of its values).
absl::StatusOr<std::shared_ptr<const Weights>> Changed(
    const Weights& from, const ModelConfig& config, DType dtype,
    const std::function<void(const std::string&, std::vector<float>&)>& change) {
  auto made = std::make_shared<Made>();
  made->bytes.reserve(from.checkpoint().tensors().size() + from.blocks().size());
  for (const auto& [name, view] : from.checkpoint().tensors()) {
    std::vector<float> values = Wide(view);
    if (view.shape.size() == 2) change(name, values);
    made->bytes.push_back(Bytes(values, dtype));
    made->views[name] = {dtype, view.shape, made->bytes.back()};
  }
  for (const auto& [name, matrix] : from.blocks()) {
    std::vector<float> values(static_cast<size_t>(matrix.out * matrix.in));
    kernels::Dequantize(matrix.type, matrix.data, matrix.out * matrix.in, values.data());
    change(name, values);
    made->bytes.push_back(Bytes(values, dtype));
    made->views[name] = {dtype, {matrix.out, matrix.in}, made->bytes.back()};
  }
  TensorSource source;
  source.where = "made";
  source.tensors = Safetensors::Of(made->views);
  source.owner = made;
  return Weights::Build(std::move(source), config);
}

// Adds noise of a share of each matrix's own size.
auto Noise(double share, uint64_t seed, const std::string& of = "") {
  auto rng = std::make_shared<std::mt19937_64>(seed);
  return [=](const std::string& name, std::vector<float>& values) {
    if (name.find(of) == std::string::npos) return;
    double square = 0;
    for (const float value : values) square += double{value} * value;
    std::normal_distribution<float> normal(
        0, static_cast<float>(share * std::sqrt(square / static_cast<double>(values.size()))));
    for (float& value : values) value += normal(*rng);
  };
}

// One value of those that its block's scales leave: anywhere between the middles to its neighbours.
float WithinRounding(const kernels::QuantizedMatrix& matrix, int64_t element, float stored,
                     std::mt19937_64& rng) {
  const kernels::GgufTypeTraits& traits = kernels::TraitsOf(matrix.type);
  std::vector<float> level(static_cast<size_t>(traits.block_elements)), choice;
  for (int c = 0; c < kernels::CodeLevels(matrix.type); ++c) {
    kernels::CodeValues(matrix.type,
                        static_cast<const char*>(matrix.data) +
                            element / traits.block_elements * traits.block_bytes,
                        c, level.data());
    choice.push_back(level[static_cast<size_t>(element % traits.block_elements)]);
  }
  std::sort(choice.begin(), choice.end());
  choice.erase(std::unique(choice.begin(), choice.end()), choice.end());
  const auto at = std::find(choice.begin(), choice.end(), stored);
  EXPECT_NE(at, choice.end()) << "a stored value is none of its block's";
  if (at == choice.end() || choice.size() == 1) return stored;
  float below = at == choice.begin() ? 0 : stored - *(at - 1);
  const float above = at + 1 == choice.end() ? below : *(at + 1) - stored;
  if (below == 0) below = above;
  return stored + std::uniform_real_distribution<float>(-0.5f * below, 0.5f * above)(rng);
}

// A folder's weights of which the file is what rounding gives, where a probe looks.
absl::StatusOr<std::shared_ptr<const Weights>> Unrounded(const Weights& file,
                                                         const ModelConfig& config, uint64_t seed) {
  ASSIGN_OR_RETURN(const auto same, Changed(file, config, DType::kF32, Noise(0, 0)));
  const WeightsProbe probe = TakeWeightsProbe(*same, nullptr);
  std::mt19937_64 rng(seed);
  return Changed(file, config, DType::kF32,
                 [&](const std::string& name, std::vector<float>& values) {
                   const auto found = file.blocks().find(name);
                   if (found == file.blocks().end()) return;
                   const auto tensor = std::find_if(probe.tensors.begin(), probe.tensors.end(),
                                                    [&](const auto& t) { return t.name == name; });
                   ASSERT_NE(tensor, probe.tensors.end());
                   for (const int64_t run : tensor->runs) {
                     for (int64_t i = run; i < run + kProbeRun; ++i) {
                       values[i] = WithinRounding(found->second, i, values[i], rng);
                     }
                   }
                 });
}

struct Loaded {
  ModelConfig config;
  std::shared_ptr<const Weights> weights;
};

// A file whose matrices have one type.
absl::StatusOr<Loaded> OneType(GgufType type, uint64_t seed) {
  const std::string path = WriteGguf(
      MakeGguf({.types = {{"attn", type}, {"ffn", type}, {"token", type}}, .seed = seed}).Bytes());
  Loaded loaded;
  ASSIGN_OR_RETURN(loaded.config, LoadModelConfig(path));
  ASSIGN_OR_RETURN(loaded.weights, LoadWeights(path, loaded.config));
  return loaded;
}

std::vector<GgufType> QuantizedTypes() {
  std::vector<GgufType> types;
  for (uint32_t number = 0; number < 64; ++number) {
    const auto type = kernels::ParseGgufType(number);
    if (type && kernels::TraitsOf(*type).quantized) types.push_back(*type);
  }
  return types;
}

TEST(CodeValuesTest, EveryType_HasTheStoredValueOnceAndAscends) {
  for (const GgufType type : QuantizedTypes()) {
    SCOPED_TRACE(kernels::TraitsOf(type).name);
    const auto file = OneType(type, TestSeed());
    CARREL_ASSERT_OK(file);
    const auto& [name, matrix] = *file->weights->blocks().begin();
    const int64_t elements = kernels::TraitsOf(matrix.type).block_elements;
    std::vector<float> stored(static_cast<size_t>(elements)), level(stored.size());
    kernels::Dequantize(matrix.type, matrix.data, elements, stored.data());
    std::vector<int> found(stored.size());
    for (int c = 0; c < kernels::CodeLevels(matrix.type); ++c) {
      kernels::CodeValues(matrix.type, matrix.data, c, level.data());
      for (size_t i = 0; i < stored.size(); ++i) found[i] += level[i] == stored[i];
    }
    EXPECT_GT(*std::min_element(found.begin(), found.end()), 0);
  }
}

TEST(WeightsProbeTest, FileRoundedFromTheContexts_IsDerived) {
  for (const GgufType type : QuantizedTypes()) {
    SCOPED_TRACE(kernels::TraitsOf(type).name);
    const auto file = OneType(type, TestSeed());
    CARREL_ASSERT_OK(file);
    const auto origin = Unrounded(*file->weights, file->config, TestSeed() + 1);
    CARREL_ASSERT_OK(origin);
    const WeightsProbe probe = TakeWeightsProbe(**origin, nullptr);
    const auto seen = CheckDerivedWeights(probe, *file->weights);
    CARREL_ASSERT_OK(seen);
    EXPECT_EQ(seen->beyond, 0);
    EXPECT_GT(seen->spread, 0.5);
    EXPECT_EQ(seen->matrices, 15);
    EXPECT_GT(seen->quantised, 15 * 6 * kProbeRun);
  }
}

TEST(WeightsProbeTest, OriginWithASmallChange_IsRefused) {
  for (const GgufType type : QuantizedTypes()) {
    SCOPED_TRACE(kernels::TraitsOf(type).name);
    const auto file = OneType(type, TestSeed());
    CARREL_ASSERT_OK(file);
    const auto origin = Unrounded(*file->weights, file->config, TestSeed() + 1);
    CARREL_ASSERT_OK(origin);
    // Codes of two bits are so far apart that a smaller change stays within them.
    const double share = type == GgufType::kQ2_K ? 0.1 : 0.05;
    const auto other = Changed(**origin, file->config, DType::kF32, Noise(share, TestSeed() + 2));
    CARREL_ASSERT_OK(other);
    const absl::Status status =
        CheckDerivedWeights(TakeWeightsProbe(**other, nullptr), *file->weights).status();
    EXPECT_THAT(status,
                StatusIs(Code::kFailedPrecondition, "are not the nearest that their type has"));
  }
}

// A block of 32 in Q4_0 as the format's first quantiser has it: the value farthest from 0 becomes
// code -8, all others are rounded.
std::string ToQ4_0(const std::vector<float>& values) {
  std::string out;
  for (size_t at = 0; at < values.size(); at += 32) {
    const float* x = values.data() + at;
    const float farthest =
        *std::max_element(x, x + 32, [](float a, float b) { return std::abs(a) < std::abs(b); });
    const float d = farthest / -8, inverse = d != 0 ? 1 / d : 0;
    const uint16_t half = FloatToF16(d);
    std::string block(18, '\0');
    std::memcpy(block.data(), &half, sizeof(half));
    const auto code = [&](int i) {
      return std::clamp(static_cast<int>(std::floor(x[i] * inverse + 8.5f)), 0, 15);
    };
    for (int i = 0; i < 16; ++i) block[2 + i] = static_cast<char>(code(i) | code(i + 16) << 4);
    out += block;
  }
  return out;
}

// A file's matrices in Q4_0, made from what they are dequantised.
absl::StatusOr<std::shared_ptr<const Weights>> RequantisedToQ4_0(const Weights& file,
                                                                 const ModelConfig& config) {
  auto made = std::make_shared<Made>();
  TensorSource source;
  source.where = "made";
  source.tensors =
      Safetensors::Of({file.checkpoint().tensors().begin(), file.checkpoint().tensors().end()});
  made->bytes.reserve(file.blocks().size());
  for (const auto& [name, matrix] : file.blocks()) {
    std::vector<float> values(static_cast<size_t>(matrix.out * matrix.in));
    kernels::Dequantize(matrix.type, matrix.data, matrix.out * matrix.in, values.data());
    made->bytes.push_back(ToQ4_0(values));
    source.blocks[name] = {made->bytes.back().data(), GgufType::kQ4_0, matrix.out, matrix.in};
  }
  source.owner = made;
  return Weights::Build(std::move(source), config);
}

// Values on one grid, rounded to another: nearer to it than chance, though nothing was added.
TEST(WeightsProbeTest, DequantisedFileMadeAnotherType_IsDerived) {
  for (const GgufType type : {GgufType::kQ4_1, GgufType::kQ4_0, GgufType::kQ5_0}) {
    SCOPED_TRACE(kernels::TraitsOf(type).name);
    const auto file = OneType(type, TestSeed());
    CARREL_ASSERT_OK(file);
    const auto origin = Changed(*file->weights, file->config, DType::kF32, Noise(0, 0));
    CARREL_ASSERT_OK(origin);
    const auto other = RequantisedToQ4_0(*file->weights, file->config);
    CARREL_ASSERT_OK(other);
    CARREL_EXPECT_OK(CheckDerivedWeights(TakeWeightsProbe(**origin, nullptr), **other));
  }
}

TEST(WeightsProbeTest, DequantisedFile_IsDerivedButNotWithSomethingAdded) {
  for (const GgufType type : {GgufType::kQ4_1, GgufType::kQ4_K, GgufType::kQ6_K}) {
    SCOPED_TRACE(kernels::TraitsOf(type).name);
    const auto file = OneType(type, TestSeed());
    CARREL_ASSERT_OK(file);
    const auto same = Changed(*file->weights, file->config, DType::kBf16, Noise(0, TestSeed()));
    CARREL_ASSERT_OK(same);
    const auto seen = CheckDerivedWeights(TakeWeightsProbe(**same, nullptr), *file->weights);
    CARREL_ASSERT_OK(seen);
    EXPECT_EQ(seen->beyond, 0);
    EXPECT_EQ(seen->spread, 0);
    // As an adapter of two projections would be, all within the rounding of the type.
    for (const char* of : {"q_proj", "layers.1."}) {
      const auto other =
          Changed(*file->weights, file->config, DType::kBf16, Noise(0.01, TestSeed() + 1, of));
      CARREL_ASSERT_OK(other);
      const absl::Status status =
          CheckDerivedWeights(TakeWeightsProbe(**other, nullptr), *file->weights).status();
      // Blocks of the K types have some steps that are smaller than what is added.
      EXPECT_THAT(status,
                  StatusIs(Code::kFailedPrecondition,
                           type == GgufType::kQ4_1 ? "something was added to dequantised"
                                                   : "were not made from those of the context"));
    }
  }
}

// The demo model in Q4_0, its norms as they are.
absl::StatusOr<std::shared_ptr<const Weights>> DemoInQ4_0(const TestModel& demo) {
  auto made = std::make_shared<Made>();
  TensorSource source;
  source.where = "made";
  made->bytes.reserve(demo.weights->checkpoint().tensors().size());
  for (const auto& [name, view] : demo.weights->checkpoint().tensors()) {
    if (view.shape.size() == 1) {
      made->views[name] = view;
      continue;
    }
    made->bytes.push_back(ToQ4_0(Wide(view)));
    source.blocks[name] = {made->bytes.back().data(), GgufType::kQ4_0, view.shape[0],
                           view.shape[1]};
  }
  source.tensors = Safetensors::Of(made->views);
  source.owner = made;
  return Weights::Build(std::move(source), demo.config);
}

TEST(WeightsProbeTest, DemoModelInQ4_0_IsDerivedFromItAloneAndNotFromAPerturbedOne) {
  const auto demo = TestModel::Load(DemoModelDir());
  CARREL_ASSERT_OK(demo);
  const auto quantised = DemoInQ4_0(*demo);
  CARREL_ASSERT_OK(quantised);
  const WeightsProbe probe = TakeWeightsProbe(*demo->weights, nullptr);
  const auto seen = CheckDerivedWeights(probe, **quantised);
  CARREL_ASSERT_OK(seen);
  EXPECT_EQ(seen->beyond, 0);
  EXPECT_EQ(seen->matrices, 57);
  CARREL_EXPECT_OK(CheckDerivedWeights(probe, *demo->weights));

  const auto refused = [&](double share, const std::string& of) {
    const auto other =
        Changed(*demo->weights, demo->config, DType::kBf16, Noise(share, TestSeed(), of));
    EXPECT_TRUE(other.ok()) << other.status();
    const absl::Status status =
        CheckDerivedWeights(TakeWeightsProbe(**other, nullptr), **quantised).status();
    return status.code() == Code::kFailedPrecondition;
  };
  EXPECT_TRUE(refused(0.02, ""));
  EXPECT_TRUE(refused(0.05, "q_proj"));
  EXPECT_TRUE(refused(0.05, "layers.7."));
}

TEST(WeightsProbeTest, PlainWeights_MustBeTheSameValues) {
  const auto demo = TestModel::Load(DemoModelDir());
  CARREL_ASSERT_OK(demo);
  const auto other = Changed(*demo->weights, demo->config, DType::kBf16, Noise(0.01, TestSeed()));
  CARREL_ASSERT_OK(other);
  const absl::Status status =
      CheckDerivedWeights(TakeWeightsProbe(**other, nullptr), *demo->weights).status();
  EXPECT_THAT(status, StatusIs(Code::kFailedPrecondition, "(bf16) here"));
}

TEST(WeightsProbeTest, QuantisedWeights_GiveNoProbe) {
  const auto file = OneType(GgufType::kQ8_0, TestSeed());
  CARREL_ASSERT_OK(file);
  const WeightsProbe probe = TakeWeightsProbe(*file->weights, nullptr);
  EXPECT_TRUE(probe.tensors.empty());
  const absl::Status status = CheckDerivedWeights(probe, *file->weights).status();
  EXPECT_THAT(status, StatusIs(Code::kFailedPrecondition, "holds no sampled weights"));
}

// A store is not believed: every field of a damaged probe is checked before it is used.
TEST(WeightsProbeTest, DamagedProbe_IsDataLoss) {
  const auto file = OneType(GgufType::kQ4_K, TestSeed());
  CARREL_ASSERT_OK(file);
  const auto origin = Unrounded(*file->weights, file->config, TestSeed());
  CARREL_ASSERT_OK(origin);
  const WeightsProbe probe = TakeWeightsProbe(**origin, nullptr);
  const std::function<void(WeightsProbe::Tensor&)> damages[] = {
      [](auto& t) { t.shape.clear(); },     [](auto& t) { t.shape = {2, 2, 2}; },
      [](auto& t) { t.shape[0] = 0; },      [](auto& t) { t.shape[0] = int64_t{1} << 62; },
      [](auto& t) { t.runs[0] = -32; },     [](auto& t) { t.runs[0] = int64_t{1} << 40; },
      [](auto& t) { t.runs[0] += 1; },      [](auto& t) { t.runs.push_back(0); },
      [](auto& t) { t.values.pop_back(); }, [](auto& t) { t.dtype = DType::kI64; },
  };
  for (const auto& damage : damages) {
    WeightsProbe damaged = probe;
    damage(damaged.tensors[3]);
    EXPECT_EQ(CheckDerivedWeights(damaged, *file->weights).status().code(), Code::kDataLoss);
  }
  WeightsProbe other = probe;
  other.tensors[3].name = "model.layers.9.self_attn.q_proj.weight";
  EXPECT_EQ(CheckDerivedWeights(other, *file->weights).status().code(), Code::kFailedPrecondition);
}

// Ids count by the bytes they stand for.
class FakeTokenizer : public Tokenizer {
 public:
  explicit FakeTokenizer(std::string last) : last_(std::move(last)) {}
  absl::Status DecodeNext(TokenId id, bool, DecodeState*, std::string* text) const override {
    if (id == 7) return absl::InvalidArgumentError("unused");
    absl::StrAppend(text, id == 99 ? last_ : absl::StrCat("<", id, ">"));
    return absl::OkStatus();
  }
  int64_t vocab_size() const override { return 100; }

 protected:
  absl::StatusOr<std::vector<TokenId>> EncodeText(absl::string_view, Dropped*,
                                                  absl::Span<const PlainRange>) const override {
    return std::vector<TokenId>();
  }

 private:
  std::string last_;
};

TEST(WeightsProbeTest, TokensThatMeanOtherBytes_AreRefusedByName) {
  const auto demo = TestModel::Load(DemoModelDir());
  CARREL_ASSERT_OK(demo);
  const FakeTokenizer tokenizer("<end>"), other("<stop>");
  const WeightsProbe probe = TakeWeightsProbe(*demo->weights, &tokenizer);
  EXPECT_EQ(probe.tokens.size(), 99u);
  CARREL_EXPECT_OK(CheckSameTokens(probe, tokenizer));
  const absl::Status status = CheckSameTokens(probe, other);
  EXPECT_THAT(status, StatusIs(Code::kFailedPrecondition, "token 99 "));
}

}  // namespace
}  // namespace carrel::model
