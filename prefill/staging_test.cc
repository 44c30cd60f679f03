#include "prefill/staging.h"

#include <filesystem>
#include <fstream>

#include "carrel/v1/context.pb.h"
#include "common/test_util.h"

namespace carrel::prefill {
namespace {

TEST(StagingTest, Hidden_SurvivesAndAFlippedBitIsNoticed) {
  auto staging = Staging::Open(FreshTempDir(), "doc");
  CARREL_ASSERT_OK(staging);
  std::mt19937_64 rng(TestSeed());
  const std::vector<float> hidden = RandomNormal(rng, 1000), before = RandomNormal(rng, 70);
  CARREL_ASSERT_OK(staging->WriteHidden(Layer(3), hidden, before));
  std::vector<float> read(1000), read_before(70);
  CARREL_ASSERT_OK(staging->ReadHidden(Layer(3), read, read_before));
  EXPECT_EQ(read, hidden);
  EXPECT_EQ(read_before, before);
  std::vector<float> other_size(999);
  EXPECT_THAT(staging->ReadHidden(Layer(3), other_size, read_before),
              StatusIs(absl::StatusCode::kDataLoss, "hidden-0003"));

  std::fstream file(staging->folder() + "/hidden-0003",
                    std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(rng() % 4280));
  const int byte = file.peek();
  file.put(static_cast<char>(byte ^ 4));
  file.close();
  EXPECT_THAT(staging->ReadHidden(Layer(3), read, read_before),
              StatusIs(absl::StatusCode::kDataLoss, "SHA-256 does not match"));
  staging->DropHidden(Layer(3));
  EXPECT_THAT(staging->ReadHidden(Layer(3), read, read_before),
              StatusIs(absl::StatusCode::kNotFound, "hidden-0003"));
}

TEST(StagingTest, OnlyLayersWithSstAndFragment_AreFinished) {
  auto staging = Staging::Open(FreshTempDir(), "doc");
  CARREL_ASSERT_OK(staging);
  EXPECT_EQ(staging->FinishedLayers(4), 0);
  for (int layer : {0, 1, 3}) {
    std::ofstream(staging->SstPath(Layer(layer))) << "x";
    CARREL_ASSERT_OK(staging->WriteFragment(Layer(layer), v1::Manifest()));
  }
  EXPECT_EQ(staging->FinishedLayers(4), 2);
  std::filesystem::remove(staging->SstPath(Layer(1)));
  EXPECT_EQ(staging->FinishedLayers(4), 1);
}

TEST(StagingTest, PartsOfALayer_AreListedUpToAGapAndAllRemoved) {
  auto staging = Staging::Open(FreshTempDir(), "doc");
  CARREL_ASSERT_OK(staging);
  const Layer layer(2);
  EXPECT_EQ(staging->SstPaths(layer).size(), 1u);
  for (int part : {0, 1, 3}) std::ofstream(staging->SstPartPath(layer, part)) << "x";
  std::ofstream(staging->SstPartPath(Layer(3), 0)) << "x";
  EXPECT_THAT(staging->SstPaths(layer),
              testing::ElementsAre(staging->SstPath(layer), staging->SstPartPath(layer, 0),
                                   staging->SstPartPath(layer, 1)));
  CARREL_EXPECT_OK(staging->RemoveSsts(layer));
  EXPECT_EQ(staging->SstPaths(layer).size(), 1u);
  EXPECT_FALSE(std::filesystem::exists(staging->SstPartPath(layer, 3)));
  EXPECT_TRUE(std::filesystem::exists(staging->SstPartPath(Layer(3), 0)));
  CARREL_EXPECT_OK(staging->RemoveSsts(layer));  // nothing left
}

TEST(StagingTest, AnotherInput_IsNamed) {
  v1::Manifest found, wanted;
  found.set_name("doc");
  found.set_context_id("one");
  found.set_token_ids_sha256("aa");
  wanted = found;
  wanted.set_context_id("two");
  CARREL_EXPECT_OK(SameJob(found, wanted));
  wanted.set_token_ids_sha256("bb");
  EXPECT_THAT(SameJob(found, wanted), StatusIs(absl::StatusCode::kFailedPrecondition,
                                               "token_ids_sha256: \"aa\" -> \"bb\""));
}

}  // namespace
}  // namespace carrel::prefill
