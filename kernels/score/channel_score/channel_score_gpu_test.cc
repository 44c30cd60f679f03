#include "kernels/gpu_test_data.h"
#include "kernels/score/channel_score/channel_score.h"

namespace carrel::kernels {
namespace {

class ChannelScoreGpuTest : public GpuKernelTest {
 protected:
  void ExpectMatchesReference(int64_t kv_heads, int64_t group, int64_t head_dim, int64_t width,
                              int64_t rows) {
    SCOPED_TRACE("kv_heads " + std::to_string(kv_heads) + " group " + std::to_string(group) +
                 " head_dim " + std::to_string(head_dim) + " width " + std::to_string(width) +
                 " rows " + std::to_string(rows));
    const int64_t label_stride = ChannelLabelStride(rows), score_stride = rows + Below(3);
    const int64_t words = label_stride / 8 * width;
    const std::vector<uint16_t> q = RandomBf16(rng_, kv_heads * group * head_dim);
    const std::vector<float> least = RandomNormal(rng_, kv_heads * width);
    const std::vector<float> step = RandomNormal(rng_, kv_heads * width, 0.3f);
    std::vector<int32_t> channels;
    std::vector<uint32_t> labels(static_cast<size_t>(kv_heads * words));
    for (int64_t g = 0; g < kv_heads; ++g) {
      for (int64_t c = 0; c < width; ++c) {
        channels.push_back(static_cast<int32_t>(Below(head_dim)));
      }
      std::vector<uint8_t> of_head(static_cast<size_t>(rows * width));
      for (uint8_t& level : of_head) level = static_cast<uint8_t>(Below(16));
      PackChannelLabels(of_head.data(), rows, width, labels.data() + g * words);
    }
    const DeviceInput<uint16_t> device_q(q);
    const DeviceInput<int32_t> device_channels(channels);
    const DeviceInput<float> device_least(least), device_step(step);
    const DeviceInput<uint32_t> device_labels(labels);
    DeviceOutput<float> scores(kv_heads * score_stride);
    const DeviceWorkspace workspace(ChannelScoreWorkspaceBytes(kv_heads, group));
    ChannelScoreParams params{.q = device_q.data(),
                              .channels = device_channels.data(),
                              .least = device_least.data(),
                              .step = device_step.data(),
                              .labels = device_labels.data(),
                              .kv_heads = kv_heads,
                              .group = group,
                              .head_dim = head_dim,
                              .width = width,
                              .rows = rows,
                              .label_stride = label_stride,
                              .score_stride = score_stride,
                              .scale = 0.1f,
                              .scores = scores.data(),
                              .workspace = workspace.data()};
    ASSERT_EQ(cudaSuccess, ChannelScore(params, nullptr));
    const std::vector<float> out = scores.Get();
    std::vector<float> expected(out.size());
    params.q = q.data();
    params.channels = channels.data();
    params.least = least.data();
    params.step = step.data();
    params.labels = labels.data();
    params.scores = expected.data();
    RefChannelScore(params);
    for (int64_t g = 0; g < kv_heads; ++g) {
      // What rounding may do: scores are sums of numbers that add up to `size`.
      double size = 0;
      for (int64_t h = g * group; h < (g + 1) * group; ++h) {
        double sum = 0;
        for (int64_t c = 0; c < width; ++c) {
          const auto i = static_cast<size_t>(g * width + c);
          sum += 0.1 * std::abs(Bf16ToFloat(q[static_cast<size_t>(h * head_dim + channels[i])])) *
                 (std::abs(least[i]) + 15 * std::abs(step[i]));
        }
        size = std::max(size, sum);
      }
      for (int64_t j = 0; j < score_stride; ++j) {
        const auto at = static_cast<size_t>(g * score_stride + j);
        if (j >= rows) {
          ASSERT_TRUE(std::isnan(out[at])) << "written beyond the rows";
          continue;
        }
        ASSERT_NEAR(out[at], expected[at], 2e-5 * (1 + size)) << "head " << g << " row " << j;
      }
    }
  }
};

// The reference unpacks labels too; this is their definition.
TEST_F(ChannelScoreGpuTest, PackedLabels_AreWhereTheyAreLookedFor) {
  for (const int64_t width : {16, 32}) {
    const int64_t rows = 1 + Below(300);
    std::vector<uint8_t> levels(static_cast<size_t>(rows * width));
    for (uint8_t& level : levels) level = static_cast<uint8_t>(Below(16));
    std::vector<uint32_t> labels(static_cast<size_t>(ChannelLabelStride(rows) / 8 * width), ~0u);
    PackChannelLabels(levels.data(), rows, width, labels.data());
    std::vector<int> used(labels.size() * 8);
    for (int64_t j = 0; j < ChannelLabelStride(rows); ++j) {
      for (int64_t c = 0; c < width; ++c) {
        const ChannelLabelPlace at = PlaceOfChannelLabel(j, width, c);
        ++used[static_cast<size_t>(at.word * 8 + at.shift / 4)];
        const uint32_t level = labels[static_cast<size_t>(at.word)] >> at.shift & 15;
        ASSERT_EQ(level, j < rows ? levels[static_cast<size_t>(j * width + c)] : 0u);
      }
    }
    EXPECT_EQ(used, std::vector<int>(used.size(), 1)) << "width " << width;
  }
}

TEST_F(ChannelScoreGpuTest, RandomShapes_MatchReference) {
  for (int64_t trial = 0; trial < 24; ++trial) {
    ExpectMatchesReference(1 + Below(4), 1 + Below(16), trial % 3 == 0 ? 64 : 128,
                           trial % 2 == 0 ? 16 : 32, 1 + Below(trial % 4 == 0 ? 9000 : 150));
  }
}

TEST_F(ChannelScoreGpuTest, ManyRows_MatchReference) {
  ExpectMatchesReference(2, 4, 128, 32, 200'001);
  ExpectMatchesReference(2, 4, 128, 16, 200'002);
}

TEST_F(ChannelScoreGpuTest, UnservedShapes_AreRefused) {
  const ChannelScoreParams good{.kv_heads = 1, .group = 1, .head_dim = 64, .width = 16};
  ChannelScoreParams without_workspace = good;
  without_workspace.rows = 1;
  without_workspace.label_stride = without_workspace.score_stride = 64;
  EXPECT_EQ(ChannelScore(without_workspace, nullptr), cudaErrorInvalidValue);
  const auto refused = [&](auto change) {
    ChannelScoreParams params = good;
    change(params);
    EXPECT_EQ(ChannelScore(params, nullptr), cudaErrorInvalidValue);
  };
  EXPECT_EQ(ChannelScore(good, nullptr), cudaSuccess);
  refused([](auto& p) { p.group = 17; });
  refused([](auto& p) { p.width = 8; });
  refused([](auto& p) { p.rows = 1; });
  refused([](auto& p) { p.label_stride = 32; });
}

}  // namespace
}  // namespace carrel::kernels
