#include "common/mapping_guard.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <thread>
#include <vector>

#include "common/file.h"
#include "common/mapped_file.h"
#include "common/status.h"
#include "common/test_util.h"

namespace carrel {
namespace {

constexpr size_t kBytes = size_t{1} << 20;

// A file of 'x', mapped and read once in full.
std::unique_ptr<MappedFile> MappedXs(const std::string& path) {
  CARREL_CHECK(WriteFileAtomically(path, std::string(kBytes, 'x')).ok());
  auto file = *MappedFile::Open(path);
  CARREL_CHECK(file->bytes() == std::string(kBytes, 'x'));
  return file;
}

TEST(MappingGuardTest, TruncatedFile_ReadsGoOnOverZerosAndTheFileSaysSo) {
  const std::string path = FreshTempDir() + "/file";
  const auto file = MappedXs(path), other = MappedXs(path + "2");
  CARREL_EXPECT_OK(file->CheckReadable());
  ASSERT_EQ(truncate(path.c_str(), 8192), 0);
  EXPECT_EQ(file->bytes()[kBytes - 1], '\0');
  EXPECT_EQ(file->bytes()[0], '\0');
  EXPECT_THAT(file->CheckReadable(), StatusIs(absl::StatusCode::kDataLoss, path));
  CARREL_EXPECT_OK(other->CheckReadable());
  EXPECT_EQ(other->bytes()[kBytes - 1], 'x');
}

TEST(MappingGuardTest, TruncatedUnderManyReaders_NobodySeesAByteThatIsNeitherItsNorMarked) {
  const std::string path = FreshTempDir() + "/file";
  for (int round = 0; round < 20; ++round) {
    const auto file = MappedXs(path);
    std::atomic<int> unmarked{0}, started{0};
    std::vector<std::thread> readers;
    for (int i = 0; i < 4; ++i) {
      readers.emplace_back([&, i] {
        ++started;
        for (size_t at = static_cast<size_t>(i) * 512;; at = (at + 4096) % kBytes) {
          const char byte = *static_cast<const volatile char*>(file->bytes().data() + at);
          if (byte == 'x') continue;
          if (file->CheckReadable().ok()) ++unmarked;
          return;
        }
      });
    }
    while (started < 4) std::this_thread::yield();
    ASSERT_EQ(truncate(path.c_str(), 0), 0);
    for (std::thread& reader : readers) reader.join();
    EXPECT_EQ(unmarked, 0);
  }
}

TEST(MappingGuardTest, PlaceUsedAgain_IsNotDamaged) {
  const std::string path = FreshTempDir() + "/file";
  for (int round = 0; round < 3; ++round) {
    const auto file = MappedXs(path);
    CARREL_EXPECT_OK(file->CheckReadable());
    ASSERT_EQ(truncate(path.c_str(), 0), 0);
    EXPECT_EQ(file->bytes()[4096], '\0');
    EXPECT_FALSE(file->CheckReadable().ok());
  }
}

TEST(MappingGuardDeathTest, MemoryOfOthers_NamesTheSignalAndEndsTheProcess) {
  const std::string path = FreshTempDir() + "/file";
  const auto file = MappedXs(path);  // installs the handler
  EXPECT_DEATH(
      {
        FILE* theirs = std::tmpfile();
        if (ftruncate(fileno(theirs), 4096) != 0) _exit(0);
        void* data = mmap(nullptr, 4096, PROT_READ, MAP_SHARED, fileno(theirs), 0);
        if (ftruncate(fileno(theirs), 0) != 0) _exit(0);
        _exit(*static_cast<const volatile char*>(data));
      },
      "SIGBUS");
  EXPECT_DEATH(kill(getpid(), SIGBUS), "SIGBUS");
}

}  // namespace
}  // namespace carrel
