#include "audit/html_figures.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

namespace carrel::audit {
namespace {

using Rgb = std::array<double, 3>;

constexpr Rgb kNoValue = {0.86, 0.86, 0.86};
constexpr std::array<Rgb, 4> kBlues = {
    {{0.925, 0.953, 0.976}, {0.600, 0.773, 0.890}, {0.192, 0.510, 0.741}, {0.043, 0.196, 0.384}}};
constexpr std::array<Rgb, 4> kOchres = {
    {{0.992, 0.957, 0.886}, {0.969, 0.788, 0.494}, {0.827, 0.502, 0.161}, {0.400, 0.188, 0.027}}};
// Distinct without colour vision by lightness, and each cell also shows its kind's letters.
constexpr std::array<const char*, 5> kKindColours = {"#e8eef4", "#9cc3e0", "#f0c27a", "#4c86b0",
                                                     "#7a4a1a"};

Rgb ColourAt(Hue hue, double t) {
  if (!std::isfinite(t)) return kNoValue;
  const std::array<Rgb, 4>& stops = hue == Hue::kBlue ? kBlues : kOchres;
  const double at = std::clamp(t, 0.0, 1.0) * (stops.size() - 1);
  const auto low = std::min(static_cast<size_t>(at), stops.size() - 2);
  Rgb colour;
  for (size_t c = 0; c < 3; ++c) {
    colour[c] = stops[low][c] + (stops[low + 1][c] - stops[low][c]) * (at - double(low));
  }
  return colour;
}

std::string Hex(const Rgb& colour) {
  const auto byte = [](double x) { return static_cast<int>(std::lround(x * 255)); };
  return absl::StrFormat("#%02x%02x%02x", byte(colour[0]), byte(colour[1]), byte(colour[2]));
}

const char* InkOn(const Rgb& colour) {
  const double light = 0.2126 * colour[0] + 0.7152 * colour[1] + 0.0722 * colour[2];
  return light > 0.45 ? "#14202b" : "#ffffff";
}

constexpr int kLeastMapWidth = 144;

// Cells of a map: narrow where there are many heads, so that a row of maps fits the page.
struct Grid {
  int cell_width, cell_height;
  int32_t layers, heads;
  bool with_text;

  static constexpr int kLeft = 30, kTop = 18;

  Grid(int32_t layers, int32_t heads)
      : cell_width(std::clamp(300 / std::max(heads, 1), 8, 56)),
        cell_height(layers > 48   ? 12
                    : layers > 24 ? 16
                                  : 24),
        layers(layers),
        heads(heads),
        with_text(cell_width >= 34 && cell_height >= 14) {}

  int width() const { return kLeft + cell_width * heads + 2; }
  int height() const { return kTop + cell_height * layers + 2; }

  std::string Open() const {
    std::string svg =
        absl::StrFormat("<svg width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\" role=\"img\">\n",
                        width(), height(), width(), height());
    const int head_step = std::max(1, (26 + cell_width - 1) / cell_width);
    for (int32_t h = 0; h < heads; h += head_step) {
      absl::StrAppendFormat(&svg,
                            "<text class=\"tick\" x=\"%d\" y=\"12\" text-anchor=\"middle\">%d"
                            "</text>\n",
                            kLeft + cell_width * h + cell_width / 2, h);
    }
    const int layer_step = cell_height >= 14 ? 1 : 2;
    for (int32_t l = 0; l < layers; l += layer_step) {
      absl::StrAppendFormat(&svg,
                            "<text class=\"tick\" x=\"%d\" y=\"%d\" text-anchor=\"end\">%d"
                            "</text>\n",
                            kLeft - 6, kTop + cell_height * l + cell_height / 2 + 4, l);
    }
    return svg;
  }

