// Sequences that a GPU decodes together: of different contexts, lengths and zones. Each gets the tokens, and the
// logits bit for bit, that it gets alone, whoever joins, leaves or fails; weights lie there once.
#include <filesystem>
#include <random>
#include <thread>

#include "common/test_util.h"
#include "decoder/generation.h"
#include "kvstore/index/index.h"
#include "model/cuda_weights.h"
#include "model/device.h"
#include "tests/world.h"

namespace carrel {
namespace {

using decoder::GenerateOptions;
using decoder::GenerateResult;
using decoder::Generation;
using decoder::RetrievalConfig;
using testing_world::EmbeddedDecoder;

// Under compute-sanitizer fewer sequences, which are shorter.
const bool kBrief = UnderComputeSanitizer();

decoder::DeviceConfig Cuda() {
  decoder::DeviceConfig device;
  device.device = model::Device::kCuda;
  return device;
}

// Ways to retrieve in turn: at the store, on the device and in this host's memory; what is asked ahead goes alone
// within the same call.
RetrievalConfig ConfigOf(int64_t i, std::mt19937_64& rng) {
  RetrievalConfig config;
  config.selection = select::TopK{static_cast<int64_t>(16 + 8 * (rng() % 8))};
  config.dense_layers = static_cast<int32_t>(rng() % 3);
  const auto method = [](const char* name) { return *decoder::ParseSelector(name); };
  switch (i % 10) {
    case 0:
      config.zone = decoder::DeviceZoneOptions{method("exact")};
      break;
    case 1:
      config.zone = decoder::HostZoneOptions{method("hash:query=signs"), {}};
      break;
    case 2:
      break;  // the store's
    case 3:
      config.zone = decoder::DeviceZoneOptions{method("hash")};
      break;
    case 4:
      config.zone = decoder::HostZoneOptions{method("hash"), {.bytes = 1 << 20}};
      config.selection = select::TopK{32};
      break;
    case 5:
      config.selection = select::All();
      break;
    case 8:  // rows are packed
      config.zone = decoder::HostZoneOptions{method("hash:oversample=1"), {}};
      break;
    case 9:
      config.zone = decoder::HostZoneOptions{method("hash:oversample=1"), {.bytes = 1 << 20}};
      config.selection = select::TopK{32};
      break;
    case 6:
      config.zone = decoder::HostZoneOptions{method("hash"), {.bytes = 1 << 20}};
      config.selection = select::TopK{32};
      config.prefetch = decoder::Prefetch::kSpeculative;
      break;
    default:
      config.zone = decoder::DeviceZoneOptions{method("hip")};
      break;
  }
  return config;
}

// Refuses queries from some on.
class FailingStore final : public retrieval::Session {
 public:
  FailingStore(std::unique_ptr<retrieval::Session> store, int64_t* left)
      : store_(std::move(store)), left_(left) {}
  absl::StatusOr<retrieval::Opened> Open(const retrieval::OpenRequest& open) override {
    return store_->Open(open);
  }
  absl::StatusOr<retrieval::RequestId> Send(retrieval::Query query) override {
    if (--*left_ < 0) return absl::ResourceExhaustedError("the store has enough of it");
    return store_->Send(std::move(query));
  }
  absl::StatusOr<retrieval::RequestId> Send(retrieval::Fetch fetch) override {
    return store_->Send(std::move(fetch));
  }
  absl::StatusOr<retrieval::Part> Next(retrieval::RequestId id) override {
    return store_->Next(id);
  }
  void Forget(retrieval::RequestId id) override { store_->Forget(id); }
  bool broken() const override { return store_->broken(); }
  int64_t bytes_sent() const override { return store_->bytes_sent(); }
  int64_t bytes_received() const override { return store_->bytes_received(); }

 private:
  const std::unique_ptr<retrieval::Session> store_;
  int64_t* const left_;
};

class TogetherGpuTest : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = FreshTempDir();
    const auto tokens = testing_world::DocumentTokens("registry-512");
    CARREL_ASSERT_OK(tokens);
    kvstore::IndexParams code;
    code.kind = kvstore::IndexKind::kCode;
    for (const char* name : {"whole", "half"}) {
      std::vector<TokenId> some = *tokens;
      if (name[0] == 'h') some.resize(some.size() / 2 + rng_() % 64);
      CARREL_ASSERT_OK(testing_world::PrefillContext(folder_, name, some, code));
    }
    const auto questions = testing_world::Questions("registry-512");
    CARREL_ASSERT_OK(questions);
    questions_ = *questions;
  }

