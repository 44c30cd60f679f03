// What:   right answers by where the fact stood: the depth x length map of a needle test.
// Shapes: one map per kind of needle; rows are depths, columns lengths, both ascending.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>

namespace carrel::eval {

struct Question;

class NeedleMap {
 public:
  // A question without depth and length is no part of the map.
  void Add(const Question& question, bool right);
  bool empty() const { return cells_.empty(); }

  // [{kind, length, depth, asked, right}], by kind, depth and length.
  nlohmann::json Json() const;
  // For people and as Markdown: a table per kind, cells "right/asked"; - where nothing was asked.
  std::string Table() const;
  std::string Html() const;

 private:
  struct Cell {
    int64_t asked = 0, right = 0;
  };
  using OfKind = std::map<std::pair<double, int64_t>, Cell>;  // by depth and length
  std::map<std::string, OfKind> cells_;
};

}  // namespace carrel::eval
