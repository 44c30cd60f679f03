#include "serving/stop_filter.h"

#include <random>

#include "gtest/gtest.h"

namespace carrel::serving {
namespace {

TEST(StopFilterTest, GivesWhatStandsBeforeTheStop_HoweverItComes) {
  std::mt19937 random(testing::UnitTest::GetInstance()->random_seed());
  for (int trial = 0; trial < 2000; ++trial) {
    std::string text;
    for (int i = 0; i < 30; ++i) text += "abc"[random() % 3];
    std::vector<std::string> stops;
    for (unsigned i = 0; i < random() % 3; ++i)
      stops.push_back(text.substr(random() % 25, 1 + random() % 4));
    // Of the stop that is whole first; of two, the one that begins first.
    size_t first = std::string::npos, end = std::string::npos;
    for (const std::string& stop : stops) {
      const size_t at = text.find(stop);
      if (at == std::string::npos) continue;
      const size_t its_end = at + stop.size();
      if (its_end < end || (its_end == end && at < first)) first = at, end = its_end;
    }
    StopFilter filter(stops);
    std::string said;
    for (size_t at = 0; at < text.size() && !filter.stopped();) {
      const size_t n = 1 + random() % 5;
      said += filter.Push(text.substr(at, n));
      EXPECT_EQ(text.substr(0, said.size()), said);
      at += n;
    }
    said += filter.Finish();
    EXPECT_EQ(said, text.substr(0, first)) << "stops of " << text;
    EXPECT_EQ(filter.stopped(), first != std::string::npos);
  }
}

}  // namespace
}  // namespace carrel::serving