  std::string Cell(size_t at, absl::string_view fill, absl::string_view ink, absl::string_view text,
                   absl::string_view hover) const {
    const int x = kLeft + cell_width * static_cast<int>(at % static_cast<size_t>(heads));
    const int y = kTop + cell_height * static_cast<int>(at / static_cast<size_t>(heads));
    const int gap = cell_width >= 16 ? 2 : 1;
    std::string svg = absl::StrFormat(
        "<g><title>%s</title><rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\" fill=\"%s\"/>",
        EscapeHtml(hover), x, y, cell_width - gap, cell_height - gap, fill);
    if (with_text && !text.empty()) {
      absl::StrAppendFormat(&svg,
                            "<text class=\"cell\" x=\"%d\" y=\"%d\" text-anchor=\"middle\" "
                            "fill=\"%s\">%s</text>",
                            x + (cell_width - gap) / 2, y + cell_height / 2 + 3, ink,
                            EscapeHtml(text));
    }
    return svg + "</g>\n";
  }
};

std::string FigureHead(const std::string& title, const std::string& note, int width) {
  std::string head =
      absl::StrCat("<figure class=\"map\" style=\"width:", std::max(width, kLeastMapWidth),
                   "px\"><figcaption><b>", EscapeHtml(title), "</b>");
  if (!note.empty()) absl::StrAppend(&head, "<span>", EscapeHtml(note), "</span>");
  return head + "</figcaption>\n";
}

std::string Legend(const HeatMap& map, int width) {
  constexpr int kSteps = 24;
  const int bar = std::clamp(width - Grid::kLeft - 2, 100, 300);
  std::string svg = absl::StrFormat(
      "<svg class=\"legend\" width=\"%d\" height=\"28\" viewBox=\"0 0 %d 28\" role=\"img\">",
      Grid::kLeft + bar, Grid::kLeft + bar);
  for (int i = 0; i < kSteps; ++i) {
    const double x = Grid::kLeft + double(bar) * i / kSteps;
    absl::StrAppendFormat(&svg,
                          "<rect x=\"%.1f\" y=\"2\" width=\"%.1f\" height=\"8\" fill=\"%s\"/>", x,
                          double(bar) / kSteps + 0.3, Hex(ColourAt(map.hue, (i + 0.5) / kSteps)));
  }
  absl::StrAppendFormat(&svg, "<text class=\"tick\" x=\"%d\" y=\"23\">%s</text>", Grid::kLeft,
                        EscapeHtml(map.light_label));
  absl::StrAppendFormat(&svg,
                        "<text class=\"tick\" x=\"%d\" y=\"23\" text-anchor=\"end\">%s</text>"
                        "</svg>\n",
                        Grid::kLeft + bar, EscapeHtml(map.dark_label));
  return svg;
}

std::string XTick(double x) {
  if (x >= 1e6) return absl::StrFormat("%gM", x / 1e6);
  if (x >= 1e4) return absl::StrFormat("%gk", x / 1e3);
  return absl::StrFormat("%g", x);
}

std::vector<double> LinearTicks(double low, double high) {
  const double rough = (high - low) / 5;
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  double step = power;
  for (const double m : {1.0, 2.0, 5.0, 10.0}) {
    step = m * power;
    if (step >= rough) break;
  }
  const auto first = static_cast<int64_t>(std::ceil(low / step - 1e-9));
  const auto last = static_cast<int64_t>(std::floor(high / step + 1e-9));
  std::vector<double> ticks;
  for (int64_t i = first; i <= last; ++i) ticks.push_back(static_cast<double>(i) * step);
  return ticks;
}

// Over several doublings 1, 2 and 5 times powers of ten, or every power alone if these are too
// many; round numbers at equal distances over less.
std::vector<double> LogTicks(double low, double high) {
  if (high / low < 6) return LinearTicks(low, high);
  std::vector<double> ticks;
  for (const bool powers_alone : {false, true}) {
    ticks.clear();
    const int last = static_cast<int>(std::ceil(std::log10(high)));
    for (int e = static_cast<int>(std::floor(std::log10(low))); e <= last; ++e) {
      for (const double m : {1.0, 2.0, 5.0}) {
        const double tick = m * std::pow(10.0, e);
        if (powers_alone && m != 1) continue;
        if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push_back(tick);
      }
    }
    if (ticks.size() <= 9) break;
  }
  return ticks;
}

class Plot {
 public:
  static constexpr int kWidth = 580, kHeight = 300;
  static constexpr int kLeft = 58, kRight = 18, kTop = 14, kBottom = 44;

