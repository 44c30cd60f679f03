// The whole way on a GPU: prefill there, rows that a CPU reads, decoding there, every way to
// retrieve.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <thread>

#include "absl/strings/str_cat.h"
#include "carrel/v1/context.pb.h"
#include "common/dtype.h"
#include "common/test_util.h"
#include "kvstore/index/rows/rows.h"
#include "kvstore/index/rows/stored_queries.h"
#include "kvstore/storage/store.h"
#include "model/safetensors.h"
#include "prefill/prefill.h"
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

// Under compute-sanitizer tests take a short document, a few tokens of one question, which make no
// answer, and of configurations that start the same kernels one.
const bool kBrief = UnderComputeSanitizer();

absl::StatusOr<std::vector<testing_world::Question>> Questions(const std::string& document) {
  auto questions = testing_world::Questions(document);
  if (!kBrief || !questions.ok()) return questions;
  questions->resize(1);
  std::vector<TokenId>& prompt = (*questions)[0].prompt;
  prompt.resize(std::min<size_t>(prompt.size(), 6));
  return questions;
}

decoder::GenerateOptions Tokens(int64_t max_tokens) {
  decoder::GenerateOptions options;
  options.max_tokens = kBrief ? 2 : max_tokens;
  return options;
}

decoder::GenerateOptions WithLogits() {
  decoder::GenerateOptions options = Tokens(8);
  options.keep_logits = true;
  options.ignore_eos = true;
  return options;
}

absl::StatusOr<std::vector<std::vector<TokenId>>> Answers(
    decoder::Decoder& decoder, const std::vector<testing_world::Question>& questions) {
  return testing_world::AnswerAll(decoder, questions, Tokens(64));
}

// Answers unlike those of dense decoding, among all questions.
int64_t UnlikeDense(const std::string& folder, const std::string& document,
                    const RetrievalConfig& config, const DeviceConfig& device,
                    const std::string& what) {
  auto questions = Questions(document);
  CARREL_EXPECT_OK(questions);
  auto decoder = EmbeddedDecoder::Open(folder, "doc", config, device);
  CARREL_EXPECT_OK(decoder);
  if (!questions.ok() || !decoder.ok()) return 0;
  const auto answers = Answers(*(*decoder)->operator->(), *questions);
  CARREL_EXPECT_OK(answers);
  if (!answers.ok()) return 0;
  int64_t unlike = 0;
  for (size_t i = 0; i < questions->size(); ++i)
    unlike += (*answers)[i] != (*questions)[i].dense_ids;
  std::cout << document << ", " << what << ": " << unlike << " of " << questions->size()
            << " unlike dense" << std::endl;
  return unlike;
}

RetrievalConfig All() {
  RetrievalConfig config;
  config.selection = select::All();
  return config;
}

// For a zone on the device, whose prompts choose as those of other places do.
RetrievalConfig Selected(const std::string& method, const select::Selection& selection) {
  RetrievalConfig config;
  config.prompt_rows = decoder::PromptRows::kChosen;
  config.selection = selection;
  config.zone = decoder::DeviceZoneOptions{*decoder::ParseSelector(method)};
  return config;
}

// The same with the zone in this host's memory.
RetrievalConfig InHost(RetrievalConfig config, const decoder::BankConfig& bank = {}) {
  config.zone = decoder::HostZoneOptions{*decoder::SelectorOf(config), bank};
  return config;
}

// Across whose bus no candidate's key comes twice.
RetrievalConfig OneLook(const std::string& method, const select::Selection& selection) {
  RetrievalConfig config = Selected(method, selection);
  config.zone =
      decoder::DeviceZoneOptions{decoder::WithOversample(*decoder::ParseSelector(method), 1)};
  return config;
}

