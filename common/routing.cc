#include "common/routing.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/checksum.h"

namespace carrel {

bool Answered(const absl::Status& status) { return status.GetPayload(kAnsweredUrl).has_value(); }

bool SaysServerIsGone(const absl::Status& status) {
  return absl::IsCancelled(status) || absl::StartsWith(status.message(), "Received RST_STREAM") ||
         absl::StartsWith(status.message(), "Stream removed");
}

std::string ContextHeaderValue(absl::string_view context) {
  std::string value;
  for (const char c : context) {
    const bool plain = absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '.' ||
                       c == '_' || c == '~';
    if (plain) {
      value += c;
    } else {
      absl::StrAppendFormat(&value, "%%%02X", static_cast<unsigned char>(c));
    }
  }
  return value;
}

std::vector<size_t> PlacesFor(absl::string_view context, const std::vector<std::string>& places) {
  std::vector<std::string> weights;
  weights.reserve(places.size());
  for (const std::string& place : places) {
    weights.push_back(Sha256Hex(absl::StrCat(place.size(), ":", place, context)));
  }
  std::vector<size_t> order(places.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return weights[a] > weights[b]; });
  return order;
}

}  // namespace carrel
