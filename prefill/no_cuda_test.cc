// A build without CUDA.
#include "absl/strings/str_cat.h"
#include "common/test_util.h"
#include "prefill/layer_forward.h"

namespace carrel::prefill {
namespace {

TEST(NoCudaTest, Gpu_IsRefused_AndTheMessageSaysHowToBuildForIt) {
  EXPECT_THAT(
      CheckCudaForward(model::ModelConfig()),
      StatusIs(absl::StatusCode::kFailedPrecondition, "built without CUDA (./run build gpu)"));
  ThreadPool pool(0);
  EXPECT_THAT(MakeCudaForward(model::Checkpoint(), {.tokens = 1}, 0, 0, 1, &pool),
              StatusIs(absl::StatusCode::kFailedPrecondition, "built without CUDA"));
}

}  // namespace
}  // namespace carrel::prefill
