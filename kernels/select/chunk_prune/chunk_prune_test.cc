#include "kernels/select/chunk_prune/chunk_prune.h"

#include <algorithm>
#include <numeric>

#include "common/test_util.h"

namespace carrel::kernels {
namespace {

int64_t Rows(const std::vector<RowRange>& ranges) {
  return std::accumulate(ranges.begin(), ranges.end(), int64_t{0},
                         [](int64_t sum, const RowRange& range) { return sum + range.rows(); });
}

void ExpectAscending(const std::vector<RowRange>& ranges, RowRange within) {
  Position at = within.begin;
  for (const RowRange& range : ranges) {
    EXPECT_GE(range.begin, at);
    EXPECT_GT(range.rows(), 0);
    at = range.end;
  }
  EXPECT_LE(at, within.end);
}

class ChunkPruneTest : public testing::Test {
 protected:
  int64_t Below(int64_t bound) {
    return static_cast<int64_t>(rng_() % static_cast<uint64_t>(bound));
  }
  std::mt19937_64 rng_{TestSeed()};
};

TEST_F(ChunkPruneTest, RandomSizes_KeepAscendingRowsWithinWhatIsWanted) {
  for (int trial = 0; trial < 200; ++trial) {
    const RowRange rows{Below(50), 50 + 1 + Below(3000)};
    const std::vector<float> value = RandomNormal(rng_, rows.end);
    const auto score = [&](absl::Span<const ChunkProbe> probes, std::vector<float>& scores) {
      ASSERT_EQ(scores.size(), probes.size());
      for (size_t i = 0; i < probes.size(); ++i) {
        ASSERT_TRUE(probes[i].row >= rows.begin && probes[i].row < rows.end);
        ASSERT_GE(probes[i].chunks_back, 0);
        scores[i] = value[static_cast<size_t>(probes[i].row)];
      }
    };
    const auto of_blocks = [&](absl::Span<const ChunkProbe> probes, std::vector<float>& scores) {
      for (size_t i = 0; i < probes.size(); ++i)
        scores[i] = value[static_cast<size_t>(probes[i].row)];
    };
    const int64_t wanted = 1 + Below(400), chunk = 1 + Below(300);
    const std::vector<RowRange> kept = KeepBestChunks({rows}, chunk, wanted, score);
    ExpectAscending(kept, rows);
    EXPECT_LE(Rows(kept), wanted);
    EXPECT_GE(Rows(kept), 1);
    std::vector<RowRange> halved;
    for (const ScoredBlock& block : HalveChunks({0, rows.end}, 1, wanted, MiddleBlock, of_blocks)) {
      halved.push_back({block.block, block.block + 1});
      if (rows.end > wanted) {
        EXPECT_EQ(block.score, value[static_cast<size_t>(block.block)]);
      }
    }
    ExpectAscending(halved, {0, rows.end});
    EXPECT_EQ(Rows(halved), std::min(wanted, rows.end));
  }
}

// Chunks of one row are scored one by one: the best rows stay, whatever the order.
TEST_F(ChunkPruneTest, ChunksOfOneRow_AreTheBestRows) {
  const std::vector<float> value = RandomNormal(rng_, 500);
  const auto score = [&](absl::Span<const ChunkProbe> probes, std::vector<float>& scores) {
    for (size_t i = 0; i < probes.size(); ++i) {
      EXPECT_EQ(probes[i].chunks_back, 499 - probes[i].row);
      scores[i] = value[static_cast<size_t>(probes[i].row)];
    }
  };
  std::vector<Position> order(500);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](Position a, Position b) {
    return value[static_cast<size_t>(a)] > value[static_cast<size_t>(b)];
  });
  order.resize(40);
  std::sort(order.begin(), order.end());
  std::vector<Position> kept;
  for (const RowRange& range : KeepBestChunks({{0, 500}}, 1, 40, score))
    kept.push_back(range.begin);
  EXPECT_EQ(kept, order);
}

// A single hill: both descents find its top, and of two halves the later one is the right one.
TEST_F(ChunkPruneTest, OneHill_IsFound) {
  for (int trial = 0; trial < 50; ++trial) {
    const Position top = Below(4096);
    const auto score = [&](absl::Span<const ChunkProbe> probes, std::vector<float>& scores) {
      for (size_t i = 0; i < probes.size(); ++i) {
        scores[i] = -std::abs(static_cast<float>(probes[i].row - top));
        if (i % 2 == 1 && probes[i].chunks_back == probes[i - 1].chunks_back) {
          EXPECT_TRUE(probes[i].right && !probes[i - 1].right);
        }
      }
    };
    const std::vector<RowRange> kept = KeepBestChunks({{0, 4096}}, 64, 64, score);
    ASSERT_EQ(kept.size(), 1u);
    EXPECT_TRUE(kept[0].begin <= top && top < kept[0].end) << top;
    const std::vector<ScoredBlock> halved = HalveChunks({0, 4096}, 1, 4, MiddleBlock, score);
    EXPECT_TRUE(std::any_of(halved.begin(), halved.end(), [&](const ScoredBlock& b) {
      return b.block == top;
    })) << top;
  }
}

}  // namespace
}  // namespace carrel::kernels
