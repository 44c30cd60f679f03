// What:   chooses how a token attends to a context's zone: of the ways that keep the fidelity and fit into memory the
//         one that takes the least time on this machine.
// Math:   a way's time is the sum over the layers that ask for the zone of rates.h's; its error is what the fidelity's rows
//         promise (fidelity.h), and 0 where all rows are attended.
// Rule:   the plan depends on the document, the machine and the flags, never on the load of the moment.
// Threads: any.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "common/ids.h"
#include "decoder/config.h"
#include "decoder/plan/rates.h"
#include "decoder/plan/way.h"
#include "decoder/select/host_rows.h"

namespace carrel::decoder {

struct PlanQuestion {
  AttentionShape shape;
  int64_t zone_layers = 0;  // that ask for rows of the zone
  int64_t zone_rows = 0;
  int64_t chosen_rows =
      0;  // a token's, of all layers and KV heads, at the fidelity; < 0: it is not known
  double promised = 0;  // error of these; < 0: it is not known
  // What the flags say of the way; none: whatever is best.
  std::optional<Place> place;
  std::optional<bool> dense;
  // Why a place cannot be had at all; empty: it can.
  std::array<std::string, 3> unfit;
  // Of the device's memory: what there is, and what the model takes without the zone. 0: there is none.
  int64_t device_bytes = 0, model_bytes = 0;
  int64_t host_bytes = 0;  // of this host's memory, for rows that are pinned; 0: no bound
};

// What is left to the plan when a context is opened (RetrievalConfig::plan, which shares it): which zone, and whether all
// rows are attended; and what the plan needs to know of this machine.
struct PlanOptions {
  std::shared_ptr<const Rates> rates;  // never null
  std::optional<Way> way;              // this one, whatever it costs
  // What these places take where they are chosen.
  HostZoneOptions host;
  DeviceZoneOptions device;
  std::array<std::string, 3> unfit;  // as PlanQuestion
  int64_t device_bytes = 0, host_bytes = 0;
  // Rows of the context in this host's memory, for a place that takes them; null: they cannot be had. Called by the thread
  // that opens.
  std::function<absl::StatusOr<std::shared_ptr<const HostRows>>()> map_rows;
};

struct PlannedWay {
  Way way;
  double seconds = 0;  // of attention to the zone, per token
  double error = 0;    // promised
  int64_t bytes = 0;   // of the device's memory, or pinned
  std::string unfit;   // why it cannot be taken; empty: it can
};

struct Plan {
  std::array<PlannedWay, kWays.size()> ways;
  size_t chosen = 0;
  std::string machine;  // of the rates
  const PlannedWay& taken() const { return ways[chosen]; }
};

// FailedPrecondition: no way is left (names why each one is not).
absl::StatusOr<Plan> MakePlan(const PlanQuestion& question, const Rates& rates);

// "device-dense: dense attention on the GPU, 0.41 ms of a token, error 0", with a line for each other way: its time, or
// why it is not taken.
std::string PlanTable(const Plan& plan);

}  // namespace carrel::decoder
