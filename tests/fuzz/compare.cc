// eval --compare: flags out of a file.
#include <string>
#include <vector>

#include "tests/fuzz/target.h"
#include "tools/carrel/comparison.h"

namespace carrel::fuzz {
namespace {

// What an error says is shown to a person.
constexpr size_t kLongestMessage = 4096;

void RunCompare(absl::string_view bytes) {
  tools::RetrievalFlags base;
  base.context = "report";
  const auto read = tools::ReadConfigurations(WriteInput("compare.json", bytes), base);
  CARREL_FUZZ_CHECK(read.status().message().size() <= kLongestMessage);
}
std::vector<std::string> CompareSeeds() {
  return {R"([{"top-k": 64, "name": "a"}, {"top-k": "all", "want": "rows", "local": 32},
 {"fidelity": "fast"}, {"select": "mass:0.9", "budget": "linear", "effort": 7}])"};
}
CARREL_FUZZ_TARGET(compare, RunCompare, CompareSeeds);

}  // namespace
}  // namespace carrel::fuzz
