#include "decoder/client/wire.h"

#include "carrel/v1/retrieval.pb.h"
#include "common/test_util.h"

namespace carrel::decoder {
namespace {

TEST(WireTest, FloatsSet_AreChecked) {
  const std::vector<float> values = {1, 2, 3, 4, 5, 6};
  v1::Tensor tensor;
  SetFloats(values.data(), {2, 3}, &tensor);
  CARREL_EXPECT_OK(CheckFloats(tensor, {2, 3}, "x"));
  CARREL_EXPECT_OK(CheckFloats(tensor, {-1, 3}, "x"));
  EXPECT_EQ(Dimension(tensor, 1), 3);
  EXPECT_EQ(Dimension(tensor, 2), 0);
  EXPECT_THAT(CheckFloats(tensor, {3, 2}, "scores"),
              StatusIs(absl::StatusCode::kDataLoss,
                       "scores is F32 [2, 3] of 24 bytes, expected F32 [3, 2]"));
  EXPECT_THAT(CheckBf16(tensor, {2, 3}, "k"),
              StatusIs(absl::StatusCode::kDataLoss, "expected BF16"));
  EXPECT_THAT(CheckIds(tensor, {6}, "ids"), StatusIs(absl::StatusCode::kDataLoss, "expected I64"));
}

TEST(WireTest, LyingShapes_AreRefused) {
  v1::Tensor tensor;
  tensor.add_shape(int64_t{1} << 40);
  tensor.add_shape(int64_t{1} << 40);
  EXPECT_THAT(CheckFloats(tensor, {-1, -1}, "x"), StatusIs(absl::StatusCode::kDataLoss, "x is"));
  tensor.clear_shape();
  tensor.add_shape(-1);
  EXPECT_THAT(CheckFloats(tensor, {-1}, "x"), StatusIs(absl::StatusCode::kDataLoss, "x is"));
  tensor.set_shape(0, 2);
  tensor.set_data("1234567");
  EXPECT_THAT(CheckFloats(tensor, {2}, "x"), StatusIs(absl::StatusCode::kDataLoss, "of 7 bytes"));
}

}  // namespace
}  // namespace carrel::decoder
