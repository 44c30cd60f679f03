#include "common/no_memory.h"

#include <limits>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/test_util.h"
#include "common/thrown.h"

namespace carrel {
namespace {

using absl::StatusCode;

// Sanitizers end the process themselves where memory ends.
#ifdef CARREL_SANITIZED
#define SKIP_SANITIZED() GTEST_SKIP() << "a sanitizer's operator new does not throw"
#else
#define SKIP_SANITIZED() static_assert(true)
#endif

TEST(NoMemory, WhatCannotBeAllocated_IsAStatus) {
  SKIP_SANITIZED();
  EXPECT_THAT(CatchThrown("query",
                          []() -> absl::Status {
                            std::vector<char> bytes(std::numeric_limits<int64_t>::max() / 2);
                            return bytes.empty() ? absl::OkStatus() : absl::UnknownError("?");
                          }),
              StatusIs(StatusCode::kResourceExhausted, "query: out of memory"));
  const auto result = CatchThrown("name", []() -> absl::StatusOr<std::string> {
    std::string text;
    text.resize(std::numeric_limits<size_t>::max());
    return text;
  });
  EXPECT_THAT(result.status(), StatusIs(StatusCode::kResourceExhausted, "name: out of memory"));
  EXPECT_EQ(*CatchThrown("small", []() -> absl::StatusOr<int> { return 7; }), 7);
}

void Allocate() noexcept {
  const std::vector<char> bytes(std::numeric_limits<int64_t>::max() / 2);
  EXPECT_TRUE(bytes.empty());
}

TEST(NoMemoryDeathTest, WhereNothingCatches_TheProcessSaysSoAndExits) {
  SKIP_SANITIZED();
  EXPECT_EXIT(
      {
        ExitWhenMemoryEnds();
        Allocate();
      },
      testing::ExitedWithCode(1), "RESOURCE_EXHAUSTED: out of memory");
}

}  // namespace
}  // namespace carrel
