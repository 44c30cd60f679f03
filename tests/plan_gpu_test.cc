// Plans on a GPU: the way that is taken is the fastest that was measured, its answers are those of the same way asked
// for by name, and what does not fit is not taken.
#include <memory>

#include "common/test_util.h"
#include "decoder/fidelity.h"
#include "decoder/plan/plan.h"
#include "tests/world.h"

namespace carrel {
namespace {

using decoder::Place;
using decoder::RetrievalConfig;
using testing_world::EmbeddedDecoder;

constexpr char kDocument[] = "registry-512";

decoder::DeviceConfig Cuda() {
  decoder::DeviceConfig device;
  device.device = model::Device::kCuda;
  return device;
}

std::shared_ptr<const decoder::Rates> Measured() {
  const AttentionShape& shape = testing_world::DemoCheckpoint().config.shape;
  const auto rates =
      decoder::MeasureRates(model::Device::kCuda, shape, testing_world::Pool(),
                            [](int64_t, int64_t) -> absl::StatusOr<decoder::TimedLayer> {
                              return absl::UnimplementedError("of a CPU");
                            });
  CARREL_EXPECT_OK(rates);
  return rates.ok() ? std::make_shared<const decoder::Rates>(*rates) : nullptr;
}

RetrievalConfig Balanced() {
  RetrievalConfig config;
  config.dense_layers = 0;
  config.selection = decoder::FidelityOptions{decoder::TargetError(decoder::Fidelity::kBalanced)};
  return config;
}

RetrievalConfig Planned(std::shared_ptr<const decoder::Rates> rates) {
  RetrievalConfig config = Balanced();
  decoder::PlanOptions options;
  options.rates = std::move(rates);
  options.unfit[static_cast<size_t>(Place::kHost)] = "its rows are not mapped here";
  const auto bytes = decoder::GpuMemory();
  CARREL_EXPECT_OK(bytes);
  options.device_bytes = bytes.value_or(0);
  config.plan = std::make_shared<const decoder::PlanOptions>(std::move(options));
  return config;
}

class PlanGpuTest : public testing::Test {
 protected:
  void SetUp() override {
    const auto tokens = testing_world::DocumentTokens(kDocument);
    CARREL_ASSERT_OK(tokens);
    CARREL_ASSERT_OK(testing_world::PrefillContext(folder_, "doc", *tokens, {}));
  }
  const std::string folder_ = FreshTempDir();
};

TEST_F(PlanGpuTest, WhatIsMeasured_IsPlausible) {
  const auto rates = Measured();
  ASSERT_NE(rates, nullptr);
  const double dense = rates->of({Place::kDevice, true}).Seconds(8192, 0);
  EXPECT_TRUE(rates->of({Place::kDevice, true}).measured);
  EXPECT_GT(dense, 1e-6);
  EXPECT_LT(dense, 1e-3);
  EXPECT_GT(rates->of({Place::kDevice, false}).Seconds(8192, 512), 1e-6);
}

TEST_F(PlanGpuTest, ByDefault_TheDeviceHoldsAllRows_AndAnswersAsWhenAskedFor) {
  const auto questions = testing_world::Questions(kDocument);
  CARREL_ASSERT_OK(questions);
  auto planned = EmbeddedDecoder::Open(folder_, "doc", Planned(Measured()), Cuda());
  CARREL_ASSERT_OK(planned);
  ASSERT_TRUE((**planned)->plan().has_value());
  const decoder::Plan& plan = *(**planned)->plan();
  EXPECT_EQ(decoder::WayName(plan.taken().way), "device-dense") << decoder::PlanTable(plan);
  RetrievalConfig named;
  named.selection = select::All();
  named.estimate = decoder::Estimate::kOff;
  named.zone = decoder::DeviceZoneOptions{};
  auto asked = EmbeddedDecoder::Open(folder_, "doc", named, Cuda());
  CARREL_ASSERT_OK(asked);
  const auto by_plan = testing_world::AnswerAll(*(*planned)->operator->(), *questions);
  const auto by_name = testing_world::AnswerAll(*(*asked)->operator->(), *questions);
  CARREL_ASSERT_OK(by_plan);
  CARREL_ASSERT_OK(by_name);
  EXPECT_EQ(*by_plan, *by_name);
}

TEST_F(PlanGpuTest, WithTooLittleMemory_AnotherPlaceIsTaken_AndSaysWhy) {
  decoder::DeviceConfig device = Cuda();
  {
    RetrievalConfig at_store = Balanced();
    auto decoder = EmbeddedDecoder::Open(folder_, "doc", at_store, device);
    CARREL_ASSERT_OK(decoder);
    device.gpu_memory = (**decoder)->statistics().device_bytes + 4096;
  }
  auto planned = EmbeddedDecoder::Open(folder_, "doc", Planned(Measured()), device);
  CARREL_ASSERT_OK(planned);
  const decoder::Plan& plan = *(**planned)->plan();
  EXPECT_EQ(plan.taken().way.place, Place::kStore) << decoder::PlanTable(plan);
  EXPECT_NE(plan.ways[decoder::WayIndex({Place::kDevice, true})].unfit, "");
}

}  // namespace
}  // namespace carrel
