#include "common/test_util.h"
#include "kvstore/engine/validate.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;
using ::testing::HasSubstr;
using ::testing::Not;

const FingerprintFields kContext = {
    {"kv_dtype", "bf16"}, {"rope_theta", "10000"}, {"weights_sha256", "aa"}};

TEST(CheckFingerprint, SameFieldsInAnyOrder_Pass) {
  EXPECT_EQ(
      CheckFingerprint(kContext,
                       {{"weights_sha256", "aa"}, {"kv_dtype", "bf16"}, {"rope_theta", "10000"}}),
      absl::OkStatus());
}

TEST(CheckFingerprint, SeveralDiffer_EachIsNamedWithBothValues) {
  const absl::Status status = CheckFingerprint(
      kContext, {{"kv_dtype", "bf16"}, {"rope_theta", "500000"}, {"weights_sha256", "bb"}});
  EXPECT_THAT(status, StatusIs(StatusCode::kFailedPrecondition,
                               "fingerprint mismatch: rope_theta: context has 10000, model has "
                               "500000; weights_sha256: context has aa, model has bb"));
  EXPECT_THAT(std::string(status.message()), Not(HasSubstr("kv_dtype")));
}

TEST(CheckFingerprint, FieldsMissingOnEitherSide_AreNamed) {
  const absl::Status status = CheckFingerprint(
      kContext, {{"kv_dtype", "bf16"}, {"rope_theta", "10000"}, {"tokenizer_sha256", "cc"}});
  EXPECT_THAT(status, StatusIs(StatusCode::kFailedPrecondition,
                               "tokenizer_sha256: context has none, model has cc; weights_sha256: "
                               "context has aa, model has none"));
}

TEST(CheckFingerprint, EmptyOrRepeated_IsInvalid) {
  EXPECT_THAT(CheckFingerprint({}, {}), StatusIs(StatusCode::kInvalidArgument, "empty"));
  EXPECT_THAT(CheckFingerprint(kContext, {{"a", "1"}, {"a", "1"}}),
              StatusIs(StatusCode::kInvalidArgument, "the field a twice"));
}

TEST(CheckFingerprint, HugeValues_MakeABoundedMessage) {
  FingerprintFields model;
  for (int i = 0; i < 1000; ++i) {
    model.emplace_back(absl::StrCat("f", i, std::string(10000, 'x')), std::string(10000, 'y'));
  }
  EXPECT_LT(CheckFingerprint(kContext, model).message().size(), 64u * 1024);
}

}  // namespace
}  // namespace carrel::kvstore