absl::StatusOr<std::vector<float>> Logits(absl::StatusOr<std::unique_ptr<EmbeddedDecoder>> decoder,
                                          const std::vector<TokenId>& prompt) {
  if (!decoder.ok()) return decoder.status();
  auto result = (**decoder)->Generate(prompt, WithLogits());
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
  double worst = 0, worst_drift = 0;
  for (Layer layer(0); layer.value() < shape.layers; layer = layer.next()) {
    const auto cpu_drift = kvstore::ReadQueryDrift(**cpu, layer);
    const auto gpu_drift = kvstore::ReadQueryDrift(**gpu, layer);
    CARREL_ASSERT_OK(cpu_drift);
    CARREL_ASSERT_OK(gpu_drift);
    ASSERT_EQ(gpu_drift->empty(), layer.value() == 0);
    ASSERT_EQ(gpu_drift->size(), cpu_drift->size());
    if (layer.value() > 0) {
      const double error = RelativeError(*gpu_drift, *cpu_drift);
      EXPECT_LE(error, 5e-2) << "query drift of layer " << layer;
      worst_drift = std::max(worst_drift, error);
    }
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
  std::cout << "worst relative difference of a layer's and head's rows: " << worst
            << ", of a layer's query drift: " << worst_drift << std::endl;
}

// Of a document that attends to few of its own rows; rope kInfiniteHip stores keys before RoPE.
absl::Status PrefillSparsely(const std::string& folder, const std::vector<TokenId>& tokens,
                             prefill::AttentionConfig attention, model::Rope rope,
                             model::Device device) {
  attention.rope = rope;
  if (rope == model::Rope::kInfiniteHip) attention.key_position = prefill::KeyPosition::kNone;
  const auto store = kvstore::Store::Open(folder, kvstore::StoreMode::kReadWrite);
  if (!store.ok()) return store.status();
  prefill::PrefillConfig config;
  config.store_folder = folder;
  config.name = "doc";
  config.index.kind = kvstore::IndexKind::kFlat;
  config.summary_rows = 0;
  config.attention = attention;
  config.device = device;
  Progress progress(Progress::Mode::kQuiet);
  return prefill::RunPrefill(config, testing_world::DemoCheckpoint(), tokens, **store,
                             testing_world::Pool(), progress)
      .status();
}

// V of the last layer: what all layers before it made of the document.
std::vector<float> LastValues(const std::string& folder) {
  std::vector<float> values;
  const AttentionShape shape = testing_world::DemoCheckpoint().config.shape;
  const auto store = kvstore::Store::Open(folder, kvstore::StoreMode::kReadOnly);
  CARREL_EXPECT_OK(store);
  if (!store.ok()) return values;
  const auto context = (*store)->OpenContext("doc");
  CARREL_EXPECT_OK(context);
  for (KvHead head(0); context.ok() && head.value() < shape.kv_heads; head = head.next()) {
    const auto rows = kvstore::Rows::OpenValues(**context, Layer(shape.layers - 1), head);
    CARREL_EXPECT_OK(rows);
    if (!rows.ok()) break;
    std::vector<float> of_head(static_cast<size_t>(rows->count() * shape.head_dim));
    WidenToFloat(DType::kBf16, rows->Address(0), rows->count() * shape.head_dim, of_head.data());
    values.insert(values.end(), of_head.begin(), of_head.end());
  }
  return values;
}

// InfiniteHiP's prefill, with its own positions and the document's: what differs from the CPU's is a
// fraction of what choosing rows costs.
TEST(GpuTest, SparsePrefill_IsTheCpusWithinRounding) {
  const auto tokens = testing_world::DocumentTokens(kBrief ? "registry-2k" : "registry-8k");
  CARREL_ASSERT_OK(tokens);
  const auto values = [&](const char* attention, model::Rope rope, model::Device device) {
    const std::string folder = FreshTempDir();
    CARREL_EXPECT_OK(
        PrefillSparsely(folder, *tokens, *prefill::ParseAttention(attention), rope, device));
    return LastValues(folder);
  };
  const std::vector<float> dense = values("dense", model::Rope::kTrained, model::Device::kCpu);
  for (const model::Rope rope : {model::Rope::kTrained, model::Rope::kInfiniteHip}) {
    constexpr char kAttention[] = "infinitehip:rows=512,sink=64,window=512";
    const std::vector<float> cpu = values(kAttention, rope, model::Device::kCpu);
    const std::vector<float> gpu = values(kAttention, rope, model::Device::kCuda);
    ASSERT_EQ(cpu.size(), gpu.size());
    const double apart = RelativeError(gpu, cpu), sparse = RelativeError(cpu, dense);
    std::cout << "rope " << model::RopeName(rope) << ": V of the last layer, GPU to CPU " << apart
              << ", CPU to dense " << sparse << std::endl;
    EXPECT_GT(sparse, 0);
    EXPECT_LE(apart, 0.03);
  }
}

// Decoding at positions that attention gives: on a GPU as on the CPU, and the same bits wherever the
// rows lie.
TEST(GpuTest, PositionsOfTheirOwn_LogitsAreTheCpus) {
  const auto tokens = testing_world::DocumentTokens("registry-2k");
  CARREL_ASSERT_OK(tokens);
  const std::string folder = FreshTempDir();
  CARREL_ASSERT_OK(PrefillSparsely(folder, *tokens, *prefill::ParseAttention("infinitehip"),
                                   model::Rope::kInfiniteHip, model::Device::kCuda));
  const auto questions = Questions("registry-2k");
  CARREL_ASSERT_OK(questions);
  const std::vector<TokenId>& prompt = (*questions)[0].prompt;
  for (const select::Selection& selection :
       {select::Selection(select::All()), select::Selection(select::TopK{512})}) {
    const bool all = select::IsAll(selection);
    RetrievalConfig config = Selected("infinitehip:stages=64:1024:2/2:1x:1", selection);
    config.rope = model::Rope::kInfiniteHip;
    config.dense_layers = 0;
    const auto cpu = Logits(EmbeddedDecoder::Open(folder, "doc", InHost(config)), prompt);
    const auto gpu = Logits(EmbeddedDecoder::Open(folder, "doc", config, Cuda()), prompt);
    const auto host = Logits(EmbeddedDecoder::Open(folder, "doc", InHost(config), Cuda()), prompt);
    CARREL_ASSERT_OK(cpu);
    CARREL_ASSERT_OK(gpu);
    CARREL_ASSERT_OK(host);
    std::cout << (all ? "every row" : "512 rows") << ": logits, GPU to CPU "
              << RelativeError(*gpu, *cpu) << std::endl;
    EXPECT_LE(RelativeError(*gpu, *cpu), all ? 2e-2 : 5e-2);
    EXPECT_TRUE(*gpu == *host);
  }
}

// Every payload of a context, verified.
std::vector<std::string> Payloads(const std::string& folder) {
  std::vector<std::string> payloads;
  const auto store = kvstore::Store::Open(folder, kvstore::StoreMode::kReadOnly);
  CARREL_EXPECT_OK(store);
  if (!store.ok()) return payloads;
  const auto context = (*store)->OpenContext("doc");
  CARREL_EXPECT_OK(context);
  if (!context.ok()) return payloads;
  const AttentionShape shape = testing_world::DemoCheckpoint().config.shape;
  for (int32_t layer = 0; layer < shape.layers; ++layer) {
    for (const auto kind :
         {kvstore::Kind::kKeyRows, kvstore::Kind::kValueRows, kvstore::Kind::kSampledQueries,
          kvstore::Kind::kIndex, kvstore::Kind::kSummaries}) {
      for (KvHead head(0); head.value() < shape.kv_heads; head = head.next()) {
        const auto count = (*context)->SegmentCount(layer, kind, head);
        CARREL_EXPECT_OK(count);
        for (uint32_t i = 0; count.ok() && i < *count; ++i) {
          const auto segment = (*context)->Segment(layer, kind, head, i);
          CARREL_EXPECT_OK(segment);
          if (!segment.ok()) continue;
          const auto bytes = (*segment)->payload();
          CARREL_EXPECT_OK((*segment)->Verify(0, static_cast<int64_t>(bytes.size())));
          payloads.emplace_back(bytes.data(), bytes.size());
        }
      }
    }
    const auto drift = kvstore::ReadQueryDrift(**context, Layer(layer));
    CARREL_EXPECT_OK(drift);
    if (!drift.ok()) continue;
    payloads.emplace_back(reinterpret_cast<const char*>(drift->data()),
                          drift->size() * sizeof(float));
  }
  return payloads;
}

// The file of one layer cannot be written: the job fails there, as on a full disk, and the same
// call goes on behind the layers that were finished.
TEST(GpuTest, InterruptedPrefill_GoesOnToTheSameBytes) {
  const auto tokens = testing_world::DocumentTokens(kBrief ? "registry-2k" : "registry-8k");
  CARREL_ASSERT_OK(tokens);
  const std::string folder = FreshTempDir(), calm = folder + "/calm", torn = folder + "/torn";
  const auto run = [&](const std::string& store_folder) -> absl::StatusOr<prefill::PrefillReport> {
    auto store = kvstore::Store::Open(store_folder, kvstore::StoreMode::kReadWrite);
    if (!store.ok()) return store.status();
    prefill::PrefillConfig config;
    config.store_folder = store_folder;
    config.name = "doc";
    config.index = Code();
    config.device = model::Device::kCuda;
    config.hidden_interval_s = 0;
    Progress progress(Progress::Mode::kQuiet);
    return prefill::RunPrefill(config, testing_world::DemoCheckpoint(), *tokens, **store,
                               testing_world::Pool(), progress);
  };
  CARREL_ASSERT_OK(run(calm));

  constexpr int kTornLayer = 4;
  const std::string staging = torn + "/prefill/doc";
  const std::string in_the_way = absl::StrCat(staging, "/layer-000", kTornLayer, ".sst/x");
  std::thread tear([&] {
    // The job is written first, and the weights are loaded then.
    while (!std::filesystem::exists(staging + "/job")) std::this_thread::yield();
    std::filesystem::create_directories(in_the_way);
  });
  const auto failed = run(torn);
  tear.join();
  EXPECT_FALSE(failed.ok());
  EXPECT_THAT(std::string(failed.status().message()), testing::HasSubstr("layer-0004.sst"));
  EXPECT_TRUE(Payloads(calm).size() > 0);
  std::filesystem::remove_all(std::filesystem::path(in_the_way).parent_path());

  const auto resumed = run(torn);
  CARREL_ASSERT_OK(resumed);
  EXPECT_GE(resumed->resumed_layers, 1);
  EXPECT_LE(resumed->resumed_layers, kTornLayer);
  EXPECT_TRUE(Payloads(torn) == Payloads(calm)) << "other bytes";
}

TEST(GpuTest, PromptAndGeneratedTokens_LogitsAreTheCpus) {
  const std::string folder = FreshTempDir();
  ASSERT_TRUE(Prefill(folder, "registry-512"));
  const auto questions = Questions("registry-512");
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
      config.selection = select::TopK{100};
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
  const auto at_store = Logits(EmbeddedDecoder::Open(folder, "doc", All(), Cuda()), prompt);
  const auto here =
      Logits(EmbeddedDecoder::Open(folder, "doc", Selected("hash", select::All()), Cuda()), prompt);
  CARREL_ASSERT_OK(at_store);
  CARREL_ASSERT_OK(here);
  EXPECT_LE(RelativeError(*here, *at_store), 1e-2);
}

// Summaries of the rest, and what they may at most weigh, as on the CPU.
TEST(GpuTest, EstimationTermOnTheGpu_IsTheCpus) {
  const std::string folder = FreshTempDir();
  ASSERT_TRUE(Prefill(folder, "registry-512"));
  const auto questions = Questions("registry-512");
  CARREL_ASSERT_OK(questions);
  const std::vector<TokenId>& prompt = (*questions)[0].prompt;
  RetrievalConfig config = Selected("exact", select::TopK{12});
  config.dense_layers = 0;
  const auto of = [&](const RetrievalConfig& placed, const DeviceConfig& device) {
    return Logits(EmbeddedDecoder::Open(folder, "doc", placed, device), prompt);
  };
  const auto dense = Logits(EmbeddedDecoder::Open(folder, "doc", All()), prompt);
  CARREL_ASSERT_OK(dense);
  config.estimate = decoder::Estimate::kOff;
  const auto without = of(config, Cuda());
  CARREL_ASSERT_OK(without);
  config.estimate = decoder::Estimate::kOn;
  const auto cpu = of(InHost(config), DeviceConfig());
  CARREL_ASSERT_OK(cpu);
  for (const RetrievalConfig& placed : {config, InHost(config)}) {
    const auto gpu = of(placed, Cuda());
    CARREL_ASSERT_OK(gpu);
    EXPECT_LE(RelativeError(*gpu, *cpu), 2e-2);
    EXPECT_LT(RelativeError(*gpu, *dense), RelativeError(*without, *dense));
  }
}

// Predicted queries are corrected alike: by the context's drift in the prompt, by the running mean
// while an answer is generated.
TEST(GpuTest, SpeculativeQueries_AreAsNearAsTheCpus) {
  const std::string folder = FreshTempDir();
  ASSERT_TRUE(Prefill(folder, "registry-2k"));
  auto questions = testing_world::Questions("registry-2k");
  CARREL_ASSERT_OK(questions);
  questions->resize(std::min<size_t>(questions->size(), kBrief ? 1 : 6));
  RetrievalConfig config;
  config.selection = select::TopK{100};
  config.want = decoder::Want::kRows;
  config.prefetch = decoder::Prefetch::kSpeculative;
  config.measure = true;
  std::vector<std::vector<decoder::LayerStatistics>> layers;
  for (const DeviceConfig& device : {DeviceConfig(), Cuda()}) {
    auto decoder = EmbeddedDecoder::Open(folder, "doc", config, device);
    CARREL_ASSERT_OK(decoder);
    CARREL_ASSERT_OK(testing_world::AnswerAll(*(*decoder)->operator->(), *questions));
    layers.push_back((*decoder)->operator->()->statistics().layers);
  }
  for (size_t l = 0; l < layers[0].size(); ++l) {
    const decoder::LayerStatistics &cpu = layers[0][l], &gpu = layers[1][l];
    EXPECT_EQ(gpu.cosine.count > 0, cpu.cosine.count > 0) << "layer " << l;
    EXPECT_NEAR(gpu.cosine.value(), cpu.cosine.value(), 0.01) << "layer " << l;
    EXPECT_NEAR(gpu.hit_rate.value(), cpu.hit_rate.value(), 0.02) << "layer " << l;
  }
}

// A bank decides where a row is read, never which: the same bits as with the zone on the device.
TEST(GpuTest, ZoneInHostMemory_GivesTheBitsOfZoneOnDevice) {
  const std::string folder = FreshTempDir();
  ASSERT_TRUE(Prefill(folder, "registry-512"));
  const auto questions = Questions("registry-512");
  CARREL_ASSERT_OK(questions);
  const std::vector<TokenId>& prompt = (*questions)[0].prompt;
  RetrievalConfig config = OneLook("hash", select::TopK{40});
  for (const decoder::Budget budget : {decoder::Budget::kUniform, decoder::Budget::kLinear}) {
    if (kBrief && budget == decoder::Budget::kUniform) continue;
    config.budget = budget;
    config.prefetch = decoder::Prefetch::kOff;
    const auto expected = Logits(EmbeddedDecoder::Open(folder, "doc", config, Cuda()), prompt);
    CARREL_ASSERT_OK(expected);
    for (const decoder::Prefetch prefetch :
         {decoder::Prefetch::kOff, decoder::Prefetch::kSpeculative}) {
      for (const kernels::RowMap map : {kernels::RowMap::kVector, kernels::RowMap::kHash}) {
        for (const int64_t bytes : {0, 400'000, 700'000, 1'200'000, 4'000'000}) {
          SCOPED_TRACE(absl::StrCat("budget ", static_cast<int>(budget), " prefetch ",
                                    static_cast<int>(prefetch), " map ", static_cast<int>(map),
                                    " bytes ", bytes));
          if (bytes == 0 &&
              (prefetch != decoder::Prefetch::kOff || map != kernels::RowMap::kVector))
            continue;
          if (kBrief && bytes != 0 && bytes != 700'000) continue;
          config.prefetch = prefetch;
          decoder::BankConfig bank = {.bytes = bytes, .map = map};
          if (prefetch != decoder::Prefetch::kOff && bytes > 700'000) bank.ahead = 1.5;
          auto decoder = EmbeddedDecoder::Open(folder, "doc", InHost(config, bank), Cuda());
          CARREL_ASSERT_OK(decoder);
          decoder::Decoder& open = *(*decoder)->operator->();
          const auto result = open.Generate(prompt, WithLogits());
          CARREL_ASSERT_OK(result);
          EXPECT_EQ(result->logits, *expected);
          for (const decoder::LayerStatistics& layer : open.statistics().layers) {
            EXPECT_LE(layer.bank.hits, layer.bank.wanted);
            EXPECT_LE(layer.bank.foreseen, layer.bank.expected);
            if (layer.bank.wanted == 0) continue;
            EXPECT_EQ(layer.bank.wanted, layer.rows_attended);
            EXPECT_GT(layer.bank.hits, 0);
            EXPECT_EQ(layer.bank.expected > 0, layer.bank.ahead > 0);
          }
        }
      }
    }
  }
}

// Methods whose selections differ in length by head, or last for several tokens.
TEST(GpuTest, EveryMethodThroughBanks_GivesTheBitsOfZoneOnDevice) {
  const std::string folder = FreshTempDir();
  ASSERT_TRUE(Prefill(folder, "registry-512"));
  const auto questions = Questions("registry-512");
  CARREL_ASSERT_OK(questions);
  const std::vector<TokenId>& prompt = (*questions)[0].prompt;
  for (const char* method :
       {"exact", "hip:refresh=4", "infinitehip:preset=fast", "hash:codes=stored", "channels"}) {
    const RetrievalConfig config = OneLook(method, select::TopK{48});
    const auto expected = Logits(EmbeddedDecoder::Open(folder, "doc", config, Cuda()), prompt);
    CARREL_ASSERT_OK(expected);
    for (const int64_t bytes : {0, 400'000}) {
      if (kBrief && bytes == 0) continue;
      const RetrievalConfig in_host = InHost(config, {.bytes = bytes});
      const auto got = Logits(EmbeddedDecoder::Open(folder, "doc", in_host, Cuda()), prompt);
      CARREL_ASSERT_OK(got);
      EXPECT_EQ(*got, *expected) << method << ", " << bytes << " bytes of banks";
    }
  }
}

// What is chosen across a bus without a word: as on the device, where the second look attends in the same
// launch, up to the order of sums; and the same bits through any bank. KV heads take different numbers.
TEST(GpuTest, UsualMethodOfAZoneInHostMemory_IsAsOnTheDevice) {
  const std::string folder = FreshTempDir();
  ASSERT_TRUE(Prefill(folder, "registry-2k"));
  const auto questions = Questions("registry-2k");
  CARREL_ASSERT_OK(questions);
  const std::vector<TokenId>& prompt = (*questions)[0].prompt;
  RetrievalConfig config = Selected("hash", select::All());
  config.selection = decoder::FidelityOptions{.target_error = 0.2, .or_top_k = 64};
  config.dense_layers = 0;
  ASSERT_EQ(decoder::DescribeSelector(*decoder::SelectorOf(config)),
            decoder::DescribeSelector(decoder::UsualSelector(/*keys_cross_bus=*/true)));
  const auto of = [&](const RetrievalConfig& placed, int64_t* rows) {
    auto decoder = EmbeddedDecoder::Open(folder, "doc", placed, Cuda());
    CARREL_EXPECT_OK(decoder);
    if (!decoder.ok()) return std::vector<float>();
    decoder::Decoder& open = *(*decoder)->operator->();
    const auto result = open.Generate(prompt, WithLogits());
    CARREL_EXPECT_OK(result);
    *rows = 0;
    for (const decoder::LayerStatistics& layer : open.statistics().layers)
      *rows += layer.rows_attended;
    return result.ok() ? result->logits : std::vector<float>();
  };
  int64_t there = 0, here = 0, banked = 0;
  const std::vector<float> device = of(config, &there), host = of(InHost(config), &here);
  ASSERT_EQ(device.size(), host.size());
  EXPECT_LE(RelativeError(host, device), 2e-2);
  EXPECT_EQ(here, there);
  EXPECT_EQ(of(InHost(config, {.bytes = 6'000'000}), &banked), host);
  EXPECT_EQ(banked, here);
}

TEST(GpuTest, BanksThatMakeNoSense_AreRefused) {
  const std::string folder = FreshTempDir();
  ASSERT_TRUE(Prefill(folder, "registry-512"));
  const RetrievalConfig config = InHost(Selected("hash", select::TopK{40}), {.bytes = 1000});
  EXPECT_THAT(EmbeddedDecoder::Open(folder, "doc", config, Cuda()),
              StatusIs(absl::StatusCode::kInvalidArgument, "bank_bytes=1000"));
}

TEST(GpuTest, SequencesOneAfterAnother_SameTokens) {
  const std::string folder = FreshTempDir();
  ASSERT_TRUE(Prefill(folder, "registry-512"));
  const auto questions = Questions("registry-512");
  CARREL_ASSERT_OK(questions);
  auto decoder = EmbeddedDecoder::Open(folder, "doc", RetrievalConfig(), Cuda());
  CARREL_ASSERT_OK(decoder);
  const auto once = Answers(*(*decoder)->operator->(), *questions);
  const auto again = Answers(*(*decoder)->operator->(), *questions);
  CARREL_ASSERT_OK(once);
  CARREL_ASSERT_OK(again);
  EXPECT_EQ(*once, *again);
}

TEST(GpuTest, Answers_EqualDenseDecoding) {
  const auto documents = kBrief ? std::vector<std::string>{"registry-2k"}
                                : std::vector<std::string>{"registry-8k", "registry-32k"};
  for (const std::string& document : documents) {
    const std::string folder = FreshTempDir();
    if (!Prefill(folder, document))
      GTEST_SKIP() << document
                   << " is not here: set CARREL_SHARED to the folder that has demo/docs";
    EXPECT_LE(UnlikeDense(folder, document, All(), Cuda(), "every row"), 2);
    EXPECT_LE(UnlikeDense(folder, document, RetrievalConfig(), Cuda(), "top 128"), 2);
    RetrievalConfig ahead;
    ahead.prefetch = decoder::Prefetch::kSpeculative;
    EXPECT_LE(UnlikeDense(folder, document, ahead, Cuda(), "top 128, speculative"), 3);
    ahead.want = decoder::Want::kRows;
    EXPECT_LE(UnlikeDense(folder, document, ahead, Cuda(), "top 128, speculative, rows"), 3);
    // Every row is every row, whatever would choose among them.
    for (const char* method : {"exact", "hip", "infinitehip", "hash", "channels"}) {
      EXPECT_LE(UnlikeDense(folder, document, Selected(method, select::All()), Cuda(),
                            absl::StrCat("every row on the device, ", method)),
                2);
    }
    const RetrievalConfig by_code = Selected("hash", select::TopK{kBrief ? 512 : 2048});
    EXPECT_LE(UnlikeDense(folder, document, by_code, Cuda(), "rows by code, zone on the device"),
              8);
    RetrievalConfig ahead_in_host = InHost(by_code, {.bytes = 60'000'000});
    ahead_in_host.prefetch = decoder::Prefetch::kSpeculative;
    EXPECT_LE(UnlikeDense(folder, document, ahead_in_host, Cuda(),
                          "rows by code, zone in host memory, 60 MB of banks"),
              8);
  }
}

// bf16 queries and other roundings send a few questions another way.
TEST(GpuTest, MethodsOnTheDevice_AnswerAsOnTheCpu) {
  const std::string folder = FreshTempDir(), document = kBrief ? "registry-2k" : "registry-8k";
  if (!Prefill(folder, document))
    GTEST_SKIP() << document << " is not here: set CARREL_SHARED to the folder that has demo/docs";
  for (const char* method : {"exact", "hip", "hip:refresh=4", "infinitehip", "hash",
                             "hash:codes=stored", "channels", "channels:share=16"}) {
    const RetrievalConfig config = Selected(method, select::TopK{256});
    const int64_t cpu = UnlikeDense(folder, document, InHost(config), DeviceConfig(),
                                    absl::StrCat("256 rows on the CPU, ", method));
    const int64_t gpu = UnlikeDense(folder, document, config, Cuda(),
                                    absl::StrCat("256 rows on the device, ", method));
    EXPECT_NEAR(static_cast<double>(cpu), static_cast<double>(gpu), 6) << method;
  }
}

// Whatever is chosen for generated tokens: in blocks, and of one token.
TEST(GpuTest, PromptsOfAZoneOnTheDevice_AttendToEveryRow) {
  const std::string folder = FreshTempDir();
  ASSERT_TRUE(Prefill(folder, "registry-512"));
  const auto questions = Questions("registry-512");
  CARREL_ASSERT_OK(questions);
  RetrievalConfig config = Selected("exact", select::TopK{4});
  config.dense_layers = 0;
  config.estimate = decoder::Estimate::kOff;
  for (const size_t tokens : {(*questions)[0].prompt.size(), size_t{1}}) {
    std::vector<TokenId> prompt = (*questions)[0].prompt;
    prompt.resize(tokens);
    auto dense = Logits(EmbeddedDecoder::Open(folder, "doc", All()), prompt);
    CARREL_ASSERT_OK(dense);
    config.prompt_rows = decoder::PromptRows::kChosen;
    auto chosen = Logits(EmbeddedDecoder::Open(folder, "doc", config, Cuda()), prompt);
    CARREL_ASSERT_OK(chosen);
    config.prompt_rows = decoder::PromptRows::kAuto;
    auto decoder = EmbeddedDecoder::Open(folder, "doc", config, Cuda());
    CARREL_ASSERT_OK(decoder);
    auto result = (**decoder)->Generate(prompt, WithLogits());
    CARREL_ASSERT_OK(result);
    const size_t of_prompt = tokens * result->logits.size() / (tokens + result->steps);
    for (auto* logits : {&result->logits, &*dense, &*chosen}) logits->resize(of_prompt);
    EXPECT_LE(RelativeError(result->logits, *dense), 2e-2);
    EXPECT_GT(RelativeError(*chosen, *dense), 2e-2);
    const int64_t zone = (**decoder)->context_tokens() - config.sink - config.local;
    for (const decoder::LayerStatistics& layer : (**decoder)->statistics().layers) {
      EXPECT_EQ(layer.whole_tokens, static_cast<int64_t>(tokens));
      const auto heads = static_cast<double>(layer.whole_rows / (layer.whole_tokens * zone));
      EXPECT_TRUE(result->steps == 0 || RowsPerToken(layer) == 4 * heads);
    }
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
  RetrievalConfig ahead = Selected("hash", select::TopK{128});
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
  // The same bound, to the byte, is enough for one.
  decoder->reset();
  DeviceConfig device = Cuda();
  device.gpu_memory = statistics.device_bytes;
  CARREL_EXPECT_OK(EmbeddedDecoder::Open(folder, "doc", RetrievalConfig(), device));
}

}  // namespace
}  // namespace carrel
