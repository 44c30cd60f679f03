#include "library/machine_rates.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "common/bf16.h"
#include "common/checksum.h"
#include "common/file.h"
#include "common/json.h"
#include "common/status.h"
#include "decoder/plan/way.h"
#include "kernels/attention/sparse_attention/sparse_spans.h"
#include "kernels/of_heads.h"
#include "kvstore/engine/attend_all.h"
#include "kvstore/index/int8_scan.h"
#include "model/digest_cache.h"
#include "nlohmann/json.hpp"

namespace carrel::library {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kVersion = 2;
constexpr double kMostSeconds = 10;

// Of this process: a plan stays as it is while the process lives, whoever measures meanwhile.
struct Known {
  absl::Mutex mu;
  std::map<std::string, std::shared_ptr<const decoder::Rates>> rates ABSL_GUARDED_BY(mu);
};
Known& TheKnown() {
  static Known& known = *new Known;
  return known;
}

std::string PathOf(const std::string& key) {
  const std::string folder = model::DigestCache::DefaultFolder();
  return folder.empty() ? "" : absl::StrCat(folder, "/", Sha256Hex(key).substr(0, 16), ".rates");
}

void Keep(const decoder::Rates& rates, const std::string& path) {
  if (path.empty()) return;
  std::error_code error;
  const fs::path folder = fs::path(path).parent_path();
  fs::create_directories(folder.parent_path(), error);
  (void)mkdir(folder.c_str(), S_IRWXU);  // the user's own
  // Another process may write the same: each under a name of its own, then renamed.
  const std::string own = absl::StrCat(path, ".", getpid());
  if (!WriteFileAtomically(own, RatesToText(rates)).ok()) return;
  fs::rename(own, path, error);
  if (error) fs::remove(own, error);
}

absl::StatusOr<decoder::Rates> Measure(model::Device device, const AttentionShape& shape,
                                       ThreadPool* pool) {
  return decoder::MeasureRates(device, shape, pool, [&](int64_t zone_rows, int64_t budget) {
    return TimeHostLayer(shape, zone_rows, budget, pool);
  });
}

using kvstore::Int8Memory;
using kvstore::Int8Scan;
using kvstore::MappedHead;
using kvstore::Rows;

// Between two visits of a layer's rows a token passes the model's weights: rows come from memory, not from a cache.
class Passage {
 public:
  void Pass() {
    for (size_t i = 0; i < bytes_.size(); i += kLine) passed_ += bytes_[i];
    // Read for its own sake: the compiler must not leave it out.
    asm volatile("" : : "r"(passed_) : "memory");
  }

 private:
  static constexpr size_t kBytes = size_t{128} << 20, kLine = 64;
  std::vector<uint8_t> bytes_ = std::vector<uint8_t>(kBytes, 1);
  uint64_t passed_ = 0;
};

// Rows that nobody made, of one layer.
class MadeUpLayer {
 public:
  MadeUpLayer(const AttentionShape& shape, int64_t tokens, ThreadPool* pool)
      : shape_(shape),
        zone_{0, tokens},
        pool_(pool),
        memory_(Int8Memory::Make(shape.kv_heads, tokens, shape.head_dim)) {
    std::mt19937_64 rng(1);
    std::normal_distribution<float> normal;
    const auto numbers = static_cast<size_t>(tokens * shape.head_dim);
    for (int32_t head = 0; head < shape.kv_heads; ++head) {
      for (std::vector<uint16_t>* rows : {&k_.emplace_back(numbers), &v_.emplace_back(numbers)}) {
        // Some thousands are drawn; the others repeat them.
        constexpr size_t kDrawn = 1 << 16;
        for (size_t i = 0; i < numbers; ++i)
          (*rows)[i] = i < kDrawn ? FloatToBf16(normal(rng)) : (*rows)[i - kDrawn + i % 7];
      }
      MappedHead& rows = heads_.emplace_back();
      rows.keys = Rows::FromMemory(k_.back().data(), tokens, shape.head_dim);
      rows.values = Rows::FromMemory(v_.back().data(), tokens, shape.head_dim);
      rows.scan = std::make_unique<Int8Scan>(rows.keys, Int8Memory::Take(memory_, head));
    }
  }

