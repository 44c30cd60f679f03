#include "common/freed_memory.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstring>
#include <memory>

namespace carrel {
namespace {

// Pages that the kernel had to map while the memory was used.
int64_t PagesMappedBy(size_t bytes) {
  rusage before{}, after{};
  getrusage(RUSAGE_SELF, &before);
  const auto memory = std::make_unique<char[]>(bytes);
  std::memset(memory.get(), 1, bytes);
  getrusage(RUSAGE_SELF, &after);
  return after.ru_minflt - before.ru_minflt;
}

TEST(KeepFreedMemoryTest, MemoryOfTheSameSize_IsMappedOnce) {
#if !defined(__GLIBC__) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "another allocator";
#endif
  constexpr size_t kBytes = 24 << 20;
  KeepFreedMemory();
  PagesMappedBy(kBytes);
  EXPECT_LT(PagesMappedBy(kBytes), 64);  // of 6,144
}

TEST(FreedMemoryTest, Much_GoesBackAtOnce) {
  FreedMemory freed(100, 10);
  EXPECT_FALSE(freed.LookAt(99));
  EXPECT_TRUE(freed.LookAt(100));
  EXPECT_TRUE(freed.LookAt(100));
}

TEST(FreedMemoryTest, Little_GoesBackOnceNobodyNeededItForAWhile) {
  FreedMemory freed(100, 10);
  for (int round = 0; round < 3; ++round) {
    for (int i = 1; i < FreedMemory::kLooks; ++i) EXPECT_FALSE(freed.LookAt(50));
    EXPECT_TRUE(freed.LookAt(50));
  }
  // Somebody uses all of it now and then.
  for (int i = 0; i < 5 * FreedMemory::kLooks; ++i) EXPECT_FALSE(freed.LookAt(i % 3 == 0 ? 9 : 99));
}

}  // namespace
}  // namespace carrel
