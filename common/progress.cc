#include "common/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"

namespace carrel {

std::string FormatClock(absl::Duration duration) {
  const int64_t seconds =
      std::llround(absl::ToDoubleSeconds(std::max(duration, absl::ZeroDuration())));
  if (seconds >= 3600) {
    return absl::StrFormat("%d:%02d:%02d", seconds / 3600, seconds / 60 % 60, seconds % 60);
  }
  return absl::StrFormat("%d:%02d", seconds / 60, seconds % 60);
}

std::string FormatBytes(int64_t bytes) {
  constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB"};
  if (bytes < 1024) return absl::StrCat(bytes, " B");
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  return absl::StrFormat("%.*f %s", value < 10 ? 2 : value < 100 ? 1 : 0, value, kUnits[unit]);
}

Progress::Mode Progress::ModeFor(FILE* stream) {
  return isatty(fileno(stream)) ? Mode::kTerminal : Mode::kLines;
}

void Progress::Update(double share, const std::string& text) {
  Tell(share, text);
  if (mode_ != Mode::kTerminal) return;
  const absl::Time now = absl::Now();
  if (now - last_draw_ < absl::Milliseconds(100)) return;
  last_draw_ = now;
  Draw(share, text);
}

void Progress::Tell(double share, const std::string& text) {
  if (!tell_) return;
  const absl::Time now = absl::Now();
  if (now - last_draw_ < absl::Milliseconds(100)) return;
  last_draw_ = now;
  tell_(share, text);
}

void Progress::Step(double share, const std::string& text) {
  Tell(share, text);
  if (mode_ == Mode::kTerminal) {
    last_draw_ = absl::Now();
    Draw(share, text);
  } else if (mode_ == Mode::kLines) {
    std::fprintf(stream_, "%3.0f%%  %s\n", 100 * share, text.c_str());
    std::fflush(stream_);
  }
}

void Progress::Draw(double share, const std::string& text) {
  winsize size{};
  const int columns =
      ioctl(fileno(stream_), TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
  constexpr int kBar = 24;
  const int filled = static_cast<int>(std::clamp(share, 0.0, 1.0) * kBar);
  std::string line = absl::StrFormat("%3.0f%% [", 100 * share);
  line.append(filled, '#').append(kBar - filled, '.').append("] ").append(text);
  if (static_cast<int>(line.size()) >= columns) line.resize(columns - 1);
  std::fprintf(stream_, "\r%s\033[K", line.c_str());
  std::fflush(stream_);
  drawn_ = true;
}

void Progress::Clear() {
  if (!drawn_) return;
  std::fputs("\r\033[K", stream_);
  std::fflush(stream_);
  drawn_ = false;
}

}  // namespace carrel
