#include "decoder/plan/rates.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "common/bf16.h"
#include "common/status.h"
#include "decoder/select/host_rows.h"
#include "decoder/zone/host_zone.h"

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

// Rows that nobody made, of one layer.
class MadeUpRows final : public HostRows {
 public:
  MadeUpRows(const AttentionShape& shape, int64_t tokens) : tokens_(tokens) {
    std::mt19937_64 rng(1);
    std::normal_distribution<float> normal;
    std::vector<float> row(static_cast<size_t>(shape.head_dim));
    const auto numbers = static_cast<size_t>(shape.kv_heads * tokens * shape.head_dim);
    for (std::vector<uint16_t>* rows : {&k_, &v_}) {
      rows->resize(numbers);
      // A few thousand are drawn; the others repeat them.
      constexpr size_t kDrawn = 1 << 18;
      for (size_t i = 0; i < numbers; ++i)
        (*rows)[i] = i < kDrawn ? FloatToBf16(normal(rng)) : (*rows)[i - kDrawn + i % 7];
    }
    for (int32_t head = 0; head < shape.kv_heads; ++head) {
      HeadView view;
      const size_t at = static_cast<size_t>(head) * static_cast<size_t>(tokens * shape.head_dim);
      view.k_segments = {reinterpret_cast<const char*>(&k_[at])};
      view.v_segments = {reinterpret_cast<const char*>(&v_[at])};
      view.segment_rows = tokens;
      view.row_bytes = shape.head_dim * 2;
      heads_.push_back(std::move(view));
    }
  }
  int64_t tokens() const override { return tokens_; }
  const HeadView& At(Layer, KvHead head) const override {
    return heads_[static_cast<size_t>(head.value())];
  }
  absl::StatusOr<std::vector<float>> SampledQueries(Layer, KvHead) const override {
    return absl::NotFoundError("rows that are made up have no queries");
  }
  absl::StatusOr<HeadCodes> StoredCodes(Layer, KvHead) const override {
    return absl::NotFoundError("rows that are made up have no codes");
  }

 private:
  const int64_t tokens_;
  std::vector<uint16_t> k_, v_;
  std::vector<HeadView> heads_;
};

// Between two visits of a layer's rows a token passes the model's weights: rows come from memory, not from a cache.
class Passage {
 public:
  Passage() : bytes_(kBytes, 1) {}
  void Pass() {
    for (size_t i = 0; i < bytes_.size(); i += kLine) passed_ += bytes_[i];
    // Read for its own sake: the compiler must not leave it out.
    asm volatile("" : : "r"(passed_) : "memory");
  }

 private:
  static constexpr size_t kBytes = size_t{128} << 20, kLine = 64;
  std::vector<uint8_t> bytes_;
  uint64_t passed_ = 0;
};

// A token's attention of one layer to `tokens` rows: to all, or to `budget` of each KV head.
absl::StatusOr<TimedLayer> TimeHostLayer(const AttentionShape& of_model, int64_t tokens,
                                         int64_t budget, Passage& between, ThreadPool* pool) {
  OpenedContext context;
  context.shape = of_model;
  context.shape.layers = 1;
  context.tokens = tokens;
  context.zone = {0, tokens};
  context.pool = pool;
  context.rows = std::make_shared<MadeUpRows>(context.shape, tokens);
  context.selections = {budget > 0 ? select::Selection(select::TopK{budget}) : select::All()};
  context.config.selection = context.selections[0];
  context.config.estimate = Estimate::kOff;
  std::vector<LayerStatistics> statistics(1);
  ASSIGN_OR_RETURN(const std::unique_ptr<HostZone> zone,
                   HostZone::Create(HostZoneOptions{}, context, &statistics));
  std::mt19937_64 rng(2);
  std::normal_distribution<float> normal;
  std::vector<float> q(static_cast<size_t>(of_model.q_heads * of_model.head_dim));
  Partial partial;
  constexpr int kTimes = 7;
  std::vector<double> seconds;
  for (int i = 0; i < kTimes; ++i) {
    for (float& x : q) x = normal(rng);
    between.Pass();
    const absl::Time start = absl::Now();
    RETURN_IF_ERROR(zone->Start(Layer(0), q.data(), 1));
    RETURN_IF_ERROR(zone->Finish(Layer(0), q.data(), 1, partial));
    if (i > 0)
      seconds.push_back(absl::ToDoubleSeconds(absl::Now() - start));  // the first packs keys
  }
  return TimedLayer{static_cast<double>(tokens),
                    static_cast<double>(context.shape.kv_heads * (budget > 0 ? budget : tokens)),
                    *std::min_element(seconds.begin(), seconds.end())};
}

// Of the ways in this host; those of a store in this process take as long, and its questions and replies.
absl::Status MeasureHostRates(const AttentionShape& shape, ThreadPool* pool, Rates& rates) {
  constexpr int64_t kShort = 1024, kLong = 16384, kFew = 64, kMany = 512;
  Passage between;
  ASSIGN_OR_RETURN(const TimedLayer dense_short, TimeHostLayer(shape, kShort, 0, between, pool));
  ASSIGN_OR_RETURN(const TimedLayer dense_long, TimeHostLayer(shape, kLong, 0, between, pool));
  ASSIGN_OR_RETURN(const TimedLayer few_short, TimeHostLayer(shape, kShort, kFew, between, pool));
  ASSIGN_OR_RETURN(const TimedLayer few_long, TimeHostLayer(shape, kLong, kFew, between, pool));
  ASSIGN_OR_RETURN(const TimedLayer many_long, TimeHostLayer(shape, kLong, kMany, between, pool));
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
                                   ThreadPool* pool) {
  const int threads = pool->threads() + 1;
  ASSIGN_OR_RETURN(const std::string machine, RatesKey(device, shape, threads));
  Rates rates = AssumedRates(device, shape, threads);
  rates.machine = machine;
  if (device == model::Device::kCuda) {
    RETURN_IF_ERROR(MeasureCudaRates(shape, pool, rates));
  } else {
    RETURN_IF_ERROR(MeasureHostRates(shape, pool, rates));
  }
  return rates;
}

}  // namespace carrel::decoder
