#include "common/mapped_file.h"

#include <random>

#include "common/file.h"
#include "common/test_util.h"

namespace carrel {
namespace {

TEST(MappedFileTest, AnyAdviceAndOrder_GivesTheFilesBytes) {
  const std::string path = FreshTempDir() + "/file";
  std::mt19937_64 random(TestSeed());
  std::string bytes((size_t{5} << 20) + 77, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  CARREL_ASSERT_OK(WriteFileAtomically(path, bytes));
  const auto file = *MappedFile::Open(path);
  for (int round = 0; round < 3; ++round) {
    file->Expect(FileAccess::kSparse);
    for (int i = 0; i < 20; ++i) {
      const size_t at = random() % bytes.size();
      const absl::string_view part = file->bytes().substr(at, random() % 9000);
      MappedFile::AskAhead(part);
      EXPECT_EQ(part, absl::string_view(bytes).substr(at, part.size()));
    }
    file->Expect(FileAccess::kLargePages);
    file->Load(std::atomic<bool>(round == 1));
    EXPECT_EQ(file->bytes(), bytes);
    file->ReleasePages();
    EXPECT_EQ(file->bytes(), bytes);
  }
}

TEST(MappedFileTest, EmptyFile_TakesEveryAdvice) {
  const std::string path = FreshTempDir() + "/file";
  CARREL_ASSERT_OK(WriteFileAtomically(path, ""));
  const auto file = *MappedFile::Open(path);
  file->Expect(FileAccess::kSparse);
  MappedFile::AskAhead(file->bytes());
  file->Load(std::atomic<bool>(false));
  file->ReleasePages();
  EXPECT_EQ(file->bytes(), "");
}

TEST(MappedFileTest, NoFile_NamesThePath) {
  EXPECT_THAT(MappedFile::Open("/no/such/file"),
              StatusIs(absl::StatusCode::kNotFound, "/no/such/file"));
}

}  // namespace
}  // namespace carrel
