#include "serving/stop_filter.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace carrel::serving {

std::string StopFilter::Push(absl::string_view piece) {
  if (stopped_) return "";
  absl::StrAppend(&held_, piece);
  // The one that is whole first, however the text came.
  size_t first = std::string::npos, end = std::string::npos;
  for (const std::string& stop : stops_) {
    const size_t at = held_.find(stop);
    if (at == std::string::npos) continue;
    if (at + stop.size() < end || (at + stop.size() == end && at < first)) {
      first = at;
      end = at + stop.size();
    }
  }
  if (first != std::string::npos) {
    stopped_ = true;
    return std::exchange(held_, "").substr(0, first);
  }
  size_t keep = 0;  // bytes at the end that a stop text may begin with
  for (const std::string& stop : stops_) {
    for (size_t n = std::min(held_.size(), stop.size() - 1); n > keep; --n) {
      if (held_.compare(held_.size() - n, n, stop, 0, n) == 0) keep = n;
    }
  }
  std::string out = held_.substr(0, held_.size() - keep);
  held_.erase(0, out.size());
  return out;
}

std::string StopFilter::Finish() { return stopped_ ? "" : std::exchange(held_, ""); }

}  // namespace carrel::serving
