#include "decoder/zone/candidate_rows.h"

#include <cstring>
#include <random>

#include "common/test_util.h"

namespace carrel::decoder {
namespace {

constexpr AttentionShape kShape{.layers = 3, .q_heads = 4, .kv_heads = 2, .head_dim = 8};
constexpr Layer kLayer(2);

// Rows whose bytes say which they are.
struct Source {
  explicit Source(int64_t rows) : k(static_cast<size_t>(rows)), v(k.size()) {
    for (size_t i = 0; i < k.size(); ++i) {
      k[i] = std::string(16, static_cast<char>(i % 251));
      v[i] = std::string(16, static_cast<char>(i % 241 + 7));
    }
  }
  std::vector<std::string> k, v;
};

// As a reply: what the cache holds is read there.
void Use(RowCache& cache, const Source& source, KvHead head, const std::vector<Position>& ids) {
  std::vector<const void*> k, v;
  for (const Position id : ids) {
    const char* here = cache.Find(kLayer, head, id);
    k.push_back(here != nullptr ? here : source.k[static_cast<size_t>(id)].data());
    v.push_back(here != nullptr ? here + 16 : source.v[static_cast<size_t>(id)].data());
  }
  cache.Keep(kLayer, head, ids, k, v);
}

std::vector<Position> Declared(const RowCache& cache, KvHead head) {
  return cache.Held(kLayer)[static_cast<size_t>(head.value())];
}

TEST(RowCacheTest, RandomUses_HoldTheRowsAndNameThem) {
  std::mt19937_64 rng(TestSeed());
  const Source source(500);
  RowCache cache(kShape, {0, 0, 40});
  EXPECT_FALSE(cache.keeps(Layer(0)));
  EXPECT_TRUE(cache.Held(Layer(0)).empty());
  for (int step = 0; step < 200; ++step) {
    const KvHead head(static_cast<int32_t>(rng() % 2));
    std::vector<Position> ids;
    while (ids.size() < static_cast<size_t>(1 + step % 40)) {
      const auto id = static_cast<Position>(rng() % (step % 3 == 0 ? 500 : 60));
      if (std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
    }
    Use(cache, source, head, ids);
    const std::vector<Position> declared = Declared(cache, head);
    EXPECT_LE(declared.size(), 40u);
    EXPECT_TRUE(std::is_sorted(declared.begin(), declared.end()));
    for (const Position id : ids)
      ASSERT_TRUE(std::binary_search(declared.begin(), declared.end(), id));
    for (Position id = 0; id < 500; ++id) {
      const char* here = cache.Find(kLayer, head, id);
      ASSERT_EQ(here != nullptr, std::binary_search(declared.begin(), declared.end(), id));
      if (here == nullptr) continue;
      ASSERT_EQ(std::string(here, 16), source.k[static_cast<size_t>(id)]);
      ASSERT_EQ(std::string(here + 16, 16), source.v[static_cast<size_t>(id)]);
    }
  }
}

TEST(RowCacheTest, RowPushedOutByTheTokenBefore_IsNotKeptAgain) {
  const Source source(100);
  RowCache cache(kShape, {0, 0, 2});
  const KvHead head(0);
  Use(cache, source, head, {1, 2});
  const void* k[] = {cache.Find(kLayer, head, 1)};  // held when both tokens were asked for
  const void* v[] = {cache.Find(kLayer, head, 1) + 16};
  Use(cache, source, head, {3, 4});
  const Position ids[] = {1};
  cache.Keep(kLayer, head, ids, k, v);
  EXPECT_EQ(Declared(cache, head), (std::vector<Position>{3, 4}));
}

TEST(RowCacheTest, MoreRowsThanSlots_AreNotKept) {
  const Source source(100);
  RowCache cache(kShape, {0, 0, 2});
  Use(cache, source, KvHead(1), {5, 6, 7});
  EXPECT_TRUE(Declared(cache, KvHead(1)).empty());
}

TEST(RowCacheTest, Slots_FillTheBytesOrNameTheLeast) {
  RetrievalConfig config;
  config.want = Want::kRows;
  config.selection = select::TopK{20};
  config.dense_layers = 1;
  const std::vector<select::Selection> selections = LayerSelections(config, 3, 1000);
  const int64_t slot = 2 * 2 * (8 * 4 + 64);  // of two layers and two heads
  config.row_cache_bytes = 20 * slot;
  auto slots = RowCache::Slots(config, kShape, selections, 1000);
  CARREL_ASSERT_OK(slots);
  EXPECT_EQ(*slots, (std::vector<int64_t>{0, 20, 20}));
  config.prefetch = Prefetch::kSpeculative;  // brings twice as many
  EXPECT_THAT(RowCache::Slots(config, kShape, selections, 1000),
              StatusIs(absl::StatusCode::kInvalidArgument, std::to_string(40 * slot)));
  config.row_cache_bytes = 5000 * slot;
  slots = RowCache::Slots(config, kShape, selections, 1000);
  CARREL_ASSERT_OK(slots);
  EXPECT_EQ((*slots)[1], 1000) << "no more than there are rows";
}

}  // namespace
}  // namespace carrel::decoder
