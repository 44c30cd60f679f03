#include "decoder/statistics.h"

namespace carrel::decoder {

std::vector<LayerStatistics> StatisticsOf(absl::Span<const select::Selection> selections) {
  std::vector<LayerStatistics> layers(selections.size());
  for (size_t l = 0; l < layers.size(); ++l) layers[l].selection = selections[l];
  return layers;
}

double RowsPerToken(const LayerStatistics& layer) {
  const bool others = layer.tokens > layer.whole_tokens;
  const int64_t tokens = layer.tokens - (others ? layer.whole_tokens : 0);
  const int64_t rows = layer.rows_attended - (others ? layer.whole_rows : 0);
  return tokens == 0 ? 0 : static_cast<double>(rows) / static_cast<double>(tokens);
}

void ShareCounts(const LayerStatistics& before, absl::Span<const CountShare> all) {
  LayerStatistics& counted = *all[0].statistics;
  int64_t tokens = 0;
  for (const CountShare& one : all) tokens += one.tokens;
  for (int64_t LayerStatistics::*count :
       {&LayerStatistics::tokens, &LayerStatistics::rows_attended, &LayerStatistics::whole_tokens,
        &LayerStatistics::whole_rows, &LayerStatistics::candidates, &LayerStatistics::visited,
        &LayerStatistics::bytes_received, &LayerStatistics::bytes_read}) {
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

void AddStatistics(const Statistics& more, Statistics& sum) {
  using Layer = LayerStatistics;
  for (size_t l = 0; l < sum.layers.size(); ++l) {
    const Layer& from = more.layers[l];
    Layer& to = sum.layers[l];
    for (int64_t Layer::*count :
         {&Layer::tokens, &Layer::rows_attended, &Layer::whole_tokens, &Layer::whole_rows,
          &Layer::candidates, &Layer::visited, &Layer::prefetched, &Layer::verified_again,
          &Layer::bytes_received, &Layer::bytes_read}) {
      to.*count += from.*count;
    }
    for (int64_t BankStatistics::*count :
         {&BankStatistics::wanted, &BankStatistics::hits, &BankStatistics::ahead,
          &BankStatistics::ahead_hits, &BankStatistics::expected, &BankStatistics::foreseen}) {
      to.bank.*count += from.bank.*count;
    }
    for (Mean Layer::*mean : {&Layer::cosine, &Layer::hit_rate, &Layer::kept_rate, &Layer::mass,
                              &Layer::attended_mass, &Layer::output_error}) {
      (to.*mean).sum += (from.*mean).sum;
      (to.*mean).count += (from.*mean).count;
    }
    to.exposed_wait_us += from.exposed_wait_us;
    to.estimated = to.estimated || from.estimated;
  }
  sum.bytes_sent += more.bytes_sent;
  sum.bytes_received += more.bytes_received;
  sum.window_bytes += more.window_bytes;
  sum.device_bytes += more.device_bytes - more.shared_bytes;
}

}  // namespace carrel::decoder
