// What:   the language of the demo model's registry documents: plain sentences about nothing, made
//         up names, and sentences that state a fact.
// Source: the registry documents (models/demo/README.md): sentence patterns, words in order of
//         frequency (weight about rank^-0.7), and syllables were read off them.
// Edge:   no last name, building or city is handed out twice by one object, nor is a number.
// Threads: one. The same seed gives the same sequence.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace carrel::eval {

class NeedleLanguage {
 public:
  explicit NeedleLanguage(uint64_t seed) : state_(seed) {}

  std::string Filler();    // "The old harvest counted the patient candle along the river."
  std::string Person();    // "Hilgia Sheesko"
  std::string City();      // "Breltvrou"
  std::string Building();  // "Dionvia observatory"
  std::string Number();    // six digits

  double Uniform();  // in [0, 1)
  int64_t Below(int64_t bound);

 private:
  std::string Clause(bool may_have_place);
  std::string Thing(double adjective_share);
  std::string Name();
  absl::string_view Frequent(absl::Span<const absl::string_view> words);

  uint64_t state_;
  std::set<std::string> taken_;
};

}  // namespace carrel::eval
