#include "decoder/statistics.h"

namespace carrel::decoder {

void ShareCounts(const LayerStatistics& before, absl::Span<const CountShare> all) {
  LayerStatistics& counted = *all[0].statistics;
  int64_t tokens = 0;
  for (const CountShare& one : all) tokens += one.tokens;
  for (int64_t LayerStatistics::*count :
       {&LayerStatistics::tokens, &LayerStatistics::rows_attended, &LayerStatistics::candidates,
        &LayerStatistics::visited, &LayerStatistics::bytes_received,
        &LayerStatistics::bytes_read}) {
    const int64_t whole = counted.*count - before.*count;
    for (const CountShare& one : all.subspan(1)) {
      const int64_t part = whole / tokens * one.tokens + whole % tokens * one.tokens / tokens;
      one.statistics->*count += part;
      counted.*count -= part;
    }
  }
  const double wait = (counted.exposed_wait_us - before.exposed_wait_us) / double(tokens);
  counted.exposed_wait_us = before.exposed_wait_us;
  for (const CountShare& one : all) {
    one.statistics->exposed_wait_us += wait * double(one.tokens);
    one.statistics->estimated = counted.estimated;
  }
}

}  // namespace carrel::decoder
