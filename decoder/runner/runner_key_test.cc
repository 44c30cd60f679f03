#include "decoder/runner/runner_key.h"

#include "common/test_util.h"

namespace carrel::decoder {
namespace {

TEST(RunnerKeyTest, CopiesOfACheckpoint_ShareARunner_AnotherModelDoesNot) {
  model::Checkpoint checkpoint;
  checkpoint.config.shape = {.layers = 2, .q_heads = 4, .kv_heads = 2, .head_dim = 16};
  checkpoint.config.rope.theta = 10000;
  model::Checkpoint other = checkpoint;
  other.fingerprint.emplace_back("weights", "of the context");  // as who opens it presents itself
  EXPECT_EQ(RunnerKey(other), RunnerKey(checkpoint));
  other.config.rope.theta = 500000;
  EXPECT_NE(RunnerKey(other), RunnerKey(checkpoint));
}

}  // namespace
}  // namespace carrel::decoder
