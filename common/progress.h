// What:    where a long job stands, for a person: a bar redrawn in place on a terminal, a plain line
//          per step elsewhere.
// Ownership: the stream outlives it and is not closed.
// Threads: one.
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <string>
#include <utility>

#include "absl/time/time.h"

namespace carrel {

// "1:02:03", "4:05", "0:07"
std::string FormatClock(absl::Duration duration);
// "1.5 GiB", "312 MiB", "17 B"
std::string FormatBytes(int64_t bytes);

class Progress {
 public:
  // Draws on `stream` (usually stderr); `terminal` decides the form. quiet draws nothing.
  enum class Mode : uint8_t { kQuiet = 0, kLines = 1, kTerminal = 2 };
  explicit Progress(Mode mode, FILE* stream = stderr) : mode_(mode), stream_(stream) {}
  // Draws nothing, but tells: the share, and the text of Update and Step, at most ten times a second.
  explicit Progress(std::function<void(double, const std::string&)> tell)
      : mode_(Mode::kQuiet), stream_(stderr), tell_(std::move(tell)) {}
  ~Progress() { Clear(); }
  // kTerminal if the stream is one, else kLines.
  static Mode ModeFor(FILE* stream);

  // share of the whole job in [0, 1]; `text` says where it is. Redrawn at most ten times a second.
  void Update(double share, const std::string& text);
  // A step is over: elsewhere than on a terminal this prints `text` as a line.
  void Step(double share, const std::string& text);
  // Wipes the bar, so that something else can be printed.
  void Clear();

 private:
  void Draw(double share, const std::string& text);
  void Tell(double share, const std::string& text);
  const Mode mode_;
  FILE* const stream_;
  const std::function<void(double, const std::string&)> tell_;
  absl::Time last_draw_ = absl::InfinitePast();
  bool drawn_ = false;
};

}  // namespace carrel
