#include "common/status.h"

#include <sys/resource.h>

#include <cerrno>

#include "common/resource_status.h"
#include "common/test_util.h"

namespace carrel {
namespace {

using absl::StatusCode;

TEST(StatusTest, DiskFull_IsRecognisedThroughAnnotationsAndWithoutItsPayload) {
  for (const int error : {ENOSPC, EDQUOT, EFBIG}) {
    const absl::Status full = ErrnoStatus(error, "write /s/db/1.sst");
    EXPECT_THAT(full, StatusIs(StatusCode::kResourceExhausted, "disk full: write /s/db/1.sst"));
    EXPECT_TRUE(IsDiskFull(full));
    EXPECT_TRUE(IsDiskFull(Annotate(Annotate(full, "layer 3"), "prefill")));
    EXPECT_TRUE(Annotate(full, "prefill").GetPayload(kDiskFullUrl).has_value());
    EXPECT_TRUE(IsDiskFull(absl::Status(full.code(), full.message())));  // as of another process
    EXPECT_EQ(MakeDiskFull(full.message()).message(), full.message());
  }
  EXPECT_FALSE(IsDiskFull(absl::OkStatus()));
  EXPECT_FALSE(IsDiskFull(absl::ResourceExhaustedError("16 documents wait for prefill already")));
  EXPECT_FALSE(IsDiskFull(ErrnoStatus(ENOMEM, "map")));
  EXPECT_FALSE(IsDiskFull(absl::InvalidArgumentError("text: disk full: what a tale")));
}

TEST(StatusTest, OutOfDescriptors_NamesTheLimit) {
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_THAT(ErrnoStatus(EMFILE, "open /s/db/7.sst"),
              StatusIs(StatusCode::kResourceExhausted,
                       absl::StrCat("open /s/db/7.sst: out of file descriptors: this process may "
                                    "have ",
                                    limit.rlim_cur, " of them (ulimit -n)")));
}

}  // namespace
}  // namespace carrel