  // q [q_heads, head_dim]. Merging the spans is not timed.
  absl::Status AttendAll(const float* q) const {
    const std::vector<RowRange> spans = kvstore::AttendSpans(zone_);
    const auto count = static_cast<int64_t>(spans.size());
    const int64_t d = shape_.head_dim, group = shape_.group(), width = group * (d + 1);
    std::vector<float> states(static_cast<size_t>(shape_.kv_heads * count * width));
    const std::atomic<bool> cancelled{false};
    return InParallel(shape_.kv_heads * count, [&](int64_t i) {
      kvstore::AttendSpanParams params;
      params.rows = &heads_[static_cast<size_t>(i / count)];
      params.span = spans[static_cast<size_t>(i % count)];
      params.queries = q + i / count * group * d;
      params.tokens = 1;
      params.group = group;
      params.scale = kernels::ScaleOf(shape_);
      params.cancelled = &cancelled;
      params.out = &states[static_cast<size_t>(i * width)];
      params.lse = params.out + group * d;
      return kvstore::AttendSpan(params);
    });
  }

  absl::Status AttendBest(const float* q, int64_t budget) const {
    return InParallel(shape_.kv_heads, [&](int64_t head) -> absl::Status {
      thread_local kvstore::SearchScratch scratch;
      thread_local kvstore::SearchResult best;
      thread_local std::vector<const void*> v;
      thread_local std::vector<float> states;
      const MappedHead& rows = heads_[static_cast<size_t>(head)];
      const int64_t d = shape_.head_dim, group = shape_.group();
      RETURN_IF_ERROR(rows.scan->Search({.queries = q + head * group * d,
                                         .group = group,
                                         .scale = kernels::ScaleOf(shape_),
                                         .zone = zone_,
                                         .top_k = budget,
                                         .by_id = true,
                                         .pool = pool_},
                                        scratch, best));
      v.clear();
      for (const Position id : best.ids) v.push_back(rows.values.Address(id));
      auto params = kernels::OfHeads<kernels::SparseAttentionParams>(shape_);
      params.v = v.data();
      params.rows = static_cast<int64_t>(v.size());
      params.scores = best.scores.data();
      states.resize(static_cast<size_t>(group * (d + 1) + kernels::SparseSpanFloats(params)));
      params.out = states.data();
      params.lse = params.out + group * d;
      float* const others = params.lse + group;
      pool_->ParallelFor(kernels::SparseSpans(params.rows),
                         [&](int64_t span) { kernels::SparseAttentionSpan(params, span, others); });
      kernels::MergeSparseSpans(params, others);
      return absl::OkStatus();
    });
  }

 private:
  template <typename Body>
  absl::Status InParallel(int64_t count, const Body& body) const {
    std::vector<absl::Status> statuses(static_cast<size_t>(count));
    pool_->ParallelFor(count, [&](int64_t i) { statuses[static_cast<size_t>(i)] = body(i); });
    for (const absl::Status& status : statuses) RETURN_IF_ERROR(status);
    return absl::OkStatus();
  }

  const AttentionShape shape_;
  const RowRange zone_;
  ThreadPool* const pool_;
  const std::shared_ptr<Int8Memory> memory_;
  std::deque<std::vector<uint16_t>> k_, v_;
  std::deque<MappedHead> heads_;
};

}  // namespace

std::string RatesToText(const decoder::Rates& rates) {
  nlohmann::json ways = nlohmann::json::object();
  for (const decoder::Way& way : decoder::kWays) {
    const decoder::WayRate& rate = rates.of(way);
    ways[decoder::WayName(way)] = {{"fixed_s", rate.fixed},
                                   {"zone_row_s", rate.zone_row},
                                   {"chosen_row_s", rate.chosen_row},
                                   {"measured", rate.measured}};
  }
  return DumpJson(nlohmann::json{{"version", kVersion}, {"machine", rates.machine}, {"ways", ways}},
                  JsonLetters::kUtf8, 1);
}

