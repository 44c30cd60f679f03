#include "eval/needle_map.h"

#include <nlohmann/json.hpp>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "audit/html_figures.h"
#include "eval/questions.h"

namespace carrel::eval {

void NeedleMap::Add(const Question& question, bool right) {
  if (!question.needle.has_value()) return;
  const NeedlePlace& place = *question.needle;
  Cell& cell = cells_[place.kind][{place.depth, place.length}];
  ++cell.asked;
  cell.right += right;
}

nlohmann::json NeedleMap::Json() const {
  nlohmann::json json = nlohmann::json::array();
  for (const auto& [kind, cells] : cells_) {
    for (const auto& [place, cell] : cells) {
      json.push_back({{"kind", kind},
                      {"depth", place.first},
                      {"length", place.second},
                      {"asked", cell.asked},
                      {"right", cell.right}});
    }
  }
  return json;
}

std::string NeedleMap::Table() const {
  std::string out;
  for (const auto& [kind, cells] : cells_) {
    std::set<double> depths;
    std::set<int64_t> lengths;
    for (const auto& [place, cell] : cells) {
      depths.insert(place.first);
      lengths.insert(place.second);
    }
    absl::StrAppend(&out, "\n| ", kind, ": depth |");
    for (const int64_t length : lengths) absl::StrAppend(&out, " ", length, " tokens |");
    absl::StrAppend(&out, "\n|---:|");
    for (size_t i = 0; i < lengths.size(); ++i) out += "---:|";
    out += "\n";
    for (const double depth : depths) {
      absl::StrAppendFormat(&out, "| %.4g |", depth);
      for (const int64_t length : lengths) {
        const auto cell = cells.find({depth, length});
        absl::StrAppend(
            &out, " ",
            cell == cells.end() ? "-" : absl::StrCat(cell->second.right, "/", cell->second.asked),
            " |");
      }
      out += "\n";
    }
  }
  return out;
}

std::string NeedleMap::Html() const {
  std::string out;
  for (const auto& [kind, cells] : cells_) {
    absl::StrAppend(&out, "<table><thead><tr><th class=\"text\">", audit::EscapeHtml(kind),
                    "</th><th>length</th><th>depth</th><th>right</th></tr></thead><tbody>\n");
    for (const auto& [place, cell] : cells) {
      const double share = static_cast<double>(cell.right) / static_cast<double>(cell.asked);
      // Light is right, as in the maps of an audit.
      absl::StrAppendFormat(&out,
                            "<tr><td></td><td>%d</td><td>%.4g</td><td style=\"background:"
                            "rgba(46,94,170,%.2f)\">%d/%d</td></tr>\n",
                            place.second, place.first, 0.6 * (1 - share), cell.right, cell.asked);
    }
    out += "</tbody></table>\n";
  }
  return out;
}

}  // namespace carrel::eval
