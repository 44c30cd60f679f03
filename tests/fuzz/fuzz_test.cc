// Every target under its seeds, under what fuzzing once found, and under mutations of both: no coverage
// steers it, but it runs with every build. The fuzzers themselves: ./run fuzz.
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <random>
#include <set>

#include "absl/time/clock.h"
#include "common/file.h"
#include "common/test_folders.h"
#include "common/test_util.h"
#include "tests/fuzz/target.h"

namespace carrel::fuzz {
namespace {

namespace fs = std::filesystem;

// CARREL_FUZZ_SECONDS of each target, beside the 200 mutations of every build.
absl::Duration MoreTime() {
  const char* seconds = std::getenv("CARREL_FUZZ_SECONDS");
  return absl::Seconds(seconds == nullptr ? 0 : std::atoi(seconds));
}

std::vector<std::string> Findings(const Target& target) {
  std::vector<std::string> inputs;
  const fs::path folder = fs::path(SourceFolder()) / "tests/fuzz/findings" / target.name;
  if (!fs::exists(folder)) return inputs;
  for (const auto& entry : fs::directory_iterator(folder)) {
    auto bytes = ReadFile(entry.path().string());
    CARREL_EXPECT_OK(bytes);
    if (bytes.ok()) inputs.push_back(*std::move(bytes));
  }
  return inputs;
}

// One to four changes: a bit, a byte, a number, a part doubled or taken out.
std::string Mutated(std::string bytes, std::mt19937_64& rng) {
  const int changes = 1 + static_cast<int>(rng() % 4);
  for (int i = 0; i < changes && !bytes.empty(); ++i) {
    const size_t at = rng() % bytes.size();
    const size_t length = 1 + rng() % std::min<size_t>(16, bytes.size() - at);
    switch (rng() % 5) {
      case 0:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << rng() % 8));
        break;
      case 1:
        bytes[at] = static_cast<char>(rng());
        break;
      case 2:
        bytes.replace(at, length, std::string(length, rng() % 2 == 0 ? '\xff' : '\0'));
        break;
      case 3:
        bytes.insert(at, bytes.substr(at, length));
        break;
      default:
        bytes.erase(at, length);
        break;
    }
  }
  return bytes;
}

class FuzzTest : public testing::TestWithParam<size_t> {
 protected:
  const Target& target() const { return Targets()[GetParam()]; }
};

TEST_P(FuzzTest, SeedsFindingsAndMutations_AreTakenOrRefused) {
  const std::vector<std::string> seeds = target().seeds();
  ASSERT_FALSE(seeds.empty());
  std::vector<std::string> inputs = Findings(target());
  inputs.insert(inputs.end(), seeds.begin(), seeds.end());
  for (const std::string& input : inputs) target().run(input);
  std::mt19937_64 rng(TestSeed());
  const absl::Time until = absl::Now() + MoreTime();
  int64_t runs = 0;
  for (; runs < 200 || absl::Now() < until; ++runs) {
    target().run(Mutated(inputs[rng() % inputs.size()], rng));
  }
  target().run("");
  std::cout << target().name << ": " << runs << " mutations" << std::endl;
}

INSTANTIATE_TEST_SUITE_P(All, FuzzTest, testing::Range(size_t{0}, Targets().size()),
                         [](const auto& info) { return Targets()[info.param].name; });

TEST(FuzzFindingsTest, EveryFolder_IsOfATarget) {
  std::set<std::string> names;
  for (const Target& target : Targets()) names.insert(target.name);
  EXPECT_GE(names.size(), 14u);
  const fs::path findings = fs::path(SourceFolder()) / "tests/fuzz/findings";
  if (!fs::exists(findings)) return;
  for (const auto& entry : fs::directory_iterator(findings)) {
    EXPECT_TRUE(names.contains(entry.path().filename().string())) << entry.path();
  }
}

}  // namespace
}  // namespace carrel::fuzz
