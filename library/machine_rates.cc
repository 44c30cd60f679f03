#include "library/machine_rates.h"

#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/checksum.h"
#include "common/file.h"
#include "common/json.h"
#include "common/status.h"
#include "decoder/plan/way.h"
#include "library/layer_times.h"
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

}  // namespace carrel::library
