#include "common/certificate.h"

#include <sys/stat.h>

#include "common/certificate_test_util.h"
#include "common/file.h"
#include "common/test_util.h"

namespace carrel {
namespace {

using absl::StatusCode;

class CertificateTest : public testing::Test {
 protected:
  TlsFiles Files(const TestAuthority::Pair& pair) {
    TestAuthority::Write(dir_, pair, authority_.certificate());
    return {dir_ + "/certificate.pem", dir_ + "/key.pem", dir_ + "/ca.pem"};
  }
  absl::Status Read(const TlsFiles& files) { return ReadTlsFiles(files, absl::Now()).status(); }

  const std::string dir_ = FreshTempDir();
  const TestAuthority authority_;
};

TEST_F(CertificateTest, FilesThatFit_AreReadWhole) {
  const absl::Time end = absl::Now() + absl::Minutes(7);
  const auto pair = authority_.Issue({.common_name = "server", .dns = "localhost", .end = end});
  const auto pem = ReadTlsFiles(Files(pair), absl::Now());
  CARREL_ASSERT_OK(pem);
  EXPECT_EQ(pem->certificate, pair.certificate);
  EXPECT_EQ(pem->key, pair.key);
  EXPECT_EQ(pem->ca, authority_.certificate());
  EXPECT_LT(absl::AbsDuration(pem->expires - end), absl::Seconds(2));
}

TEST_F(CertificateTest, FilesThatDoNotFit_AreRefusedByName) {
  const auto pair = authority_.Issue({.common_name = "a", .dns = "localhost"});
  const auto other = authority_.Issue({.common_name = "b", .dns = "localhost"});
  EXPECT_THAT(Read(Files({pair.certificate, other.key})),
              StatusIs(StatusCode::kInvalidArgument, "key.pem: the key is not that of"));
  EXPECT_THAT(Read(Files({pair.key, pair.key})),
              StatusIs(StatusCode::kInvalidArgument, "certificate.pem: holds no certificate"));
  EXPECT_THAT(Read(Files({pair.certificate, pair.certificate})),
              StatusIs(StatusCode::kInvalidArgument, "key.pem: holds no private key"));
  EXPECT_THAT(Read(Files({pair.certificate.substr(0, 200), pair.key})),
              StatusIs(StatusCode::kInvalidArgument, "certificate.pem"));
  TlsFiles files = Files(pair);
  CARREL_ASSERT_OK(
      WriteFileAtomically(files.ca, authority_.certificate() + pair.certificate.substr(0, 99)));
  EXPECT_THAT(Read(files), StatusIs(StatusCode::kInvalidArgument, "ca.pem: a certificate in it"));
  files.key.clear();
  EXPECT_THAT(Read(files), StatusIs(StatusCode::kInvalidArgument, "needs its key"));
  files = {dir_ + "/none.pem", dir_ + "/key.pem", ""};
  EXPECT_THAT(Read(files), StatusIs(StatusCode::kNotFound, "none.pem"));
}

TEST_F(CertificateTest, OutsideItsTime_IsRefusedWithBothEnds) {
  const absl::Time now = absl::Now();
  EXPECT_THAT(Read(Files(authority_.Issue({.common_name = "old", .end = now - absl::Seconds(2)}))),
              StatusIs(StatusCode::kInvalidArgument, "the certificate is valid from"));
  EXPECT_THAT(
      Read(Files(authority_.Issue({.common_name = "new", .begin = now + absl::Seconds(90)}))),
      StatusIs(StatusCode::kInvalidArgument, "the certificate is valid from"));
}

TEST_F(CertificateTest, KeyThatEverybodyMayRead_IsRefused) {
  const TlsFiles files = Files(authority_.Issue({.common_name = "a"}));
  ASSERT_EQ(chmod(files.key.c_str(), 0644), 0);
  EXPECT_THAT(Read(files), StatusIs(StatusCode::kInvalidArgument, "everybody may read"));
  ASSERT_EQ(chmod(files.key.c_str(), 0640), 0);
  CARREL_EXPECT_OK(Read(files));
}

}  // namespace
}  // namespace carrel
