#include "kernels/layer/dequantize/dequantize.h"

#include <cstring>
#include <fstream>
#include <iterator>
#include <set>
#include <vector>

#include "common/test_folders.h"
#include "common/test_util.h"

namespace carrel::kernels {
namespace {

struct Golden {
  GgufType type;
  std::string blocks;
  std::vector<float> values;
};

std::vector<Golden> ReadGoldens() {
  std::ifstream file(SourceFolder() + "/kernels/layer/dequantize/goldens.bin", std::ios::binary);
  std::vector<Golden> goldens;
  uint32_t header[3];
  while (file.read(reinterpret_cast<char*>(header), sizeof(header))) {
    Golden golden;
    golden.type = ParseGgufType(header[0]).value();
    golden.values.resize(header[1]);
    golden.blocks.resize(header[2]);
    file.read(golden.blocks.data(), header[2]);
    file.read(reinterpret_cast<char*>(golden.values.data()), header[1] * sizeof(float));
    EXPECT_TRUE(file.good());
    goldens.push_back(std::move(golden));
  }
  return goldens;
}

TEST(DequantizeTest, BlocksOfEveryType_AreTheBitsOfThePythonPackage) {
  std::set<GgufType> seen;
  for (const Golden& golden : ReadGoldens()) {
    SCOPED_TRACE(TraitsOf(golden.type).name);
    const int64_t count = static_cast<int64_t>(golden.values.size());
    ASSERT_EQ(GgufBytes(golden.type, count), static_cast<int64_t>(golden.blocks.size()));
    // Odd addresses too: a block of a mapped file lies anywhere.
    for (size_t shift : {0u, 1u}) {
      const std::string moved = std::string(shift, 'x') + golden.blocks;
      std::vector<float> values(golden.values.size() + 1, -7.0f);
      Dequantize(golden.type, moved.data() + shift, count, values.data());
      EXPECT_EQ(std::memcmp(values.data(), golden.values.data(), golden.values.size() * 4), 0);
      EXPECT_EQ(values.back(), -7.0f) << "wrote past the end";
    }
    EXPECT_TRUE(seen.insert(golden.type).second) << "twice in the file";
  }
  EXPECT_EQ(seen.size(), 16u);
}

TEST(DequantizeTest, PartOfTheBlocks_IsThatPartOfTheWhole) {
  for (const Golden& golden : ReadGoldens()) {
    SCOPED_TRACE(TraitsOf(golden.type).name);
    const int64_t block = TraitsOf(golden.type).block_elements;
    std::vector<float> values(static_cast<size_t>(block));
    const int64_t last = static_cast<int64_t>(golden.values.size()) - block;
    Dequantize(golden.type, golden.blocks.data() + GgufBytes(golden.type, last), block,
               values.data());
    EXPECT_EQ(std::memcmp(values.data(), golden.values.data() + last, values.size() * 4), 0);
  }
}

TEST(DequantizeTest, NoElements_TouchNothing) {
  float value = 3.0f;
  Dequantize(GgufType::kQ4_K, nullptr, 0, &value);
  EXPECT_EQ(value, 3.0f);
}

TEST(GgufTypeTest, NumbersOfTheFormat_AreParsedOrNamed) {
  for (uint32_t number = 0; number < 300; ++number) {
    const auto type = ParseGgufType(number);
    if (!type.has_value()) continue;
    EXPECT_EQ(static_cast<uint32_t>(*type), number);
    EXPECT_EQ(TraitsOf(*type).name, GgufTypeName(number));
  }
  EXPECT_FALSE(ParseGgufType(4).has_value());
  EXPECT_FALSE(ParseGgufType(16).has_value());
  EXPECT_EQ(GgufTypeName(16), "IQ2_XXS");
  EXPECT_EQ(GgufTypeName(4), "");
}

}  // namespace
}  // namespace carrel::kernels
