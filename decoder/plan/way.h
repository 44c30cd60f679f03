// What:   the ways to attend to the zone of a context: where its rows lie, and whether all of them are
//         attended (dense) or those that a fidelity asks for (selected, with the estimation term).
// Names:  PLACE is selected, PLACE-dense is dense: what `--plan` takes, and what plans print.
// Errors: InvalidArgument names what is none of them.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace carrel::decoder {

enum class Place : uint8_t {
  kStore = 0,   // the store searches
  kHost = 1,    // this process: rows that are mapped here, with a GPU rows in pinned memory
  kDevice = 2,  // the GPU, which holds all rows
};

struct Way {
  Place place = Place::kStore;
  bool dense = false;
  bool operator==(const Way&) const = default;
};

// In the order of which one is taken where two cost the same.
inline constexpr std::array<Way, 6> kWays = {{{Place::kStore, false},
                                              {Place::kStore, true},
                                              {Place::kHost, false},
                                              {Place::kHost, true},
                                              {Place::kDevice, false},
                                              {Place::kDevice, true}}};

// Its place in kWays.
inline constexpr size_t WayIndex(Way way) {
  return 2 * static_cast<size_t>(way.place) + (way.dense ? 1 : 0);
}

std::string WayName(Way way);  // "device-dense"
absl::StatusOr<Way> ParseWay(absl::string_view name);
// "dense attention on the GPU"
std::string DescribeWay(Way way);

}  // namespace carrel::decoder
