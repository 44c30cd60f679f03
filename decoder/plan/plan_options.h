// What:   what is left to the plan when a context is opened (RetrievalConfig::plan): which zone, and whether all
//         rows are attended; and what the plan needs to know of this machine.
// Ownership: RetrievalConfig shares it. map_rows is called while the decoder is opened, by the thread that opens.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "decoder/config.h"
#include "decoder/plan/rates.h"
#include "decoder/plan/way.h"
#include "decoder/select/host_rows.h"

namespace carrel::decoder {

struct PlanOptions {
  std::shared_ptr<const Rates> rates;  // never null
  std::optional<Way> way;              // this one, whatever it costs
  // What these places take where they are chosen.
  HostZoneOptions host;
  DeviceZoneOptions device;
  std::array<std::string, 3> unfit;  // as PlanQuestion
  int64_t device_bytes = 0, host_bytes = 0;
  // Rows of the context in this host's memory, for a place that takes them; null: they cannot be had.
  std::function<absl::StatusOr<std::shared_ptr<const HostRows>>()> map_rows;
};

}  // namespace carrel::decoder
