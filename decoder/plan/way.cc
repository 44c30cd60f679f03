#include "decoder/plan/way.h"

#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace carrel::decoder {
namespace {

// By their Place.
constexpr struct {
  const char *name, *where;
} kPlaces[] = {
    {"store", "at the store"}, {"host", "in this host's memory"}, {"device", "on the GPU"}};

}  // namespace

std::string WayName(Way way) {
  return absl::StrCat(kPlaces[static_cast<size_t>(way.place)].name, way.dense ? "-dense" : "");
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
  return absl::StrCat(way.dense ? "dense attention " : "selected rows ",
                      kPlaces[static_cast<size_t>(way.place)].where);
}

}  // namespace carrel::decoder
