#include "common/freed_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>

namespace carrel {
namespace {

// Pages that the kernel had to map while the memory was used.
int64_t PagesMappedBy(size_t bytes) {
  rusage before{}, after{};
  getrusage(RUSAGE_SELF, &before);
  const auto memory = std::make_unique<char[]>(bytes);
  std::memset(memory.get(), 1, bytes);
  __asm__ volatile("" : : "r"(memory.get()) : "memory");  // or it is not mapped at all
  getrusage(RUSAGE_SELF, &after);
  return after.ru_minflt - before.ru_minflt;
}

int64_t ResidentBytes() {
  std::array<char, 100> text{};
  const int file = open("/proc/self/statm", O_RDONLY);
  EXPECT_GT(read(file, text.data(), text.size() - 1), 0);
  close(file);
  return std::atoll(std::strchr(text.data(), ' ')) * sysconf(_SC_PAGESIZE);
}

TEST(ReturnFreedMemoryTest, TheEndOfAThreadsHeap_GoesBackAfterALargePieceToo) {
#if !defined(__GLIBC__) || defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "another allocator";
#endif
  ReturnFreedMemory();
  PagesMappedBy(31 << 20);  // by default: from now on 62 MB may stay
  int64_t used = 0, left = 0;
  std::thread([&] {
    const int64_t before = ResidentBytes();
    {
      std::array<std::unique_ptr<char[]>, 64> pieces;
      for (auto& piece : pieces) piece = std::make_unique<char[]>(256 << 10);
      used = ResidentBytes() - before;
    }
    left = ResidentBytes() - before;
  }).join();
  EXPECT_GT(used, 15 << 20);
  EXPECT_LT(left, 2 << 20);
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