  // One more sequence, and what it gets alone.
  void Add(const RetrievalConfig& config, const testing_world::StoreClientWrapper& wrap = nullptr) {
    const auto i = static_cast<int64_t>(decoders_.size());
    auto decoder =
        EmbeddedDecoder::Open(folder_, i % 3 == 0 ? "half" : "whole", config, Cuda(), wrap);
    CARREL_ASSERT_OK(decoder);
    decoders_.push_back(*std::move(decoder));
    prompts_.push_back(questions_[static_cast<size_t>(i) % questions_.size()].prompt);
    prompts_.back().resize(std::min(prompts_.back().size(), 2 + rng_() % 40));
    GenerateOptions options;
    options.max_tokens = kBrief ? 3 : static_cast<int64_t>(4 + rng_() % 30);
    options.keep_logits = true;
    options.ignore_eos = true;
    options.sampling.temperature = i % 2 == 0 ? 0 : 1;
    options.sampling.seed = rng_();
    options_.push_back(options);
    const auto alone = decoders_.back()->operator->()->Generate(prompts_.back(), options);
    CARREL_ASSERT_OK(alone);
    alone_.push_back(*alone);
  }

  absl::StatusOr<Generation> Begin(size_t i) {
    return Generation::Begin(*decoders_[i]->operator->(), prompts_[i], options_[i]);
  }

  // All of them, from the first token on; each waits now and then, one time of `waits`.
  std::vector<Generation> RunAll(uint64_t waits) {
    std::vector<Generation> generations;
    for (size_t i = 0; i < decoders_.size(); ++i) {
      auto generation = Begin(i);
      CARREL_EXPECT_OK(generation);
      generations.push_back(*std::move(generation));
    }
    for (bool all_done = false; !all_done;) {
      std::vector<Generation*> ready;
      all_done = true;
      for (Generation& one : generations) {
        if (one.done()) continue;
        all_done = false;
        if (waits > 0 && rng_() % waits == 0) continue;
        if (one.reading_prompt() && rng_() % 2 == 0) {
          CARREL_EXPECT_OK(one.Step());
        } else {
          ready.push_back(&one);  // prompts beside answers
        }
      }
      for (const absl::Status& status : Generation::Step(ready)) CARREL_EXPECT_OK(status);
    }
    return generations;
  }

  void ExpectAsAlone(size_t i, const GenerateResult& result) {
    EXPECT_EQ(result.ids, alone_[i].ids) << "sequence " << i;
    EXPECT_TRUE(result.logits == alone_[i].logits) << "sequence " << i;
    EXPECT_EQ(result.stop, alone_[i].stop) << "sequence " << i;
    EXPECT_EQ(result.steps, alone_[i].steps) << "sequence " << i;
  }

  std::mt19937_64 rng_{TestSeed()};
  std::string folder_;
  std::vector<testing_world::Question> questions_;
  std::vector<std::unique_ptr<EmbeddedDecoder>> decoders_;
  std::vector<std::vector<TokenId>> prompts_;
  std::vector<GenerateOptions> options_;
  std::vector<GenerateResult> alone_;
};

TEST_F(TogetherGpuTest, JoiningAndLeaving_EachHasTheBitsOfBeingAlone) {
  const int64_t sequences = kBrief ? 8 : 37;  // more than go at once
  for (int64_t i = 0; i < sequences; ++i) Add(ConfigOf(i, rng_));
  std::vector<Generation> generations = RunAll(4);
  for (size_t i = 0; i < generations.size(); ++i) ExpectAsAlone(i, generations[i].TakeResult());
}

// The same ones step after step become a graph.
TEST_F(TogetherGpuTest, TheSameStepAfterStep_HaveTheBitsOfBeingAlone) {
  const int64_t zones[] = {0, 1, 3, 4, 8, 9, 0, 1, 3, 8, 9};
  for (const int64_t zone : zones) {
    Add(ConfigOf(zone, rng_));
    options_.back().max_tokens = kBrief ? 12 : 40;
    const auto alone = decoders_.back()->operator->()->Generate(prompts_.back(), options_.back());
    CARREL_ASSERT_OK(alone);
    alone_.back() = *alone;
  }
  std::vector<Generation> generations = RunAll(0);
  for (size_t i = 0; i < generations.size(); ++i) ExpectAsAlone(i, generations[i].TakeResult());
}

