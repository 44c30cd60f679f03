#include "decoder/plan/way.h"

#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace carrel::decoder {
namespace {

absl::string_view PlaceName(Place place) {
  switch (place) {
    case Place::kStore:
      return "store";
    case Place::kHost:
      return "host";
    case Place::kDevice:
      return "device";
  }
  return "store";
}

absl::string_view Where(Place place) {
  switch (place) {
    case Place::kStore:
      return "at the store";
    case Place::kHost:
      return "in this host's memory";
    case Place::kDevice:
      return "on the GPU";
  }
  return "";
}

}  // namespace

std::string WayName(Way way) {
  return absl::StrCat(PlaceName(way.place), way.dense ? "-dense" : "");
}

absl::StatusOr<Way> ParseWay(absl::string_view name) {
  std::vector<std::string> known;
  for (const Way& way : kWays) {
    known.push_back(WayName(way));
    if (known.back() == name) return way;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("plan=", name, " is none of auto, ", absl::StrJoin(known, ", ")));
}

std::string DescribeWay(Way way) {
  return absl::StrCat(way.dense ? "dense attention " : "selected rows ", Where(way.place));
}

}  // namespace carrel::decoder
