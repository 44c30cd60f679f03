#include "decoder/plan/rates.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/status.h"

namespace carrel::decoder {
namespace {

// Of a CPU's memory, by one thread and by as many as fill it; of a GPU's memory and of its bus.
constexpr double kThreadBytes = 9e9, kMemoryBytes = 40e9, kGpuBytes = 1.5e12, kBusBytes = 20e9;
// What a query costs beside the bytes: a store in this process takes it apart and answers it; a GPU waits for a host.
constexpr double kStoreFixed = 40e-6, kHostFixed = 20e-6, kGpuStoreFixed = 350e-6;
// Launches of a layer, beside those that dense attention has.
constexpr double kGpuFixed = 8e-6, kGpuChoiceFixed = 60e-6, kBusFixed = 150e-6;

std::string ProcessorName() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 1));
    if (parts.size() == 2) return std::string(absl::StripAsciiWhitespace(parts[1]));
  }
  return "a processor without a name";
}

std::string ShapeName(const AttentionShape& shape) {
  return absl::StrCat(shape.q_heads, " q heads, ", shape.kv_heads, " KV heads of ", shape.head_dim);
}

// Of the ways in this host; those of a store in this process take as long, and its questions and replies.
absl::Status MeasureHostRates(TimeHostLayer time, Rates& rates) {
  constexpr int64_t kShort = 1024, kLong = 16384, kFew = 64, kMany = 512;
  ASSIGN_OR_RETURN(const TimedLayer dense_short, time(kShort, 0));
  ASSIGN_OR_RETURN(const TimedLayer dense_long, time(kLong, 0));
  ASSIGN_OR_RETURN(const TimedLayer few_short, time(kShort, kFew));
  ASSIGN_OR_RETURN(const TimedLayer few_long, time(kLong, kFew));
  ASSIGN_OR_RETURN(const TimedLayer many_long, time(kLong, kMany));
  const double chosen_row = std::max(
      0.0, (many_long.seconds - few_long.seconds) / (many_long.chosen_rows - few_long.chosen_rows));
  for (const Place place : {Place::kStore, Place::kHost}) {
    for (const bool dense : {false, true}) {
      WayRate& rate = rates.of({place, dense});
      const double before = rate.fixed;
      rate = dense ? FitRate(dense_short, dense_long, 0) : FitRate(few_short, few_long, chosen_row);
      rate.measured = place == Place::kHost;
      if (place == Place::kStore)
        rate.fixed = std::max(before, rate.fixed + kStoreFixed - kHostFixed);
      // Summaries are read for every row that is not chosen.
      if (!dense) rate.zone_row *= 1 + 4 * kSummaryOfRow;  // a key of 8 bits is a fourth of a row
    }
  }
  return absl::OkStatus();
}

}  // namespace

WayRate FitRate(const TimedLayer& shorter, const TimedLayer& longer, double chosen_row) {
  WayRate rate;
  rate.measured = true;
  rate.chosen_row = chosen_row;
  const double a = std::max(0.0, shorter.seconds - chosen_row * shorter.chosen_rows);
  const double b = std::max(a, longer.seconds - chosen_row * longer.chosen_rows);
  rate.zone_row = (b - a) / (longer.zone_rows - shorter.zone_rows);
  rate.fixed = std::max(0.0, a - rate.zone_row * shorter.zone_rows);
  return rate;
}

absl::StatusOr<std::string> RatesKey(model::Device device, const AttentionShape& shape,
                                     int threads) {
  if (device == model::Device::kCpu) {
    return absl::StrCat(ProcessorName(), ", ", threads, threads == 1 ? " thread, " : " threads, ",
                        ShapeName(shape));
  }
  ASSIGN_OR_RETURN(const std::string gpu, GpuName());
  return absl::StrCat(gpu, ", ", ShapeName(shape));
}

Rates AssumedRates(model::Device device, const AttentionShape& shape, int threads) {
  Rates rates;
  const double cpu = std::min(kMemoryBytes, kThreadBytes * threads);
  const double row = 4.0 * shape.kv_heads * shape.head_dim;  // bytes of K and V, of all KV heads
  const double scanned = row * (0.25 + kSummaryOfRow);       // keys in 8 bits, with summaries
  const double chosen = 4.0 * shape.head_dim;                // bytes of one KV head's row
  const bool cuda = device == model::Device::kCuda;
  const double store = cuda ? kGpuStoreFixed : kStoreFixed;
  rates.of({Place::kStore, false}) = {store, scanned / cpu, chosen / cpu};
  rates.of({Place::kStore, true}) = {store, row / cpu, 0};
  if (cuda) {
    rates.of({Place::kHost, false}) = {kGpuFixed + kBusFixed, scanned / kGpuBytes,
                                       chosen / kBusBytes};
    rates.of({Place::kHost, true}) = {kGpuFixed, row / kBusBytes, 0};
    rates.of({Place::kDevice, false}) = {kGpuFixed + kGpuChoiceFixed, row / 2 / kGpuBytes,
                                         chosen / kGpuBytes};
    rates.of({Place::kDevice, true}) = {kGpuFixed, row / kGpuBytes, 0};
  } else {
    rates.of({Place::kHost, false}) = {kHostFixed, scanned / cpu, chosen / cpu};
    rates.of({Place::kHost, true}) = {kHostFixed, row / cpu, 0};
  }
  rates.machine = "a machine that nobody measured (carrel doctor does)";
  return rates;
}

absl::StatusOr<Rates> MeasureRates(model::Device device, const AttentionShape& shape,
                                   ThreadPool* pool, TimeHostLayer time) {
  const int threads = pool->threads() + 1;
  ASSIGN_OR_RETURN(const std::string machine, RatesKey(device, shape, threads));
  Rates rates = AssumedRates(device, shape, threads);
  rates.machine = machine;
  if (device == model::Device::kCuda) {
    RETURN_IF_ERROR(MeasureCudaRates(shape, pool, rates));
  } else {
    RETURN_IF_ERROR(MeasureHostRates(time, rates));
  }
  return rates;
}

}  // namespace carrel::decoder