TEST_F(TogetherGpuTest, AStoreFails_TheOthersGoOn) {
  int64_t left = INT64_MAX;
  for (int64_t i = 0; i < 4; ++i) {
    Add(ConfigOf(i == 1 ? 2 : i, rng_), [&](auto client) -> std::unique_ptr<retrieval::Session> {
      if (i != 1) return client;
      return std::make_unique<FailingStore>(std::move(client), &left);
    });
  }
  std::vector<Generation> generations;
  for (size_t i = 0; i < decoders_.size(); ++i) {
    auto generation = Begin(i);
    CARREL_ASSERT_OK(generation);
    generations.push_back(*std::move(generation));
    while (generations[i].reading_prompt()) CARREL_ASSERT_OK(generations[i].Step());
  }
  left = static_cast<int64_t>(rng_() % 5);
  absl::Status failed;
  for (;;) {
    std::vector<Generation*> ready;
    for (Generation& one : generations) {
      if (!one.done() && (&one != &generations[1] || failed.ok())) ready.push_back(&one);
    }
    if (ready.empty()) break;
    const std::vector<absl::Status> statuses = Generation::Step(ready);
    for (size_t j = 0; j < ready.size(); ++j) {
      if (ready[j] == &generations[1]) {
        failed = statuses[j];
      } else {
        CARREL_ASSERT_OK(statuses[j]);
      }
    }
  }
  EXPECT_THAT(failed, StatusIs(absl::StatusCode::kResourceExhausted, "enough of it"));
  for (const size_t i : {0, 2, 3}) ExpectAsAlone(i, generations[i].TakeResult());
  // And its decoder answers again.
  left = INT64_MAX;
  const auto again = decoders_[1]->operator->()->Generate(prompts_[1], options_[1]);
  CARREL_ASSERT_OK(again);
  ExpectAsAlone(1, *again);
}

TEST_F(TogetherGpuTest, NoRoomInOnesWindow_TheOthersGoOn) {
  RetrievalConfig config;
  decoder::DeviceConfig small = Cuda();
  small.new_tokens = 8;
  for (int64_t i = 0; i < 3; ++i) Add(ConfigOf(i, rng_));
  auto decoder = EmbeddedDecoder::Open(folder_, "whole", config, small);
  CARREL_ASSERT_OK(decoder);
  GenerateOptions options;
  options.ignore_eos = true;
  auto full = Generation::Begin(*(*decoder)->operator->(), {5, 6, 7}, options);
  CARREL_ASSERT_OK(full);
  CARREL_ASSERT_OK(full->Step());
  auto other = Begin(0);
  CARREL_ASSERT_OK(other);
  while (other->reading_prompt()) CARREL_ASSERT_OK(other->Step());
  absl::Status status;
  while (!other->done()) {
    std::vector<Generation*> ready = {&*other};
    if (status.ok()) ready.push_back(&*full);
    const std::vector<absl::Status> statuses = Generation::Step(ready);
    CARREL_ASSERT_OK(statuses[0]);
    if (ready.size() > 1) status = statuses[1];
    if (!status.ok()) break;
  }
  while (!other->done()) CARREL_ASSERT_OK(other->Step());
  if (alone_[0].steps > 5) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kResourceExhausted, "8 new tokens"));
  }
  ExpectAsAlone(0, other->TakeResult());
}

TEST_F(TogetherGpuTest, OneIsNotWantedAnyMore_TheOthersGoOn) {
  for (int64_t i = 0; i < 3; ++i) Add(ConfigOf(i, rng_));
  options_[1].max_tokens = 8;  // not done before nobody wants it
  int64_t looks = 4;
  options_[1].wanted = [&looks] { return --looks > 0; };
  std::vector<Generation> generations;
  for (size_t i = 0; i < 3; ++i) {
    auto generation = Begin(i);
    CARREL_ASSERT_OK(generation);
    generations.push_back(*std::move(generation));
  }
  absl::Status cancelled;
  const auto goes_on = [&](const Generation& one) {
    return !one.done() && (&one != &generations[1] || cancelled.ok());
  };
  const auto take = [&](const Generation* one, const absl::Status& status) {
    if (one == &generations[1]) {
      cancelled = status;
    } else {
      CARREL_EXPECT_OK(status);
    }
  };
  for (bool more = true; more;) {
    std::vector<Generation*> ready;
    for (Generation& one : generations) {
      if (goes_on(one) && one.reading_prompt()) take(&one, one.Step());
      if (goes_on(one) && !one.reading_prompt()) ready.push_back(&one);
    }
    const std::vector<absl::Status> statuses = Generation::Step(ready);
    for (size_t j = 0; j < ready.size(); ++j) take(ready[j], statuses[j]);
    more = std::any_of(generations.begin(), generations.end(), goes_on);
  }
  EXPECT_THAT(cancelled, StatusIs(absl::StatusCode::kCancelled, "nobody wants the answer"));
  for (const size_t i : {0, 2}) ExpectAsAlone(i, generations[i].TakeResult());
}

