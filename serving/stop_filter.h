// What:   an answer's text up to the first of its stop texts, piece by piece as it comes.
// Threads: one at a time.
// Example: StopFilter filter({"\n\n"});
//          out += filter.Push(piece);    // until filter.stopped()
//          out += filter.Finish();
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"

namespace carrel::serving {

// Hands out text as soon as it cannot be part of a stop text, and nothing of it or behind it.
class StopFilter {
 public:
  explicit StopFilter(std::vector<std::string> stops) : stops_(std::move(stops)) {}
  std::string Push(absl::string_view piece);
  std::string Finish();  // what was held back
  bool stopped() const { return stopped_; }

 private:
  const std::vector<std::string> stops_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace carrel::serving
