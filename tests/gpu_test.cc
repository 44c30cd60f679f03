// The whole way on a GPU: prefill there, rows that a CPU reads, decoding there, every way to
// retrieve.
#include <cmath>

#include "carrel/v1/context.pb.h"
#include "common/dtype.h"
#include "common/test_util.h"
#include "kvstore/index/rows.h"
#include "kvstore/storage/store.h"
#include "model/safetensors.h"
#include "tests/world.h"

namespace carrel {
namespace {

using decoder::DeviceConfig;
using decoder::RetrievalConfig;
using testing_world::EmbeddedDecoder;
using testing_world::Question;

DeviceConfig Cuda() {
  DeviceConfig device;
  device.device = model::Device::kCuda;
  return device;
}

kvstore::IndexParams Code() {
  kvstore::IndexParams params;
  params.kind = kvstore::IndexKind::kCode;
  return params;
}

// Prefills on the GPU; false if the document is not here.
bool Prefill(const std::string& folder, const std::string& document) {
  const auto tokens = testing_world::DocumentTokens(document);
  if (absl::IsNotFound(tokens.status())) return false;
  CARREL_EXPECT_OK(tokens);
  CARREL_EXPECT_OK(
      testing_world::PrefillContext(folder, "doc", *tokens, Code(), 65536, model::Device::kCuda));
  return true;
}

// Answers equal to dense decoding, of all questions.
int64_t EqualToDense(const std::string& folder, const std::string& document,
                     const RetrievalConfig& config, const DeviceConfig& device,
                     const std::string& what) {
  const auto questions = testing_world::Questions(document);
  CARREL_EXPECT_OK(questions);
  auto decoder = EmbeddedDecoder::Open(folder, "doc", config, device);
  CARREL_EXPECT_OK(decoder);
  if (!questions.ok() || !decoder.ok()) return 0;
  const auto answers = testing_world::AnswerAll(*(*decoder)->operator->(), *questions);
  CARREL_EXPECT_OK(answers);
  if (!answers.ok()) return 0;
  int64_t equal = 0;
  for (size_t i = 0; i < questions->size(); ++i)
    equal += (*answers)[i] == (*questions)[i].dense_ids;
  std::cout << document << ", " << what << ": " << equal << " of " << questions->size()
            << " equal to dense" << std::endl;
  return equal;
}

RetrievalConfig All() {
  RetrievalConfig config;
  config.top_k = decoder::kAllRows;
  return config;
}

absl::StatusOr<std::vector<float>> Logits(absl::StatusOr<std::unique_ptr<EmbeddedDecoder>> decoder,
                                          const std::vector<TokenId>& prompt) {
  if (!decoder.ok()) return decoder.status();
  decoder::GenerateOptions options;
  options.max_tokens = 8;
  options.keep_logits = true;
  options.ignore_eos = true;
  auto result = (**decoder)->Generate(prompt, options);
  if (!result.ok()) return result.status();
  return std::move(result->logits);
}

TEST(GpuTest, Segments_AreTheCpusWithinBf16Rounding) {
  const std::string folder = FreshTempDir(), cpu_folder = folder + "/cpu",
                    gpu_folder = folder + "/gpu";
  const auto tokens = testing_world::DocumentTokens("registry-2k");
  CARREL_ASSERT_OK(tokens);
  CARREL_ASSERT_OK(testing_world::PrefillContext(cpu_folder, "doc", *tokens, Code()));
  CARREL_ASSERT_OK(testing_world::PrefillContext(gpu_folder, "doc", *tokens, Code(), 65536,
                                                 model::Device::kCuda));
  const auto cpu_store = kvstore::Store::Open(cpu_folder, kvstore::StoreMode::kReadOnly);
  const auto gpu_store = kvstore::Store::Open(gpu_folder, kvstore::StoreMode::kReadOnly);
  CARREL_ASSERT_OK(cpu_store);
  CARREL_ASSERT_OK(gpu_store);
  const auto cpu = (*cpu_store)->OpenContext("doc"), gpu = (*gpu_store)->OpenContext("doc");
  CARREL_ASSERT_OK(cpu);
  CARREL_ASSERT_OK(gpu);
  const AttentionShape shape = testing_world::DemoCheckpoint().config.shape;
  double worst = 0;
  for (Layer layer(0); layer.value() < shape.layers; layer = layer.next()) {
    for (const bool keys : {true, false}) {
      for (KvHead head(0); head.value() < shape.kv_heads; head = head.next()) {
        std::vector<std::vector<float>> values;
        for (const auto& context : {*cpu, *gpu}) {
          const auto rows = keys ? kvstore::Rows::OpenKeys(*context, layer, head)
                                 : kvstore::Rows::OpenValues(*context, layer, head);
          CARREL_ASSERT_OK(rows);
          CARREL_ASSERT_OK(rows->Verify({0, rows->count()}));
          values.emplace_back(static_cast<size_t>(rows->count() * shape.head_dim));
          WidenToFloat(DType::kBf16, rows->Address(0), rows->count() * shape.head_dim,
                       values.back().data());
        }
        const double error = RelativeError(values[1], values[0]);
        // Roundings of one layer enter the next: each adds about its own share.
        EXPECT_LE(error, 5e-3 + 1.5e-3 * layer.value())
            << (keys ? "k." : "v.") << layer << " head " << head;
        worst = std::max(worst, error);
      }
    }
  }
  std::cout << "worst relative difference of a layer's and head's rows: " << worst << std::endl;
}

TEST(GpuTest, PromptAndGeneratedTokens_LogitsAreTheCpus) {
  const std::string folder = FreshTempDir();
  ASSERT_TRUE(Prefill(folder, "registry-512"));
  const auto questions = testing_world::Questions("registry-512");
  CARREL_ASSERT_OK(questions);
  const std::vector<TokenId>& prompt = (*questions)[0].prompt;
  const auto model_only_cpu = Logits(EmbeddedDecoder::ModelOnly(), prompt);
  const auto model_only_gpu = Logits(EmbeddedDecoder::ModelOnly(Cuda()), prompt);
  CARREL_ASSERT_OK(model_only_cpu);
  CARREL_ASSERT_OK(model_only_gpu);
  EXPECT_LE(RelativeError(*model_only_gpu, *model_only_cpu), 2e-2);
  for (const decoder::Want want :
       {decoder::Want::kAttend, decoder::Want::kValues, decoder::Want::kRows}) {
    for (const decoder::Prefetch prefetch :
         {decoder::Prefetch::kOff, decoder::Prefetch::kSpeculative, decoder::Prefetch::kVerified}) {
      RetrievalConfig config;
      config.top_k = 100;
      config.want = want;
      config.prefetch = prefetch;
      const auto cpu = Logits(EmbeddedDecoder::Open(folder, "doc", config), prompt);
      const auto gpu = Logits(EmbeddedDecoder::Open(folder, "doc", config, Cuda()), prompt);
      CARREL_ASSERT_OK(cpu);
      CARREL_ASSERT_OK(gpu);
      EXPECT_LE(RelativeError(*gpu, *cpu), 2e-2)
          << "want " << static_cast<int>(want) << " prefetch " << static_cast<int>(prefetch);
    }
  }
  DeviceConfig zone_here = Cuda();
  zone_here.zone_on_device = true;
  const auto at_store = Logits(EmbeddedDecoder::Open(folder, "doc", All(), Cuda()), prompt);
  const auto here = Logits(EmbeddedDecoder::Open(folder, "doc", All(), zone_here), prompt);
  CARREL_ASSERT_OK(at_store);
  CARREL_ASSERT_OK(here);
  EXPECT_LE(RelativeError(*here, *at_store), 1e-2);
}

TEST(GpuTest, SequencesOneAfterAnother_SameTokens) {
  const std::string folder = FreshTempDir();
  ASSERT_TRUE(Prefill(folder, "registry-512"));
  const auto questions = testing_world::Questions("registry-512");
  CARREL_ASSERT_OK(questions);
  auto decoder = EmbeddedDecoder::Open(folder, "doc", RetrievalConfig(), Cuda());
  CARREL_ASSERT_OK(decoder);
  const auto once = testing_world::AnswerAll(*(*decoder)->operator->(), *questions);
  const auto again = testing_world::AnswerAll(*(*decoder)->operator->(), *questions);
  CARREL_ASSERT_OK(once);
  CARREL_ASSERT_OK(again);
  EXPECT_EQ(*once, *again);
}

TEST(GpuTest, Answers_EqualDenseDecoding) {
  for (const std::string document : {"registry-8k", "registry-32k"}) {
    const std::string folder = FreshTempDir();
    if (!Prefill(folder, document))
      GTEST_SKIP() << document
                   << " is not here: set CARREL_SHARED to the folder that has demo/docs";
    EXPECT_GE(EqualToDense(folder, document, All(), Cuda(), "every row"), 46);
    EXPECT_GE(EqualToDense(folder, document, RetrievalConfig(), Cuda(), "top 128"), 46);
    RetrievalConfig ahead;
    ahead.prefetch = decoder::Prefetch::kSpeculative;
    EXPECT_GE(EqualToDense(folder, document, ahead, Cuda(), "top 128, speculative"), 45);
    ahead.want = decoder::Want::kRows;
    EXPECT_GE(EqualToDense(folder, document, ahead, Cuda(), "top 128, speculative, rows"), 45);
    DeviceConfig zone_here = Cuda();
    zone_here.zone_on_device = true;
    EXPECT_GE(EqualToDense(folder, document, All(), zone_here, "every row, zone on the device"),
              46);
    RetrievalConfig codes;
    codes.top_k = 512;
    codes.oversample = 4;
    EXPECT_GE(
        EqualToDense(folder, document, codes, zone_here, "2,048 rows by code, zone on the device"),
        40);
  }
}

TEST(GpuTest, TooLittleMemoryOrRoom_IsRefused) {
  const std::string folder = FreshTempDir();
  ASSERT_TRUE(Prefill(folder, "registry-512"));
  DeviceConfig device = Cuda();
  device.gpu_memory = 1 << 20;
  EXPECT_THAT(EmbeddedDecoder::Open(folder, "doc", RetrievalConfig(), device),
              StatusIs(absl::StatusCode::kResourceExhausted, "gpu_memory=1048576"));
  device = Cuda();
  device.new_tokens = 4;
  auto decoder = EmbeddedDecoder::Open(folder, "doc", RetrievalConfig(), device);
  CARREL_ASSERT_OK(decoder);
  EXPECT_THAT((**decoder)->Generate({5, 6, 7, 8, 9}, decoder::GenerateOptions()),
              StatusIs(absl::StatusCode::kResourceExhausted, "4 new tokens"));
  device.zone_on_device = true;
  RetrievalConfig ahead;
  ahead.prefetch = decoder::Prefetch::kSpeculative;
  EXPECT_THAT(EmbeddedDecoder::Open(folder, "doc", ahead, device),
              StatusIs(absl::StatusCode::kInvalidArgument, "prefetch"));
}

TEST(GpuTest, MemoryUse_IsWhatWasPlanned) {
  const std::string folder = FreshTempDir();
  ASSERT_TRUE(Prefill(folder, "registry-512"));
  auto decoder = EmbeddedDecoder::Open(folder, "doc", RetrievalConfig(), Cuda());
  CARREL_ASSERT_OK(decoder);
  const decoder::Statistics statistics = (**decoder)->statistics();
  EXPECT_GT(statistics.weight_bytes, 0);
  EXPECT_GT(statistics.device_bytes, statistics.weight_bytes + statistics.window_bytes);
  // The same bound, to the byte, is enough.
  DeviceConfig device = Cuda();
  device.gpu_memory = statistics.device_bytes;
  CARREL_EXPECT_OK(EmbeddedDecoder::Open(folder, "doc", RetrievalConfig(), device));
}

}  // namespace
}  // namespace carrel