  explicit Plot(const CurveChart& chart) : chart_(chart) {
    low_ = chart.has_exact ? chart.exact_x : INFINITY;
    high_ = chart.has_exact ? chart.exact_x : 0;
    for (const CurveLine& line : chart.lines) {
      for (const CurveNode& node : line.nodes) {
        low_ = std::min(low_, node.x);
        high_ = std::max(high_, node.x);
      }
    }
    if (!(low_ > 0) || !std::isfinite(low_)) low_ = 1e-6;
    high_ = std::max(high_, low_);
    // One point alone stands in the middle.
    const double margin = high_ / low_ < 1.01 ? 1.5 : std::pow(high_ / low_, 0.08);
    low_ /= margin;
    high_ *= margin;
  }

  double X(double x) const {
    const double share = (std::log(x) - std::log(low_)) / (std::log(high_) - std::log(low_));
    return kLeft + share * (kWidth - kLeft - kRight);
  }
  double Y(double y) const {
    const double share = (y - chart_.y_low) / (chart_.y_high - chart_.y_low);
    return kHeight - kBottom - std::clamp(share, 0.0, 1.0) * (kHeight - kTop - kBottom);
  }

  std::string Axes() const {
    std::string svg;
    const int bottom = kHeight - kBottom, right = kWidth - kRight;
    for (const double tick : LinearTicks(chart_.y_low, chart_.y_high)) {
      absl::StrAppendFormat(&svg,
                            "<line class=\"grid\" x1=\"%d\" x2=\"%d\" y1=\"%.1f\" y2=\"%.1f\"/>"
                            "<text class=\"tick\" x=\"%d\" y=\"%.1f\" text-anchor=\"end\">%s"
                            "</text>\n",
                            kLeft, right, Y(tick), Y(tick), kLeft - 7, Y(tick) + 4,
                            chart_.y_tick(tick));
    }
    for (const double tick : LogTicks(low_, high_)) {
      absl::StrAppendFormat(&svg,
                            "<line class=\"grid\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%d\" y2=\"%d\"/>"
                            "<text class=\"tick\" x=\"%.1f\" y=\"%d\" text-anchor=\"middle\">%s"
                            "</text>\n",
                            X(tick), X(tick), kTop, bottom, X(tick), bottom + 16, XTick(tick));
    }
    absl::StrAppendFormat(&svg,
                          "<line class=\"axis\" x1=\"%d\" x2=\"%d\" y1=\"%d\" y2=\"%d\"/>\n"
                          "<text class=\"name\" x=\"%d\" y=\"%d\" text-anchor=\"end\">%s</text>\n",
                          kLeft, right, bottom, bottom, right, kHeight - 8,
                          EscapeHtml(chart_.x_axis));
    return svg;
  }

  std::string Exact() const {
    if (!chart_.has_exact) return "";
    const double x = X(chart_.exact_x), y = Y(chart_.exact_y);
    const bool leftmost = x < kLeft + 90;
    return absl::StrFormat(
        "<g><title>%s</title><line class=\"exact\" x1=\"%.1f\" x2=\"%.1f\" y1=\"%d\" y2=\"%d\"/>"
        "<rect class=\"exactdot\" x=\"%.1f\" y=\"%.1f\" width=\"8\" height=\"8\"/>"
        "<text class=\"exactname\" x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">exact search</text>"
        "</g>\n",
        EscapeHtml(chart_.exact_hover), x, x, kTop, kHeight - kBottom, x - 4, y - 4,
        leftmost ? x + 9 : x - 9,
        y < kHeight / 2 ? double(kHeight - kBottom - 8) : double(kTop + 12),
        leftmost ? "start" : "end");
  }