absl::StatusOr<decoder::Rates> RatesFromText(absl::string_view text, const std::string& where) {
  ASSIGN_OR_RETURN(const nlohmann::json json, ParseJsonObject(text, where, kMessageBounds));
  const JsonFields fields(where, json);
  RETURN_IF_ERROR(fields.Int("version", kVersion, kVersion).status());
  decoder::Rates rates;
  ASSIGN_OR_RETURN(rates.machine, fields.String("machine"));
  ASSIGN_OR_RETURN(const nlohmann::json* const ways, fields.ObjectOr("ways"));
  if (ways == nullptr) return fields.Invalid("ways", "is absent");
  const JsonFields named(absl::StrCat(where, ": ways"), *ways);
  for (const decoder::Way& way : decoder::kWays) {
    const std::string name = decoder::WayName(way);
    ASSIGN_OR_RETURN(const nlohmann::json* const one, named.ObjectOr(name));
    if (one == nullptr) return named.Invalid(name, "is absent");
    const JsonFields rate(absl::StrCat(where, ": ", name), *one);
    decoder::WayRate& to = rates.of(way);
    ASSIGN_OR_RETURN(to.fixed, rate.Number("fixed_s", 0, kMostSeconds));
    ASSIGN_OR_RETURN(to.zone_row, rate.Number("zone_row_s", 0, kMostSeconds));
    ASSIGN_OR_RETURN(to.chosen_row, rate.Number("chosen_row_s", 0, kMostSeconds));
    ASSIGN_OR_RETURN(to.measured, rate.BoolOr("measured", false));
  }
  return rates;
}

absl::StatusOr<std::shared_ptr<const decoder::Rates>> MachineRates(model::Device device,
                                                                   const AttentionShape& shape,
                                                                   ThreadPool* pool) {
  const int threads = pool->threads() + 1;
  ASSIGN_OR_RETURN(const std::string key, decoder::RatesKey(device, shape, threads));
  {
    absl::MutexLock lock(&TheKnown().mu);
    if (const auto known = TheKnown().rates.find(key); known != TheKnown().rates.end())
      return known->second;
  }
  std::shared_ptr<const decoder::Rates> rates;
  const std::string path = PathOf(key);
  const absl::StatusOr<std::string> text =
      path.empty() ? absl::NotFoundError("no cache") : ReadFile(path);
  if (text.ok()) {
    absl::StatusOr<decoder::Rates> kept = RatesFromText(*text, path);
    if (kept.ok() && kept->machine == key)
      rates = std::make_shared<const decoder::Rates>(*std::move(kept));
  }
  if (rates == nullptr && (device == model::Device::kCuda || !path.empty())) {
    absl::StatusOr<decoder::Rates> measured = Measure(device, shape, pool);
    if (measured.ok()) {
      Keep(*measured, path);
      rates = std::make_shared<const decoder::Rates>(*std::move(measured));
    } else if (!absl::IsResourceExhausted(measured.status())) {
      return measured.status();
    }
  }
  if (rates == nullptr)
    rates = std::make_shared<const decoder::Rates>(decoder::AssumedRates(device, shape, threads));
  // The first one counts, where two threads measured.
  absl::MutexLock lock(&TheKnown().mu);
  return TheKnown().rates.emplace(key, std::move(rates)).first->second;
}

absl::StatusOr<std::shared_ptr<const decoder::Rates>> MeasureMachine(model::Device device,
                                                                     const AttentionShape& shape,
                                                                     ThreadPool* pool,
                                                                     std::string* path) {
  ASSIGN_OR_RETURN(decoder::Rates measured, Measure(device, shape, pool));
  const std::string kept = PathOf(measured.machine);
  Keep(measured, kept);
  if (path != nullptr) *path = kept;
  absl::MutexLock lock(&TheKnown().mu);
  auto& known = TheKnown().rates[measured.machine];
  known = std::make_shared<const decoder::Rates>(std::move(measured));
  return known;
}

absl::StatusOr<decoder::TimedLayer> TimeHostLayer(const AttentionShape& shape, int64_t zone_rows,
                                                  int64_t budget, ThreadPool* pool) {
  constexpr int kTimes = 7;
  const MadeUpLayer layer(shape, zone_rows, pool);
  Passage between;
  std::mt19937_64 rng(2);
  std::normal_distribution<float> normal;
  std::vector<float> q(static_cast<size_t>(shape.q_heads * shape.head_dim));
  double seconds = INFINITY;
  for (int i = 0; i < kTimes; ++i) {
    for (float& x : q) x = normal(rng);
    between.Pass();
    const absl::Time start = absl::Now();
    RETURN_IF_ERROR(budget > 0 ? layer.AttendBest(q.data(), budget) : layer.AttendAll(q.data()));
    if (i == 0) continue;  // packs keys
    seconds = std::min(seconds, absl::ToDoubleSeconds(absl::Now() - start));
  }
  return decoder::TimedLayer{
      static_cast<double>(zone_rows),
      static_cast<double>(shape.kv_heads * (budget > 0 ? budget : zone_rows)), seconds};
}

}  // namespace carrel::library
