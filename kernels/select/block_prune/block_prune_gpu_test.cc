#include <set>

#include "kernels/block_test_data.h"
#include "kernels/select/block_prune/block_prune.h"

namespace carrel::kernels {
namespace {

enum class Positions { kAsStored, kRelative, kChunkIndexed };

struct Shape {
  int64_t kv_heads, group, head_dim, stride_q;
  BlockLayout layout;
  Positions positions = Positions::kAsStored;
};
struct Stage {
  int64_t chunk, wanted;
};

// What each unit chose; begins beyond its count are left out.
struct Choice {
  std::vector<int32_t> begins;
  std::vector<ChosenRowsHead> heads;
  int64_t stride = 0;

  std::set<int32_t> Of(size_t unit) const {
    const auto first = begins.begin() + static_cast<int64_t>(unit) * stride;
    return {first, first + heads[unit].count};
  }
};

class BlockPruneGpuTest : public GpuKernelTest {
 protected:
  void ExpectEqualsReference(const Shape& s, const std::vector<Stage>& stages) {
    SCOPED_TRACE(testing::Message()
                 << "kv_heads " << s.kv_heads << " group " << s.group << " head_dim " << s.head_dim
                 << " stride_q " << s.stride_q << " first " << s.layout.first_position << " n "
                 << s.layout.n << " block_q " << s.layout.block_q << " sink "
                 << s.layout.sink_tokens << " window " << s.layout.window << " positions "
                 << static_cast<int>(s.positions));
    const int64_t tokens = s.layout.first_position + s.layout.n;
    const int64_t row_stride = tokens + Below(3);
    const bool moved = s.positions != Positions::kAsStored;
    // On the grid products are exact, so that ties are ties; what is turned leaves the grid.
    const auto random = [&](int64_t count) {
      return moved ? RandomBf16(rng_, count) : RandomGridBf16(rng_, count);
    };
    const std::vector<uint16_t> q = random(s.layout.n * s.kv_heads * s.group * s.head_dim);
    const std::vector<uint16_t> k = random(s.kv_heads * row_stride * s.head_dim);
    const std::vector<float> angles = TurnAngles(1 + Below(2000), s.head_dim);
    const DeviceInput<uint16_t> device_q(q), device_k(k);
    const DeviceInput<float> device_angles(angles);
    const TurnTable table{angles.data(), static_cast<int64_t>(angles.size()) / s.head_dim};
    const TurnTable device_table{device_angles.data(), table.positions};

    const int64_t units = s.layout.blocks() * s.kv_heads;
    const int64_t queries = BlockQueries(s.layout.block_q, s.stride_q, s.group);
    const bool two_sides = s.positions == Positions::kRelative;
    const DeviceOutput<uint16_t> right(units * queries * s.head_dim);
    const DeviceOutput<uint16_t> left(units * queries * s.head_dim);
    BlockQueriesParams gather{.layout = s.layout,
                              .q = device_q.data(),
                              .kv_heads = s.kv_heads,
                              .group = s.group,
                              .head_dim = s.head_dim,
                              .stride_q = s.stride_q,
                              .table = two_sides ? device_table : TurnTable{},
                              .right = right.data(),
                              .left = two_sides ? left.data() : nullptr};
    ASSERT_EQ(cudaSuccess, GatherBlockQueries(gather, nullptr));
    std::vector<uint16_t> want_right(static_cast<size_t>(units * queries * s.head_dim));
    std::vector<uint16_t> want_left(want_right);
    gather.q = q.data();
    gather.table = two_sides ? table : TurnTable{};
    gather.right = want_right.data();
    gather.left = two_sides ? want_left.data() : nullptr;
    RefGatherBlockQueries(gather);
    ASSERT_TRUE(SameBits(right.Get(), want_right));
    if (two_sides) {
      ASSERT_TRUE(SameBits(left.Get(), want_left));
    }

    const bool turned = s.positions == Positions::kChunkIndexed;
    BlockPruneParams params{.layout = s.layout,
                            .right = right.data(),
                            .left = two_sides ? left.data() : nullptr,
                            .queries = queries,
                            .kv_heads = s.kv_heads,
                            .head_dim = s.head_dim,
                            .kv = {.k = device_k.data(), .row_stride = row_stride},
                            .table = turned ? device_table : TurnTable{}};
    BlockPruneParams reference = params;
    reference.right = want_right.data();
    reference.left = two_sides ? want_left.data() : nullptr;
    reference.kv.k = k.data();
    reference.table = turned ? table : TurnTable{};
    ExpectStages(params, reference, stages, StartWith(s), moved);
  }