  std::string Line(const CurveLine& line) const {
    std::string path;
    for (const CurveNode& node : line.nodes) {
      absl::StrAppendFormat(&path, "%s%.1f %.1f", path.empty() ? "M" : " L", X(node.x), Y(node.y));
    }
    std::string svg = absl::StrFormat("<path class=\"%s\" d=\"%s\"><title>%s</title></path>\n",
                                      line.thin ? "thin" : "line", path, EscapeHtml(line.name));
    for (const CurveNode& node : line.nodes) {
      const double x = X(node.x), y = Y(node.y);
      absl::StrAppendFormat(&svg,
                            "<g><title>%s</title><circle class=\"%s\" cx=\"%.1f\" cy=\"%.1f\" "
                            "r=\"%g\"/>",
                            EscapeHtml(node.hover),
                            line.thin     ? "thindot"
                            : node.marked ? "judged"
                                          : "dot",
                            x, y,
                            line.thin     ? 2.2
                            : node.marked ? 6.0
                                          : 4.0);
      if (!node.label.empty()) {
        const bool below = y < kTop + 26;
        absl::StrAppendFormat(&svg,
                              "<text class=\"label\" x=\"%.1f\" y=\"%.1f\" "
                              "text-anchor=\"middle\">%s</text>",
                              x, below ? y + 20 : y - 11, EscapeHtml(node.label));
      }
      svg += "</g>\n";
    }
    return svg;
  }

 private:
  const CurveChart& chart_;
  double low_, high_;
};

}  // namespace

std::string EscapeHtml(absl::string_view text) {
  return absl::StrReplaceAll(
      text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}, {"'", "&#39;"}});
}

std::string HeatMapFigure(const HeatMap& map) {
  const Grid grid(map.layers, map.heads);
  std::string figure = FigureHead(map.title, map.note, grid.width());
  absl::StrAppend(&figure, grid.Open());
  for (size_t i = 0; i < map.values.size(); ++i) {
    const Rgb colour = ColourAt(map.hue, (map.values[i] - map.light) / (map.dark - map.light));
    absl::StrAppend(&figure, grid.Cell(i, Hex(colour), InkOn(colour), map.cells[i], map.hovers[i]));
  }
  absl::StrAppend(&figure, "</svg>\n", Legend(map, grid.width()), "</figure>\n");
  return figure;
}

std::string KindMapFigure(const KindMap& map) {
  const Grid grid(map.layers, map.heads);
  const std::set<std::string> names(map.kinds.begin(), map.kinds.end());
  std::map<std::string, size_t> colour_of;
  for (const std::string& name : names) {
    const size_t next = colour_of.size() % kKindColours.size();
    colour_of[name] = next;
  }
  const auto ink = [](size_t colour) { return colour >= 3 ? "#ffffff" : "#14202b"; };
  std::string figure = FigureHead(map.title, "", grid.width());
  absl::StrAppend(&figure, grid.Open());
  for (size_t i = 0; i < map.kinds.size(); ++i) {
    const size_t colour = colour_of[map.kinds[i]];
    absl::StrAppend(&figure,
                    grid.Cell(i, kKindColours[colour], ink(colour), map.kinds[i], map.hovers[i]));
  }
  absl::StrAppend(&figure, "</svg>\n<p class=\"kinds\">");
  for (const auto& [name, colour] : colour_of) {
    absl::StrAppend(&figure, "<i style=\"background:", kKindColours[colour], "\"></i>",
                    EscapeHtml(name), " ");
  }
  return figure + "</p></figure>\n";
}

std::string CurveFigure(const CurveChart& chart) {
  const Plot plot(chart);
  std::string figure =
      absl::StrCat("<figure class=\"curve\"><figcaption><b>", EscapeHtml(chart.title), "</b><span>",
                   EscapeHtml(chart.y_axis), "</span></figcaption>\n");
  absl::StrAppendFormat(&figure,
                        "<svg width=\"%d\" height=\"%d\" viewBox=\"0 0 %d %d\" role=\"img\">\n",
                        Plot::kWidth, Plot::kHeight, Plot::kWidth, Plot::kHeight);
  absl::StrAppend(&figure, plot.Axes(), plot.Exact());
  for (const bool thin : {true, false}) {
    for (const CurveLine& line : chart.lines) {
      if (line.thin == thin) absl::StrAppend(&figure, plot.Line(line));
    }
  }
  return figure + "</svg></figure>\n";
}

}  // namespace carrel::audit