// Of sequences over the same content the second takes a window and little else.
TEST(SharedZoneGpuTest, OfOneContent_RowsAndCodesLieThereOnce) {
  const std::string folder = FreshTempDir();
  const auto tokens = testing_world::DocumentTokens("registry-512");
  CARREL_ASSERT_OK(tokens);
  CARREL_ASSERT_OK(testing_world::PrefillContext(folder, "doc", *tokens, kvstore::IndexParams()));
  const AttentionShape& shape = testing_world::DemoCheckpoint().config.shape;
  RetrievalConfig config;
  config.selection = select::TopK{32};
  for (const bool host : {false, true}) {
    const decoder::SelectorConfig hash = *decoder::ParseSelector("hash");
    if (host) {
      config.zone = decoder::HostZoneOptions{hash, {}};
    } else {
      config.zone = decoder::DeviceZoneOptions{hash};
    }
    const int64_t nothing = model::GpuReservation::all();
    auto first = EmbeddedDecoder::Open(folder, "doc", config, Cuda());
    CARREL_ASSERT_OK(first);
    const int64_t one = model::GpuReservation::all() - nothing;
    EXPECT_EQ(one, (**first)->statistics().device_bytes);
    auto second = EmbeddedDecoder::Open(folder, "doc", config, Cuda());
    CARREL_ASSERT_OK(second);
    const int64_t more = model::GpuReservation::all() - nothing - one;
    const auto weights = (**first)->statistics().weight_bytes;
    const int64_t codes = int64_t{shape.kv_heads} * (shape.layers - config.dense_layers) * 400 * 16;
    EXPECT_LT(more, one - weights - codes) << "host " << host;
    // The second outlives the first, and answers.
    first->reset();
    GenerateOptions options;
    options.max_tokens = 4;
    CARREL_EXPECT_OK((**second)->Generate({5, 6, 7}, options));
    second->reset();
    EXPECT_EQ(model::GpuReservation::all(), nothing);
  }
}

TEST(SharedWeightsGpuTest, OfOneCheckpoint_LieOnTheDeviceOnce) {
  const model::Checkpoint& checkpoint = testing_world::DemoCheckpoint();
  const auto shared = [&] {
    return model::CudaWeights::Shared(checkpoint.config, checkpoint.weights, testing_world::Pool(),
                                      checkpoint.adapter);
  };
  const int64_t bytes = model::CudaWeights::Bytes(checkpoint.config);
  const auto bytes_now = [&] {
    return model::CudaWeights::SharedBytes(checkpoint.config, checkpoint.weights,
                                           checkpoint.adapter);
  };
  const int64_t before = model::GpuReservation::all();
  EXPECT_EQ(bytes_now(), bytes);
  {
    std::vector<std::shared_ptr<const model::CudaWeights>> held(4);
    std::vector<std::thread> threads;
    for (auto& one : held) {
      threads.emplace_back([&one, &shared] {
        auto weights = shared();
        CARREL_ASSERT_OK(weights);
        one = *std::move(weights);
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const auto& one : held) EXPECT_EQ(one, held[0]);
    EXPECT_EQ(model::GpuReservation::all(), before + bytes);
    EXPECT_EQ(bytes_now(), 0);
    // Another's config turns otherwise, and is another model.
    model::ModelConfig other = checkpoint.config;
    other.rope.theta *= 2;
    const auto turned = model::CudaWeights::Shared(other, checkpoint.weights, testing_world::Pool(),
                                                   checkpoint.adapter);
    CARREL_ASSERT_OK(turned);
    EXPECT_NE(*turned, held[0]);
  }
  EXPECT_EQ(model::GpuReservation::all(), before);
  EXPECT_EQ(bytes_now(), bytes);
}

TEST(SharedWeightsGpuTest, ABoundOnMemory_CountsWhatIsSharedOnce) {
  auto first = EmbeddedDecoder::ModelOnly(Cuda());
  CARREL_ASSERT_OK(first);
  const decoder::Statistics statistics = (**first)->statistics();
  EXPECT_GT(statistics.shared_bytes, statistics.weight_bytes);  // and what steps need
  EXPECT_EQ(model::GpuReservation::all(), statistics.device_bytes);
  const int64_t own = statistics.device_bytes - statistics.shared_bytes;
  decoder::DeviceConfig device = Cuda();
  device.gpu_memory = statistics.device_bytes + own;
  {
    auto second = EmbeddedDecoder::ModelOnly(device);
    CARREL_ASSERT_OK(second);
    EXPECT_THAT(EmbeddedDecoder::ModelOnly(device),
                StatusIs(absl::StatusCode::kResourceExhausted, "gpu_memory="));
  }
  CARREL_EXPECT_OK(EmbeddedDecoder::ModelOnly(device));
}

}  // namespace
}  // namespace carrel