 private:
  // Each stage gets what the device made of the one before.
  void ExpectStages(BlockPruneParams params, BlockPruneParams reference,
                    const std::vector<Stage>& stages, Choice choice, bool rounding) {
    int64_t most = 0;
    for (const ChosenRowsHead& head : choice.heads) most = std::max<int64_t>(most, head.rows);
    for (const Stage& stage : stages) {
      SCOPED_TRACE(testing::Message() << "chunk " << stage.chunk << " wanted " << stage.wanted);
      for (BlockPruneParams* p : {&params, &reference}) {
        p->max_rows = most;
        p->chunk = stage.chunk;
        p->wanted = stage.wanted;
      }
      Choice got, want;
      RunStage(params, choice, got);
      RunReference(reference, choice, got.stride, want);
      Compare(got, want, rounding);
      choice = got;
      most = std::min(most, stage.wanted);
    }
  }

  Choice StartWith(const Shape& s) {
    const int64_t units = s.layout.blocks() * s.kv_heads;
    const DeviceOutput<int32_t> begins(units), heads(3 * units);
    const ChosenRows on_device{begins.data(), 1, reinterpret_cast<ChosenRowsHead*>(heads.data())};
    EXPECT_EQ(cudaSuccess, StartBlockPrune(s.layout, s.kv_heads, on_device, nullptr));
    Choice choice;
    choice.stride = 1;
    choice.begins.resize(static_cast<size_t>(units));
    choice.heads.resize(static_cast<size_t>(units));
    RefStartBlockPrune(s.layout, s.kv_heads, {choice.begins.data(), 1, choice.heads.data()});
    EXPECT_EQ(begins.Get(), choice.begins);
    EXPECT_EQ(heads.Get(), Flat(choice.heads));
    return choice;
  }

  void RunStage(BlockPruneParams& p, const Choice& in, Choice& out) {
    const auto units = static_cast<int64_t>(in.heads.size());
    const DeviceInput<int32_t> begins(in.begins), heads(Flat(in.heads));
    p.in = {begins.data(), in.stride, reinterpret_cast<ChosenRowsHead*>(heads.data())};
    out.stride = BlockPruneMostChunks(p) + Below(3);
    const DeviceOutput<int32_t> out_begins(units * out.stride), out_heads(3 * units);
    const DeviceOutput<uint32_t> scores(units * ((p.max_rows + p.chunk - 1) / p.chunk));
    p.out = {out_begins.data(), out.stride, reinterpret_cast<ChosenRowsHead*>(out_heads.data())};
    p.scores = scores.data();
    ASSERT_EQ(cudaSuccess, BlockPrune(p, nullptr));
    out.begins = out_begins.Get();
    const std::vector<int32_t> flat = out_heads.Get();
    for (int64_t unit = 0; unit < units; ++unit) {
      const size_t at = static_cast<size_t>(3 * unit);
      out.heads.push_back({flat[at], flat[at + 1], flat[at + 2]});
    }
  }

  static void RunReference(BlockPruneParams& p, Choice in, int64_t stride, Choice& out) {
    out.stride = stride;
    out.begins.assign(in.heads.size() * static_cast<size_t>(stride), -1);
    out.heads.resize(in.heads.size());
    p.in = {in.begins.data(), in.stride, in.heads.data()};
    p.out = {out.begins.data(), stride, out.heads.data()};
    RefBlockPrune(p);
  }

