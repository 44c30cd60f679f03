#include "common/descriptor_limit.h"

#include <sys/resource.h>
#include <unistd.h>

#include "common/test_util.h"

namespace carrel {
namespace {

TEST(DescriptorLimitTest, FreeOnes_AreCountedAndGivenBack) {
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const int first = dup(0);
  ASSERT_GE(first, 0);
  close(first);
  rlimit limit = before;
  limit.rlim_cur = static_cast<rlim_t>(first) + 5;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  const absl::Status few = CheckFreeDescriptors(5), again = CheckFreeDescriptors(5),
                     many = CheckFreeDescriptors(6);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  CARREL_EXPECT_OK(few);
  CARREL_EXPECT_OK(again);
  EXPECT_THAT(many, StatusIs(absl::StatusCode::kResourceExhausted, "ulimit -n"));
}

}  // namespace
}  // namespace carrel
