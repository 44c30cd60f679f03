#include "kvstore/remote/s3_replies.h"

#include "absl/strings/str_cat.h"
#include "common/test_util.h"
#include "kvstore/remote/xml.h"

namespace carrel::kvstore {
namespace {

using absl::StatusCode;

TEST(S3RepliesTest, Error_OfS3AndOfSts) {
  const S3Error error = ReadS3Error(
      "<?xml version=\"1.0\"?>\n<Error><Code>NoSuchKey</Code><Message>a "
      "&lt;b&gt;</Message></Error>");
  EXPECT_EQ(error.code, "NoSuchKey");
  EXPECT_EQ(error.message, "a <b>");
  EXPECT_EQ(ReadS3Error(
                "<ErrorResponse><Error><Code>ExpiredTokenException</Code></Error></ErrorResponse>")
                .code,
            "ExpiredTokenException");
  EXPECT_EQ(ReadS3Error("<html>").code, "");
  EXPECT_EQ(ReadS3Error("502 bad\x1b gateway").message.find('\x1b'), std::string::npos);
}

TEST(S3RepliesTest, List_OfTheDocumentedForm) {
  const auto page = ReadObjectPage(
      "<ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\"><Name>b</Name>"
      "<IsTruncated>true</IsTruncated><NextContinuationToken>t+/=</NextContinuationToken>"
      "<Contents><Key>a&amp;b</Key><LastModified>2009-10-12T17:50:30.000Z</LastModified>"
      "<ETag>&quot;fba9&quot;</ETag><Size>434234</Size></Contents>"
      "</ListBucketResult>");
  CARREL_ASSERT_OK(page);
  EXPECT_EQ(page->objects.at(0).key, "a&b");
  EXPECT_EQ(page->objects.at(0).etag, "\"fba9\"");
  EXPECT_EQ(page->objects.at(0).size, 434234);
  EXPECT_EQ(page->next, "t+/=");
}

TEST(S3RepliesTest, RepliesThatDoNotHoldTogether_AreDataLossByName) {
  const auto list = [](absl::string_view inside) {
    return ReadObjectPage(absl::StrCat("<ListBucketResult>", inside, "</ListBucketResult>"))
        .status();
  };
  EXPECT_THAT(list("<Contents><Size>1</Size></Contents>"),
              StatusIs(StatusCode::kDataLoss, "key of 0 bytes"));
  EXPECT_THAT(list("<Contents><Key>a</Key><Size>-1</Size></Contents>"),
              StatusIs(StatusCode::kDataLoss, "Size=\"-1\""));
  EXPECT_THAT(
      list("<Contents><Key>a</Key><Size>1</Size><LastModified>now</LastModified></Contents>"),
      StatusIs(StatusCode::kDataLoss, "\"now\""));
  EXPECT_THAT(list("<IsTruncated>true</IsTruncated>"),
              StatusIs(StatusCode::kDataLoss, "no NextContinuationToken"));
  EXPECT_THAT(ReadObjectPage("<Other/>"), StatusIs(StatusCode::kDataLoss, "the reply is a Other"));
  EXPECT_THAT(ReadUploadId("<InitiateMultipartUploadResult/>"),
              StatusIs(StatusCode::kDataLoss, "no UploadId"));
  EXPECT_THAT(ReadAssumedRole("<AssumeRoleWithWebIdentityResponse/>"),
              StatusIs(StatusCode::kDataLoss, "no Credentials"));
}

TEST(S3RepliesTest, Xml_HasBounds) {
  std::string deep;
  for (int i = 0; i < 20; ++i) deep += "<a>";
  EXPECT_THAT(ParseXml(deep, "x"), StatusIs(StatusCode::kDataLoss, "within each other"));
  std::string many = "<a>";
  for (int64_t i = 0; i <= kMostXmlElements; ++i) many += "<b/>";
  EXPECT_THAT(ParseXml(many + "</a>", "x"),
              StatusIs(StatusCode::kDataLoss, "more than 200000 elements"));
  EXPECT_THAT(ParseXml("<!DOCTYPE a [<!ENTITY b \"bbbb\">]><a>&b;</a>", "x"),
              StatusIs(StatusCode::kDataLoss, "a document type"));
  EXPECT_THAT(ParseXml("<a><b></a>", "the list"),
              StatusIs(StatusCode::kDataLoss, "the list: no well-formed XML (line 1"));
  EXPECT_THAT(ParseXml("", "x"), StatusIs(StatusCode::kDataLoss, "no well-formed"));
}

TEST(S3RepliesTest, Dates_OfHttpAndOfXml) {
  EXPECT_EQ(absl::ToUnixSeconds(*ReadHttpDate("Fri, 24 May 2013 00:00:00 GMT")), 1369353600);
  EXPECT_EQ(absl::ToUnixSeconds(*ReadIsoTime("2013-05-24T00:00:00.000Z", "x")), 1369353600);
  EXPECT_EQ(ReadHttpDate("yesterday"), std::nullopt);
}

}  // namespace
}  // namespace carrel::kvstore
