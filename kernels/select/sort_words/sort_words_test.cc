#include "kernels/select/sort_words/sort_words.h"

#include "kernels/test_data.h"

namespace carrel::kernels {
namespace {

CARREL_KERNEL_TEST(SortWordsTest);

TEST_P(SortWordsTest, RandomWords_EqualsReference) {
  for (int trial = 0; trial < 300; ++trial) {
    const int64_t count = Below(trial % 10 == 0 ? 20000 : 300);
    const uint64_t kinds = trial % 3 == 0 ? 1 + rng_() % 5 : UINT64_MAX;
    std::vector<uint64_t> words;
    for (int64_t i = 0; i < count; ++i) words.push_back(rng_() % kinds);
    if (trial % 4 == 0) RefSortWords(words.data(), count / 2);  // partly in order
    words.push_back(7);                                         // behind them
    std::vector<uint64_t> expected = words;
    SortWords(words.data(), count);
    RefSortWords(expected.data(), count);
    ASSERT_EQ(words, expected) << count;
  }
}

}  // namespace
}  // namespace carrel::kernels