  static void Compare(const Choice& got, const Choice& want, bool rounding) {
    size_t chosen = 0, other = 0;
    for (size_t unit = 0; unit < want.heads.size(); ++unit) {
      ASSERT_EQ(got.heads[unit].count, want.heads[unit].count) << "unit " << unit;
      ASSERT_EQ(got.heads[unit].length, want.heads[unit].length) << "unit " << unit;
      const std::set<int32_t> a = got.Of(unit), b = want.Of(unit);
      ASSERT_EQ(a.size(), b.size()) << "unit " << unit;
      chosen += b.size();
      for (const int32_t begin : b) other += a.count(begin) == 0 ? 1 : 0;
      if (a == b) {
        ASSERT_EQ(got.heads[unit].rows, want.heads[unit].rows) << "unit " << unit;
      }
    }
    // Sums in fp32 and in double part where two keys are as good as each other.
    EXPECT_LE(other, rounding ? 1 + chosen / 300 : 0) << "of " << chosen << " chunks";
  }
};

TEST_F(BlockPruneGpuTest, RandomStages_EqualReference) {
  for (int64_t trial = 0; trial < 30; ++trial) {
    const int64_t block_q = int64_t{16} << Below(4);
    Shape s{.kv_heads = 1 + Below(3),
            .group = 1 + Below(4),
            .head_dim = trial % 2 == 0 ? 64 : 128,
            .stride_q = 1 + Below(block_q),
            .layout = {.first_position = block_q * Below(20),
                       .n = 1 + Below(3 * block_q),
                       .block_q = block_q,
                       .sink_tokens = Below(100),
                       .window = Below(200)}};
    s.positions = static_cast<Positions>(trial % 3);
    while (BlockQueries(block_q, s.stride_q, s.group) > 256) ++s.stride_q;
    // Each stage's chunks divide those of the stage before.
    const int64_t first = int64_t{1} << Below(9), second = std::max<int64_t>(1, first / 4);
    const int64_t wanted = first * (1 + Below(8));
    ExpectEqualsReference(
        s, {{first, wanted}, {second, std::max(second, wanted / 3)}, {1, 1 + Below(20)}});
  }
}

TEST_F(BlockPruneGpuTest, PublishedStages_EqualReference) {
  for (const Positions positions :
       {Positions::kAsStored, Positions::kRelative, Positions::kChunkIndexed}) {
    ExpectEqualsReference({.kv_heads = 3,
                           .group = 3,
                           .head_dim = 64,
                           .stride_q = 4,
                           .layout = {.first_position = 64 * 800,
                                      .n = 100,
                                      .block_q = 64,
                                      .sink_tokens = 256,
                                      .window = 1024},
                           .positions = positions},
                          {{256, 32768}, {32, 8192}, {8, 2048}});
  }
}

TEST_F(BlockPruneGpuTest, FirstBlocks_ChooseNothing) {
  ExpectEqualsReference({.kv_heads = 2,
                         .group = 2,
                         .head_dim = 64,
                         .stride_q = 4,
                         .layout = {.n = 130, .block_q = 64, .sink_tokens = 256, .window = 1024}},
                        {{256, 1024}, {8, 64}});
}

TEST_F(BlockPruneGpuTest, TokensOfADecoder_EqualReference) {
  for (const Positions positions :
       {Positions::kAsStored, Positions::kRelative, Positions::kChunkIndexed}) {
    ExpectEqualsReference({.kv_heads = 3,
                           .group = 3,
                           .head_dim = 64,
                           .stride_q = 1,
                           .layout = {.first_position = 20'000,
                                      .n = 3,
                                      .block_q = 1,
                                      .sink_tokens = 4,
                                      .zone_limit = 19'936},
                           .positions = positions},
                          {{256, 8192}, {2, 256}});
  }
}

TEST_F(BlockPruneGpuTest, ChunksOfOneRow_AreTheBestRows) {
  ExpectEqualsReference({.kv_heads = 2,
                         .group = 4,
                         .head_dim = 128,
                         .stride_q = 1,
                         .layout = {.first_position = 3200, .n = 64, .block_q = 64}},
                        {{1, 512}, {1, 7}});
}

TEST_F(BlockPruneGpuTest, UnservedShapes_AreRefused) {
  const BlockPruneParams good{.layout = {.first_position = 64, .n = 64, .block_q = 64},
                              .queries = 16,
                              .kv_heads = 1,
                              .head_dim = 64,
                              .in = {.stride = 1},
                              .max_rows = 64,
                              .chunk = 8,
                              .wanted = 16,
                              .out = {.stride = 2}};
  const auto refused = [&](auto change) {
    BlockPruneParams params = good;
    change(params);
    EXPECT_EQ(BlockPrune(params, nullptr), cudaErrorInvalidValue);
  };
  refused([](auto& p) { p.queries = 257; });
  refused([](auto& p) { p.head_dim = 96; });
  refused([](auto& p) { p.chunk = 17; });
  refused([](auto& p) { p.out.stride = 1; });
  refused([](auto& p) { p.layout.first_position = 63; });
  BlockPruneParams empty = good;
  empty.layout.n = 0;
  EXPECT_EQ(BlockPrune(empty, nullptr), cudaSuccess);
}

}  // namespace
}  // namespace carrel::kernels
