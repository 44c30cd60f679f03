#include "kvstore/remote/credentials_provider.h"

#include <atomic>
#include <map>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "common/file.h"
#include "common/test_util.h"
#include "kvstore/remote/fake_s3.h"
#include "kvstore/remote/remote_test_util.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;
using testing::HasSubstr;
using testing::Not;

class CredentialsProviderTest : public testing::Test {
 protected:
  CredentialsOptions Options() {
    CredentialsOptions options;
    options.region = "us-east-1";
    options.environment = [this](const char* name) {
      const auto it = variables_.find(name);
      return it == variables_.end() ? std::string() : it->second;
    };
    return options;
  }
  std::string Write(const std::string& name, const std::string& text) {
    const std::string path = folder_ + "/" + name;
    EXPECT_EQ(absl::OkStatus(), WriteFileAtomically(path, text));
    return path;
  }
  static std::string Role(int number, absl::Duration valid) {
    return absl::StrCat(
        "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>"
        "<AccessKeyId>role-",
        number,
        "</AccessKeyId><SecretAccessKey>s</SecretAccessKey>"
        "<SessionToken>token-",
        number, "</SessionToken><Expiration>",
        absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::Now() + valid, absl::UTCTimeZone()),
        "</Expiration></Credentials></AssumeRoleWithWebIdentityResult>"
        "</AssumeRoleWithWebIdentityResponse>");
  }

  std::map<std::string, std::string> variables_;
  const std::string folder_ = FreshTempDir();
};

TEST_F(CredentialsProviderTest, Environment_WithOrWithoutAToken) {
  EXPECT_THAT(EnvironmentCredentials(Options())(),
              StatusIs(StatusCode::kNotFound, "AWS_ACCESS_KEY_ID"));
  variables_ = {{"AWS_ACCESS_KEY_ID", "a"}};
  EXPECT_THAT(EnvironmentCredentials(Options())(),
              StatusIs(StatusCode::kUnauthenticated, "one is not set"));
  variables_["AWS_SECRET_ACCESS_KEY"] = "b";
  variables_["AWS_SESSION_TOKEN"] = "c";
  const auto found = EnvironmentCredentials(Options())();
  CARREL_ASSERT_OK(found);
  EXPECT_EQ(found->access_key + found->secret_key + found->session_token, "abc");
}

TEST_F(CredentialsProviderTest, File_HasProfiles) {
  variables_["AWS_SHARED_CREDENTIALS_FILE"] = Write(
      "credentials",
      "# a comment\n[default]\naws_access_key_id = one\naws_secret_access_key=  s1 \n\n"
      "[other]\naws_access_key_id=two\naws_secret_access_key=s2\naws_session_token=t2\n[empty]\n");
  EXPECT_EQ(FileCredentials(Options())()->access_key, "one");
  EXPECT_EQ(FileCredentials(Options())()->secret_key, "s1");
  variables_["AWS_PROFILE"] = "other";
  EXPECT_EQ(FileCredentials(Options())()->session_token, "t2");
  CredentialsOptions options = Options();
  options.profile = "empty";
  EXPECT_THAT(FileCredentials(options)(),
              StatusIs(StatusCode::kUnauthenticated, "[empty] has no aws_access_key_id"));
  options.profile = "none";
  EXPECT_THAT(FileCredentials(options)(),
              StatusIs(StatusCode::kNotFound, "[none]: there is no such profile"));
}

TEST_F(CredentialsProviderTest, WebIdentity_IsTradedForARoleAndRenewedBeforeItEnds) {
  FakeS3 sts;
  variables_ = {{"AWS_WEB_IDENTITY_TOKEN_FILE", Write("token", "IDENTITY\n")},
                {"AWS_ROLE_ARN", "arn:aws:iam::1:role/reader"},
                {"AWS_ENDPOINT_URL_STS", sts.endpoint()}};
  auto asked = std::make_shared<std::vector<std::string>>();
  sts.Intercept([=](const FakeRequest& request) -> std::optional<FakeReply> {
    asked->push_back(request.body);
    // The first is nearly over already.
    return FakeReply{.body = Role(static_cast<int>(asked->size()),
                                  asked->size() == 1 ? absl::Minutes(2) : absl::Hours(1))};
  });
  const auto provider = std::make_unique<CredentialsProvider>(
      std::vector<CredentialsProvider::Source>{{WebIdentityCredentials(Options()), /*keep=*/true}});
  EXPECT_EQ(provider->Get()->access_key, "role-1");
  EXPECT_EQ(provider->Get()->access_key, "role-2");
  EXPECT_EQ(provider->Get()->access_key, "role-2");
  provider->Expired(*provider->Get());
  EXPECT_EQ(provider->Get()->session_token, "token-3");
  EXPECT_EQ(asked->at(0),
            "Action=AssumeRoleWithWebIdentity&RoleArn=arn%3Aaws%3Aiam%3A%3A1%3Arole%2Freader"
            "&RoleSessionName=carrel&Version=2011-06-15&WebIdentityToken=IDENTITY");
  // A service that does not answer any more: what there is serves as long as it holds.
  sts.Intercept(
      [](const FakeRequest&) -> std::optional<FakeReply> { return FakeReply{.status = 503}; });
  EXPECT_EQ(provider->Get()->session_token, "token-3");
  sts.Intercept([](const FakeRequest&) -> std::optional<FakeReply> {
    return FakeReply{.status = 400,
                     .body =
                         "<ErrorResponse><Error><Code>ExpiredTokenException</Code>"
                         "<Message>IDENTITY is over</Message></Error></ErrorResponse>"};
  });
  const auto refused = WebIdentityCredentials(Options())();
  EXPECT_THAT(refused, StatusIs(StatusCode::kUnauthenticated, "ExpiredTokenException"));
  EXPECT_THAT(refused.status().ToString(), Not(HasSubstr("IDENTITY")));
}

