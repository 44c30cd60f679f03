// What:   the figures of the page as inline SVG: maps of heads and curves. Every cell and point
//         has a <title>, which browsers show on hover without a script.
// Edge:   values that are not finite are drawn grey.   Threads: any.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace carrel::audit {

std::string EscapeHtml(absl::string_view text);

// A colour scale of one hue: light is as it should be, dark wants a look. Readable without colour
// vision and in grey.
enum class Hue : uint8_t { kBlue = 0, kOchre = 1 };

struct HeatMap {
  std::string title;
  std::string note;
  Hue hue = Hue::kBlue;
  int32_t layers = 0, heads = 0;
  std::vector<double> values;       // [layers, heads]
  std::vector<std::string> cells;   // [layers, heads]: drawn if there is room
  std::vector<std::string> hovers;  // [layers, heads]
  double light = 0, dark = 1;       // values at the ends of the scale
  std::string light_label, dark_label;
};
std::string HeatMapFigure(const HeatMap& map);

// A map of few kinds, one colour and letter each.
struct KindMap {
  std::string title;
  int32_t layers = 0, heads = 0;
  std::vector<std::string> kinds;   // [layers, heads]
  std::vector<std::string> hovers;  // [layers, heads]
};
std::string KindMapFigure(const KindMap& map);

struct CurveNode {
  double x = 0, y = 0;
  std::string label;  // beside the node; may be empty
  std::string hover;
  bool marked = false;
};
struct CurveLine {
  std::string name;
  std::vector<CurveNode> nodes;
  bool thin = false;  // one of many in the background
};
struct CurveChart {
  std::string title;
  std::string x_axis, y_axis;
  std::vector<CurveLine> lines;
  double y_low = 0, y_high = 1;
  std::function<std::string(double)> y_tick;
  // Exact search: a dashed cross, where given.
  bool has_exact = false;
  double exact_x = 0, exact_y = 0;
  std::string exact_hover;
};
// x on a logarithmic scale, y linear.
std::string CurveFigure(const CurveChart& chart);

}  // namespace carrel::audit
