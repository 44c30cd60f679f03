// The examples of "Signature Calculations for the Authorization Header" and "Authenticating Requests:
// Using Query Parameters" of the Amazon S3 API reference: bucket, keys, date and signatures are theirs.
#include "kvstore/remote/signature.h"

#include "common/checksum.h"
#include "common/test_util.h"

namespace carrel::kvstore {
namespace {

using testing::EndsWith;

const Credentials kExample{"AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"};
const SigningScope kScope{
    .region = "us-east-1",
    .time = absl::FromCivil(absl::CivilSecond(2013, 5, 24, 0, 0, 0), absl::UTCTimeZone())};

RequestToSign Example(const char* method, const char* path, NameValues query = {},
                      NameValues headers = {}, absl::string_view body = "") {
  return {.method = method,
          .host = "examplebucket.s3.amazonaws.com",
          .path = path,
          .query = std::move(query),
          .headers = std::move(headers),
          .payload = Sha256Hex(body)};
}

std::string AuthorizationOf(RequestToSign request) {
  SignRequest(kExample, kScope, request);
  return request.headers.back().second;
}

TEST(SignatureTest, GetObject_AsPublished) {
  EXPECT_EQ(AuthorizationOf(Example("GET", "/test.txt", {}, {{"range", "bytes=0-9"}})),
            "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request,"
            "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date,"
            "Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41");
}

TEST(SignatureTest, GetObject_EachStepAsPublished) {
  const RequestToSign request = Example("GET", "/test.txt", {}, {{"range", "bytes=0-9"}});
  const std::string canonical =
      CanonicalRequest(request, {{"host", "examplebucket.s3.amazonaws.com"},
                                 {"range", "bytes=0-9"},
                                 {"x-amz-content-sha256", std::string(kEmptyPayload)},
                                 {"x-amz-date", "20130524T000000Z"}});
  EXPECT_EQ(
      canonical,
      "GET\n/test.txt\n\nhost:examplebucket.s3.amazonaws.com\nrange:bytes=0-9\n"
      "x-amz-content-sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855\n"
      "x-amz-date:20130524T000000Z\n\nhost;range;x-amz-content-sha256;x-amz-date\n"
      "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(StringToSign(kScope, canonical),
            "AWS4-HMAC-SHA256\n20130524T000000Z\n20130524/us-east-1/s3/aws4_request\n"
            "7344ae5b7ee6c3e7e6b0fe0640412a37625d1fbfff95c48bbb2dc43964946972");
}

TEST(SignatureTest, PutObject_AsPublished) {
  EXPECT_THAT(AuthorizationOf(Example("PUT", "/test$file.text", {},
                                      {{"date", "Fri, 24 May 2013 00:00:00 GMT"},
                                       {"x-amz-storage-class", "REDUCED_REDUNDANCY"}},
                                      "Welcome to Amazon S3.")),
              EndsWith("98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd"));
}

TEST(SignatureTest, GetLifecycle_AsPublished) {
  EXPECT_THAT(AuthorizationOf(Example("GET", "/", {{"lifecycle", ""}})),
              EndsWith("fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"));
}

TEST(SignatureTest, ListObjects_AsPublishedInAnyOrderOfTheQuery) {
  EXPECT_THAT(AuthorizationOf(Example("GET", "/", {{"prefix", "J"}, {"max-keys", "2"}})),
              EndsWith("34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"));
}

TEST(SignatureTest, SessionToken_IsSignedInTheHeaders) {
  Credentials temporary = kExample;
  temporary.session_token = "tok/en+1=";
  RequestToSign request = Example("GET", "/a");
  SignRequest(temporary, kScope, request);
  EXPECT_THAT(request.headers.back().second,
              testing::HasSubstr("host;x-amz-content-sha256;x-amz-date;x-amz-security-token"));
}

TEST(SignatureTest, Encoding_KeepsWhatRfc3986CallsUnreserved) {
  EXPECT_EQ(PercentEncoded("a b+c/\xc3\xa4~-._", true), "a%20b%2Bc/%C3%A4~-._");
  EXPECT_EQ(PercentEncoded("a/b", false), "a%2Fb");
  EXPECT_EQ(CanonicalQuery({{"b", "1"}, {"a-b", ""}, {"a", "/"}}), "a=%2F&a-b=&b=1");
}

}  // namespace
}  // namespace carrel::kvstore