TEST_F(CredentialsProviderTest, InstanceMetadata_OfVersion2) {
  FakeS3 metadata;
  variables_["AWS_EC2_METADATA_SERVICE_ENDPOINT"] = metadata.endpoint() + "/";
  metadata.Intercept([](const FakeRequest& request) -> std::optional<FakeReply> {
    if (request.method == "PUT") return FakeReply{.body = "PROOF"};
    const auto proof = request.headers.find("x-aws-ec2-metadata-token");
    if (proof == request.headers.end() || proof->second != "PROOF") return FakeReply{.status = 401};
    if (absl::EndsWith(request.key, "security-credentials/")) return FakeReply{.body = "the-role"};
    if (!absl::EndsWith(request.key, "/the-role")) return FakeReply{.status = 404};
    return FakeReply{.body =
                         "{\"AccessKeyId\":\"a\",\"SecretAccessKey\":\"b\",\"Token\":\"c\","
                         "\"Expiration\":\"2099-01-01T00:00:00Z\"}"};
  });
  const auto found = InstanceCredentials(Options())();
  CARREL_ASSERT_OK(found);
  EXPECT_EQ(found->access_key + found->secret_key + found->session_token, "abc");
  EXPECT_EQ(absl::FormatTime("%Y", found->expires, absl::UTCTimeZone()), "2099");
  variables_["AWS_EC2_METADATA_DISABLED"] = "TRUE";
  EXPECT_THAT(InstanceCredentials(Options())(), StatusIs(StatusCode::kNotFound, "DISABLED"));
}

TEST_F(CredentialsProviderTest, NoSourceHasSome_AllAreNamed) {
  variables_ = {{"HOME", folder_}, {"AWS_EC2_METADATA_DISABLED", "true"}};
  const auto none = DefaultCredentials(Options())->Get();
  EXPECT_THAT(none, StatusIs(StatusCode::kUnauthenticated, "AWS_ACCESS_KEY_ID is not set"));
  EXPECT_THAT(none, StatusIs(StatusCode::kUnauthenticated, "AWS_WEB_IDENTITY_TOKEN_FILE"));
  EXPECT_THAT(none, StatusIs(StatusCode::kUnauthenticated, folder_ + "/.aws/credentials"));
  EXPECT_THAT(none, StatusIs(StatusCode::kUnauthenticated, "METADATA"));
}

// The server says so in the middle of work: others are fetched, and the request is sent again.
TEST_F(CredentialsProviderTest, CredentialsThatAreOver_AreRenewedByTheClient) {
  FakeS3 sts, store("role-2");
  variables_ = {{"AWS_WEB_IDENTITY_TOKEN_FILE", Write("token", "IDENTITY")},
                {"AWS_ROLE_ARN", "r"},
                {"AWS_ENDPOINT_URL_STS", sts.endpoint()}};
  auto given = std::make_shared<std::atomic<int>>(0);
  sts.Intercept([=](const FakeRequest&) -> std::optional<FakeReply> {
    return FakeReply{.body = Role(++*given, absl::Hours(1))};
  });
  store.Intercept([](const FakeRequest& request) -> std::optional<FakeReply> {
    if (request.headers.at("x-amz-security-token") != "token-1") return std::nullopt;
    return FakeReply{.status = 400, .body = "<Error><Code>ExpiredToken</Code></Error>"};
  });
  const auto client = S3Client::Create(TestConfig(store.endpoint()), DefaultCredentials(Options()));
  CARREL_EXPECT_OK((*client)->Put("k", "x"));
  EXPECT_EQ(*given, 2);
  // Those that nobody can renew are an error at once.
  store.Intercept([](const FakeRequest&) -> std::optional<FakeReply> {
    return FakeReply{.status = 400, .body = "<Error><Code>ExpiredToken</Code></Error>"};
  });
  const int64_t before = store.requests();
  EXPECT_THAT(TestClient(store.endpoint())->Put("k", "x"),
              StatusIs(StatusCode::kUnauthenticated, "ExpiredToken"));
  EXPECT_EQ(store.requests(), before + 1);
}

}  // namespace
}  // namespace carrel::kvstore
