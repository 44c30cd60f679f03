#include "decoder/statistics.h"

namespace carrel::decoder {

void ShareCounts(const LayerStatistics& before, absl::Span<LayerStatistics* const> all) {
  const auto parts = static_cast<int64_t>(all.size());
  for (int64_t LayerStatistics::*count :
       {&LayerStatistics::tokens, &LayerStatistics::rows_attended, &LayerStatistics::candidates,
        &LayerStatistics::visited, &LayerStatistics::bytes_received,
        &LayerStatistics::bytes_read}) {
    const int64_t part = (all[0]->*count - before.*count) / parts;
    for (LayerStatistics* one : all.subspan(1)) {
      one->*count += part;
      all[0]->*count -= part;
    }
  }
  const double wait = (all[0]->exposed_wait_us - before.exposed_wait_us) / double(parts);
  for (LayerStatistics* one : all) one->exposed_wait_us += wait;
  all[0]->exposed_wait_us = before.exposed_wait_us + wait;
  for (LayerStatistics* one : all) one->estimated = all[0]->estimated;
}

}  // namespace carrel::decoder
