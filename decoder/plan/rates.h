// What:   what a token's attention to the zone of one layer costs on a machine, for a model's shape, each
//         way (way.h):
//           seconds = fixed + zone_row * rows of the zone + chosen_row * rows chosen, of all KV heads.
//         Measured once on rows that are made up, by the kernels that decoding uses (MeasureRates), or, of
//         ways that were not measured, assumed from bytes and usual speeds.
// Source: ours (decision 093).
// Cost:   MeasureRates: a second at most; 128 MiB of memory and more, on a GPU up to 256 MiB of its own.
#pragma once

#include <array>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "common/ids.h"
#include "common/thread_pool.h"
#include "decoder/config.h"
#include "decoder/plan/way.h"
#include "model/config.h"
#include "model/device.h"

namespace carrel::decoder {

struct WayRate {
  double fixed = 0;       // seconds
  double zone_row = 0;    // seconds
  double chosen_row = 0;  // seconds
  bool measured = false;

  double Seconds(double zone_rows, double chosen_rows) const {
    return fixed + zone_row * zone_rows + chosen_row * chosen_rows;
  }
};

// Bytes that estimation reads per row of the zone, of those of the row's key and value: a summary of 40 rows has three
// numbers in f32 for each dimension of a head, a row two in bf16.
inline constexpr double kSummaryOfRow = 3.0 * 4 / (40 * 2 * 2);

struct Rates {
  std::string machine;  // of what: processor and threads, or GPU
  std::array<WayRate, kWays.size()> ways;
  const WayRate& of(Way way) const { return ways[WayIndex(way)]; }
  WayRate& of(Way way) { return ways[WayIndex(way)]; }
};

// What the rates belong to, and where they are kept by: the processor's or GPU's name, threads, shape. Unavailable: no GPU.
absl::StatusOr<std::string> RatesKey(model::Device device, const AttentionShape& shape,
                                     int threads);

// All assumed.
Rates AssumedRates(model::Device device, const AttentionShape& shape, int threads);

// What a token's attention of one layer takes at a length of a zone, without and with a choice.
struct TimedLayer {
  double zone_rows = 0, chosen_rows = 0;  // of one KV head; of all KV heads
  double seconds = 0;
};
// Times it in this host's memory: to every row of a zone of so many, or to `budget` > 0 of each KV head.
using TimeHostLayer =
    absl::FunctionRef<absl::StatusOr<TimedLayer>(int64_t zone_rows, int64_t budget)>;

// Those of AssumedRates, but what can be measured is: of a GPU the ways on the device, of a CPU those in this
// host's memory, by `time` (library/machine_rates.h). A store in this process is taken to cost as much as these, and what taking its questions apart costs.
// Unavailable: no GPU; ResourceExhausted: too little of its memory is free.
absl::StatusOr<Rates> MeasureRates(model::Device device, const AttentionShape& shape,
                                   ThreadPool* pool, TimeHostLayer time);

// fixed and per row from two lengths; never below 0.
WayRate FitRate(const TimedLayer& shorter, const TimedLayer& longer, double chosen_row);

// In a build with CUDA.
absl::StatusOr<std::string> GpuName();
absl::StatusOr<int64_t> GpuMemory();  // bytes in all
// What a decoder takes of it beside the zone, weights included; window_rows: of sink and local.
int64_t GpuModelBytes(const model::ModelConfig& config, const DeviceConfig& device,
                      int64_t window_rows);
absl::Status MeasureCudaRates(const AttentionShape& shape, ThreadPool* pool, Rates& rates);

}  // namespace carrel::decoder
