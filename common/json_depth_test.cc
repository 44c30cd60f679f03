#include "common/json_depth.h"

#include <string>

#include "common/test_util.h"

namespace carrel {
namespace {

std::string Nested(int levels) { return std::string(levels, '[') + "1" + std::string(levels, ']'); }

TEST(CheckJsonDepth, AtTheBound_IsTaken_BeyondItIsNamedWithItsByte) {
  CARREL_EXPECT_OK(CheckJsonDepth(Nested(kMaxJsonDepth), "f.json"));
  EXPECT_THAT(CheckJsonDepth(" " + Nested(kMaxJsonDepth + 1), "f.json"),
              StatusIs(absl::StatusCode::kInvalidArgument, "f.json: JSON nests deeper than 64"));
  EXPECT_THAT(CheckJsonDepth(" " + Nested(kMaxJsonDepth + 1), "f.json"),
              StatusIs(absl::StatusCode::kInvalidArgument, "at byte 65"));
  std::string mixed;
  for (int i = 0; i < 40; ++i) mixed += "{\"a\":[";
  EXPECT_FALSE(CheckJsonDepth(mixed, "f.json").ok());
}

TEST(CheckJsonDepth, BracketsInStringsAndSideBySide_DoNotCount) {
  CARREL_EXPECT_OK(CheckJsonDepth("[\"" + std::string(1000, '[') + "\"]", "f"));
  CARREL_EXPECT_OK(CheckJsonDepth("[\"\\\"" + std::string(1000, '{') + "\\\\\"]", "f"));
  std::string flat = "[";
  for (int i = 0; i < 1000; ++i) flat += "[],{},";
  CARREL_EXPECT_OK(CheckJsonDepth(flat + "0]", "f"));
  CARREL_EXPECT_OK(CheckJsonDepth("", "f"));
  CARREL_EXPECT_OK(CheckJsonDepth("[\"never ended\\", "f"));
}

}  // namespace
}  // namespace carrel
