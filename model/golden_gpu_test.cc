// The CUDA backend against what transformers computes in fp32 (shared/README.md).
#include <cmath>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "common/cuda/buffer.h"
#include "common/test_folders.h"
#include "common/test_util.h"
#include "kernels/attention/prefill_attention/prefill_attention_cuda.h"
#include "model/adapter.h"
#include "model/cuda_backend.h"
#include "model/gguf_test_model.h"
#include "model/safetensors.h"
#include "model/test_models.h"
#include "model/weights.h"

namespace carrel::model {
namespace {

constexpr double kLogitsTolerance = 1e-2;  // of bf16 arithmetic
constexpr double kRowsTolerance = 1.5e-2;
constexpr double kTinyTolerance = 3e-2;  // with 32 columns roundings hardly cancel

template <typename T>
std::vector<T> Values(const Safetensors& file, const std::string& name) {
  const absl::StatusOr<TensorView> view = file.Get(name);
  EXPECT_TRUE(view.ok()) << view.status();
  if (!view.ok()) return {};
  std::vector<T> values(view->bytes.size() / sizeof(T));
  std::memcpy(values.data(), view->bytes.data(), view->bytes.size());
  return values;
}

template <typename T>
std::vector<T> Read(const T* device, int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  EXPECT_EQ(cudaSuccess,
            cudaMemcpy(values.data(), device, values.size() * sizeof(T), cudaMemcpyDefault));
  return values;
}

std::vector<float> Widened(const std::vector<uint16_t>& values) {
  std::vector<float> wide(values.size());
  Bf16ToFloat(values, wide.data());
  return wide;
}

struct Result {
  std::vector<float> logits;             // [n, vocab]
  std::vector<std::vector<float>> k, v;  // per layer [kv_heads, n, head_dim]
};

// All tokens through every layer in blocks; causal attention by the kernel.
void Forward(const TestModel& model, const std::vector<int32_t>& tokens, int64_t block,
             Result& result) {
  const ModelConfig& config = model.config;
  const AttentionShape& shape = config.shape;
  const int64_t n = static_cast<int64_t>(tokens.size()), d = shape.head_dim;
  const int64_t width = shape.q_heads * d, rows = shape.kv_heads * n * d;
  ThreadPool pool(1);
  auto backend = CudaBackend::Create(config, model.weights, block, &pool, model.adapter);
  CARREL_ASSERT_OK(backend);
  auto ids = cuda::DeviceBuffer<int32_t>::Create(n);
  auto hidden = cuda::DeviceBuffer<float>::Create(n * config.hidden_size);
  auto logits = cuda::DeviceBuffer<float>::Create(n * config.vocab_size);
  auto q = cuda::DeviceBuffer<uint16_t>::Create(block * width);
  auto attended = cuda::DeviceBuffer<uint16_t>::Create(block * width);
  auto k = cuda::DeviceBuffer<uint16_t>::Create(rows),
       v = cuda::DeviceBuffer<uint16_t>::Create(rows);
  for (const absl::Status& status : {ids.status(), hidden.status(), logits.status(), q.status(),
                                     attended.status(), k.status(), v.status()}) {
    CARREL_ASSERT_OK(status);
  }
  const cudaStream_t stream = (*backend)->stream().get();
  ASSERT_EQ(cudaSuccess,
            cudaMemcpy(ids->data(), tokens.data(), tokens.size() * 4, cudaMemcpyDefault));
  CARREL_ASSERT_OK((*backend)->Embed(ids->data(), n, hidden->data()));
  for (Layer layer(0); layer.value() < shape.layers; layer = layer.next()) {
    for (int64_t at = 0; at < n; at += block) {
      const int64_t count = std::min(block, n - at);
      float* const h = hidden->data() + at * config.hidden_size;
      CudaPlacement placement;
      placement.first_position = placement.first_row = at;
      placement.kv = {k->data(), v->data(), n};
      CARREL_ASSERT_OK((*backend)->ProjectQkv(layer, h, count, placement, q->data(), nullptr));
      kernels::PrefillAttentionCudaParams params;
      params.q = q->data();
      params.kv = placement.kv;
      params.n = count;
      params.first_position = at;
      params.rows = at + count;
      params.q_heads = shape.q_heads;
      params.kv_heads = shape.kv_heads;
      params.head_dim = shape.head_dim;
      params.scale = 1.0f / std::sqrt(static_cast<float>(d));
      params.out = attended->data();
      ASSERT_EQ(cudaSuccess, kernels::PrefillAttentionCuda(params, stream));
      CARREL_ASSERT_OK((*backend)->FinishLayer(layer, attended->data(), count, h));
    }
    CARREL_ASSERT_OK((*backend)->stream().Synchronize());
    result.k.push_back(Widened(Read(k->data(), rows)));
    result.v.push_back(Widened(Read(v->data(), rows)));
  }
  for (int64_t at = 0; at < n; at += block) {
    CARREL_ASSERT_OK((*backend)->Logits(hidden->data() + at * config.hidden_size,
                                        std::min(block, n - at),
                                        logits->data() + at * config.vocab_size));
  }
  CARREL_ASSERT_OK((*backend)->stream().Synchronize());
  result.logits = Read(logits->data(), n * config.vocab_size);
}

// values [slabs, tokens, width]: [slabs, n, width] of the first n tokens.
std::vector<float> FirstTokens(const std::vector<float>& values, int64_t slabs, int64_t tokens,
                               int64_t n) {
  const int64_t slab = static_cast<int64_t>(values.size()) / slabs;
  std::vector<float> first;
  for (int64_t s = 0; s < slabs; ++s) {
    const auto begin = values.begin() + s * slab;
    first.insert(first.end(), begin, begin + slab / tokens * n);
  }
  return first;
}

constexpr int64_t kSanitizedBlocks = 32;

// Tiny checkpoints of the repository: logits alone.
void ExpectLogits(const TestModel& model, const std::string& golden_path, const std::string& name) {
  const auto golden = Safetensors::OpenFile(golden_path);
  CARREL_ASSERT_OK(golden);
  for (int64_t block : {4096, 17, 1}) {
    Result result;
    Forward(model, Values<int32_t>(*golden, "input_ids"), block, result);
    const double error = RelativeError(result.logits, Values<float>(*golden, name));
    EXPECT_LE(error, kTinyTolerance);
    std::cout << name << ", blocks of " << block << ": relative error of logits " << error
              << std::endl;
  }
}

void ExpectGolden(const std::string& model_dir, const std::string& golden_path, int64_t block) {
  const auto model = TestModel::Load(model_dir);
  CARREL_ASSERT_OK(model);
  const auto golden = Safetensors::OpenFile(golden_path);
  CARREL_ASSERT_OK(golden);
  std::vector<int32_t> ids = Values<int32_t>(*golden, "input_ids");
  const int64_t tokens = static_cast<int64_t>(ids.size());
  const int64_t n = UnderComputeSanitizer() ? std::min(tokens, kSanitizedBlocks * block) : tokens;
  ids.resize(static_cast<size_t>(n));
  const auto expected = [&](const std::string& name, int64_t slabs) {
    return FirstTokens(Values<float>(*golden, name), slabs, tokens, n);
  };
  Result result;
  Forward(*model, ids, block, result);
  const double error = RelativeError(result.logits, expected("logits_all", 1));
  EXPECT_LE(error, kLogitsTolerance);
  double k_error = 0, v_error = 0;
  for (size_t layer = 0; layer < result.k.size(); ++layer) {
    const auto rows = [&](const char* name) {
      return expected(absl::StrCat(name, layer), model->config.shape.kv_heads);
    };
    k_error = std::max(k_error, RelativeError(result.k[layer], rows("k.")));
    v_error = std::max(v_error, RelativeError(result.v[layer], rows("v.")));
  }
  EXPECT_LE(k_error, kRowsTolerance);
  EXPECT_LE(v_error, kRowsTolerance);
  std::cout << "blocks of " << block << ": relative error of logits " << error << ", K " << k_error
            << ", V " << v_error << " (the worst layer)" << std::endl;
}

class GoldenGpuTest : public testing::TestWithParam<const char*> {};

TEST_P(GoldenGpuTest, LogitsAndKv_AreThoseOfTransformers) {
  const auto shared = SharedDir();
  if (!shared) GTEST_SKIP() << "no shared folder (CARREL_SHARED): golden checkpoints not checked";
  const std::string folder = *shared + "/golden-models/" + GetParam();
  for (int64_t block : {4096, 17, 1}) ExpectGolden(folder, folder + "/golden.safetensors", block);
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, GoldenGpuTest,
                         testing::Values("llama3.1", "llama2-mha-linear", "mistral", "qwen2",
                                         "qwen3"),
                         [](const testing::TestParamInfo<const char*>& info) {
                           std::string name = info.param;
                           std::erase_if(name, [](char c) { return c == '.' || c == '-'; });
                           return name;
                         });

TEST(FamilyGpuTest, Yarn_LogitsAreThoseOfTransformers) {
  const std::string folder = SourceFolder() + "/model/testdata/families/yarn";
  const auto model = TestModel::Load(folder);
  CARREL_ASSERT_OK(model);
  ExpectLogits(*model, folder + "/golden.safetensors", "logits");
}

TEST(FamilyGpuTest, Experts_AreRefusedByName) {
  const auto model = TestModel::Load(SourceFolder() + "/model/testdata/families/qwen3_moe");
  CARREL_ASSERT_OK(model);
  EXPECT_THAT(CudaBackend::Check(model->config),
              StatusIs(absl::StatusCode::kUnimplemented, "experts"));
}

// Merged at load, into q, k, v and gate, up of one product each.
TEST(AdapterGpuTest, Merged_LogitsAreThoseOfPeft) {
  const std::string folder = SourceFolder() + "/model/testdata/adapters/";
  for (const char* name : {"all", "some"}) {
    auto model = TestModel::Load(folder + "base");
    CARREL_ASSERT_OK(model);
    const auto adapter = Adapter::Load(folder + name, model->config);
    CARREL_ASSERT_OK(adapter);
    model->adapter = *adapter;
    ExpectLogits(*model, folder + "golden.safetensors", absl::StrCat("logits.", name));
  }
}

TEST(DemoModelGpuTest, Registry512_LogitsAndKv_AreThoseOfTransformers) {
  const auto shared = SharedDir();
  if (!shared) GTEST_SKIP() << "no shared folder (CARREL_SHARED): golden not checked";
  for (int64_t block : {4096, 100}) {
    ExpectGolden(DemoModelDir(), *shared + "/demo/golden/registry-512.safetensors", block);
  }
}

// Blocks are widened at load: the bits are those of a folder with the same weights in bf16.
TEST(GgufGpuTest, QuantizedFile_GivesTheBitsOfTheFolderInBf16) {
  const GgufTestModel made{.types = {{"attn", kernels::GgufType::kQ4_K},
                                     {"ffn", kernels::GgufType::kQ8_0},
                                     {"token", kernels::GgufType::kQ6_K}},
                           .seed = TestSeed()};
  const std::string path = WriteGguf(MakeGguf(made).Bytes());
  const std::string folder = path + ".folder";
  std::filesystem::create_directories(folder);
  CARREL_ASSERT_OK(WriteSameModel(made, DType::kBf16, folder));
  const auto file = TestModel::Load(path), same = TestModel::Load(folder);
  CARREL_ASSERT_OK(file);
  CARREL_ASSERT_OK(same);
  ASSERT_TRUE(file->weights->layer(Layer(0)).q.blocks.has_value());
  const std::vector<int32_t> ids = {1, 95, 3, 40, 41, 7, 7, 60, 12, 88, 5, 31};
  Result got, want;
  Forward(*file, ids, 5, got);
  Forward(*same, ids, 5, want);
  EXPECT_EQ(got.logits, want.logits);
  EXPECT_EQ(got.k, want.k);
  EXPECT_EQ(got.v, want.v);
  EXPECT_FALSE(got.logits.empty());
}

}  // namespace
}  // namespace carrel::model
