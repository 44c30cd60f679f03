// What is built twice, once for one sequence and once for several, or stands where it does not belong, is counted: by
// what the code does, in any of the spellings that it has had, so that a rename does not lower a number.
#include <algorithm>
#include <iterator>
#include <regex>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "tests/tidy/rules.h"

namespace carrel::tidy {
namespace {

enum class By { kMatch, kFile, kName, kLine };

struct Counter {
  const char* name;
  By by;
  const char* in;       // paths: a regular expression that they begin with
  const char* without;  // of these, paths that match; empty: none
  const char* what;     // in code; kLine counts all
};

constexpr Counter kCounters[] = {
    // From a base to what somebody knows that it is. const and qualified names are among them.
    {"downcasts", By::kMatch, "decoder/", "",
     R"((dynamic_cast|down_cast|\bany_cast)<|static_cast<(const )?([a-z_]+::)*[A-Z]\w*( const)?[&*]>)"},
    // What is there for several sequences beside what is there for one.
    {"names-for-several", By::kName, R"(decoder/.*\.h$)", "",
     R"(\b\w*(Together|Alike|Jointly|AtOnce|Batched|Multi|Several)\w*\b)"},
    // The wire's types, by their namespace or by an alias of it.
    {"wire-types-in-decoder", By::kFile, "decoder/", "^decoder/client/",
     R"(\bv1::|using namespace [\w:]*v1\b|\bproto::)"},
    {"enums-of-wants", By::kMatch, "", "^(proto|tests|bench)/",
     R"(enum class Want\w*|enum class \w*Want\b)"},
    // Keys packed to 8 bits and scanned, outside kernels and the index kind that stores them so.
    {"exact-8-bit-scans", By::kFile, "", "^(kernels|tests|bench|kvstore/index/int8)/",
     R"(\b\w*PackInt8\w*\()"},
    {"estimation-requests", By::kMatch, "(decoder|kvstore|retrieval)/", "",
     R"(struct (RestRequest|EstimateParams|EstimateRequest|EstimateQuery|RestParams|RestQuery)\b)"},
    {"who-generates", By::kMatch, "", "^(decoder|tests|bench|examples|include)/",
     R"(\bGeneration::Begin\(|\bdecoder\(\)\.Generate\(|\bRunner::Step\()"},
    {"http-that-decodes", By::kFile, "http_api/", "",
     R"xx(#include "(decoder|kvstore/service)/)xx"},
    // A launch over a window's rows described once more.
    {"window-launches", By::kFile, "decoder/(forward|zone|runner|window|cuda|cpu)", "",
     R"(WindowAttentionCudaParams(>\(| \w+\s*[;{=]|\{))"},
    {"forward-and-zone-lines", By::kLine,
     "decoder/(forward/|zone/|runner|cpu_runner|cuda_runner|sequence|batch)", "", ""},
    {"decoder-refusals", By::kMatch, R"(decoder/config\w*\.)", "",
     R"(\breturn (absl::)?\w*(Error|Refuse|Refusal|Wrong|Bad)\w*\()"},
};

bool IsProduction(const TextFile& file) {
  return !absl::StrContains(file.path, "_test.") && !absl::StrContains(file.path, "_test_util.");
}

// Includes stand in literals and directives, which CodeOnly takes out.
std::string Searched(const Counter& counter, const TextFile& file) {
  return absl::StartsWith(counter.what, "#include") ? file.text : CodeOnly(file.text);
}

int64_t Count(const Counter& counter, const Tree& tree) {
  const std::regex in(absl::StrCat("^", counter.in)), without(counter.without), what(counter.what);
  int64_t count = 0;
  std::set<std::string> names;
  for (const TextFile& file : tree.files) {
    if (!std::regex_search(file.path, in)) continue;
    if (!file.IsSource() || !IsProduction(file)) continue;
    if (*counter.without != '\0' && std::regex_search(file.path, without)) continue;
    if (counter.by == By::kLine) {
      count += std::count(file.text.begin(), file.text.end(), '\n');
      continue;
    }
    const std::string code = Searched(counter, file);
    std::sregex_iterator it(code.begin(), code.end(), what);
    const std::sregex_iterator end;
    if (counter.by == By::kFile) count += it != end;
    if (counter.by == By::kMatch) count += std::distance(it, end);
    for (; counter.by == By::kName && it != end; ++it) names.insert(it->str());
  }
  return count + static_cast<int64_t>(names.size());
}

}  // namespace

Violations CheckCounters(const Tree& tree) {
  Violations violations;
  std::map<std::string, std::string> bounds = ReadExceptions(tree, kCounterBounds, violations);
  for (const Counter& counter : kCounters) {
    const std::string listed = bounds[counter.name];
    bounds.erase(counter.name);
    int64_t bound = 0;
    if (!absl::SimpleAtoi(listed.substr(0, listed.find(' ')), &bound)) {
      violations.push_back(absl::StrCat(kCounterBounds, ": ", counter.name, " needs a number"));
      continue;
    }
    const int64_t count = Count(counter, tree);
    if (count == bound) continue;
    violations.push_back(absl::StrCat(kCounterBounds, ": ", counter.name, " is ", count,
                                      count > bound ? ", more than " : ": lower it from ", bound));
  }
  for (const auto& [name, bound] : bounds) {
    violations.push_back(absl::StrCat(kCounterBounds, ": nothing counts ", name, ": take it out"));
  }
  return violations;
}

}  // namespace carrel::tidy
