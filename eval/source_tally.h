// What:   whether an answer's sources are where its fact stands: of a question whose answer is known, the
//         passages that hold it.
// Math:   an answer of several parts ("Oslo, Lima") has a fact for each. A fact's passages are those that
//         hold the part as whole words, and of these the ones that share the most words with the question.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "library/document_text.h"
#include "serving/answer_job.h"

namespace carrel::eval {

// Of each part of the answer, the passages (DocumentText::passages) of its fact; a part that the document
// does not hold has none, and is left out.
std::vector<std::vector<int64_t>> FactPassages(const library::DocumentText& document,
                                               absl::string_view question,
                                               absl::string_view answer);

struct SourceTally {
  int64_t asked = 0;                // right answers whose document holds a fact of theirs
  int64_t with_fact = 0;            // of these, whose sources hold a fact
  int64_t with_every = 0;           // or as many facts as there are, or sources
  double seconds = 0;               // that finding sources took
  std::vector<std::string> missed;  // questions

  void Add(const library::DocumentText& document, const std::string& question,
           absl::string_view answer, absl::Span<const serving::AnswerSource> sources, int64_t most);
};

}  // namespace carrel::eval
