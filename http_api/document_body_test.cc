#include "http_api/document_body.h"

#include <random>

#include "absl/strings/str_cat.h"
#include "common/test_random.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "http_api/api_error.h"

namespace carrel::http_api {
namespace {

using testing::HasSubstr;

absl::StatusOr<GivenDocument> Read(const std::string& body, const std::string& type,
                                   const std::string& query = "", const std::string& coding = "") {
  HttpRequest request;
  request.body = body;
  request.content_type = type;
  request.content_encoding = coding;
  return ReadDocument(request, query);
}

std::string Form(const std::string& parts) {
  return absl::StrCat("--XX\r\n", parts, "\r\n--XX--\r\n");
}
constexpr char kFormType[] = "multipart/form-data; boundary=XX";

TEST(DocumentBodyTest, WhatIsAText_IsTaken_AsItsCharsetSays) {
  const std::string utf16le("h\0\xe9\0", 4), utf16be("\0h\0\xe9", 4), text = "h\xc3\xa9";
  const struct {
    std::string body, type;
  } cases[] = {
      {text, ""},
      {text, "text/plain"},
      {text, "Text/Plain; Charset=\"UTF-8\""},
      {"\xef\xbb\xbf" + text, "text/plain"},
      {"h\xe9", "text/plain; charset=ISO-8859-1"},
      {"h\xe9", "text/plain;charset=latin1"},
      {utf16le, "text/plain; charset=utf-16le"},
      {utf16be, "text/plain; format=flowed; charset=UTF-16BE"},
      {"\xff\xfe" + utf16le, "text/plain"},
      {"\xfe\xff" + utf16be, "text/plain; charset=utf-16"},
      {text, "application/octet-stream"},
      {text, "application/xml"},
      {text, "text/markdown"},
      {R"({"text": "h\u00e9"})", "Application/JSON; charset=utf-8"},
      {R"({"text": "h\u00e9"})", "text/json"},
      {R"({"text": "h\u00e9", "chat": true})", "application/vnd.api+json; charset=us-ascii"},
      {"{\"text\": \"h\xe9\"}", "application/json; charset=iso-8859-1"},
      {"\xef\xbb\xbf{\"text\": \"" + text + "\"}", "application/json"},
      {Form("Content-Disposition: form-data; name=file; filename=a.json\r\n"
            "Content-Type: application/ld+json\r\n\r\n" +  // a file is what it is
            text),
       kFormType},
      {Form("Content-Disposition: form-data; name=\"file\"; filename=\"a.txt\"\r\n"
            "Content-Type: text/plain\r\n\r\n" +
            text),
       kFormType},
      {Form("content-disposition: form-data; name=x; filename=\"a\\\"b.txt\"\r\n\r\n" + text),
       "Multipart/Form-Data; boundary=\"XX\""},
      {"preamble\r\n" +
           Form("Content-Type: text/plain; charset=iso-8859-1\r\n"
                "Content-Disposition: form-data; name=\"file\"; filename*=utf-8''a\r\n\r\nh\xe9"),
       kFormType},
  };
  for (const auto& c : cases) {
    const auto given = Read(c.body, c.type);
    ASSERT_TRUE(given.ok()) << c.type << ": " << given.status();
    EXPECT_EQ(given->text, text) << c.type;
  }
}

TEST(DocumentBodyTest, WhatIsNoText_IsRefusedByItsName) {
  const std::string form_of_two = Form(
      "Content-Disposition: form-data; name=a; filename=a\r\n\r\nx\r\n--XX\r\n"
      "Content-Disposition: form-data; name=b; filename=b\r\n\r\ny");
  const struct {
    std::string body, type;
    int status;
    const char* words;
  } cases[] = {
      {"a+b", "application/x-www-form-urlencoded", 415, "curl --data-binary @FILE"},
      {"%PDF-1.4\n1 0 obj\nendobj\n", "application/pdf", 415, "pdftotext"},
      {"%PDF-1.4\n1 0 obj\nendobj\n", "text/plain", 400, "pdftotext"},
      {"just text", "application/pdf", 415, "application/pdf is not read"},
      {"\x89PNG\r\n\x1a\n", "image/png", 415, "picture"},
      {"x", "application/json-seq", 415, "application/json-seq"},
      {"x", "multipart/mixed; boundary=XX", 415, "multipart/mixed"},
      {"x", "text/plain; charset=koi8-r", 415, "iconv -f koi8-r -t utf-8 FILE"},
      {"x", "text/plain; charset=\"a b;c\"", 415, "iconv makes"},
      {"caf+AOk-", "text/plain; charset=UTF-7", 415, "charset utf-7"},
      {"\x1b$B%F%9%H\x1b(B", "text/plain; charset=ISO-2022-JP", 415, "iconv -f iso-2022-jp"},
      {"caf+AOk-", "application/octet-stream; charset=utf-7", 415, "charset utf-7"},
      {R"({"text": "caf+AOk-"})", "application/json; charset=utf-7", 415, "charset utf-7"},
      {Form("Content-Disposition: form-data; name=f; filename=f\r\n"
            "Content-Type: text/plain; charset=iso-2022-jp\r\n\r\nx"),
       kFormType, 415, "iso-2022-jp"},
      {"%!PS-Adobe-3.0\n%%EOF\n", "text/plain", 400, "PostScript"},
      {"%!PS-Adobe-3.0\n%%EOF\n", "application/postscript", 415, "ps2ascii"},
      {"\n%PDF-1.4\n1 0 obj\nendobj\n", "text/plain", 400, "pdftotext"},
      {"%PDF-1.4\n1 0 obj\nendobj\n", "application/json", 400, "pdftotext"},
      {"a text", "text/json", 400, "JSON"},
      {R"({"title": "x"})", "application/ld+json", 400, "title"},
      {"caf\xe9", "text/plain; charset=us-ascii", 400, "offset 3"},
      {"caf\xe9", "text/plain", 400, "offset 3"},
      {std::string("a\0", 2), "text/plain; charset=utf-16", 400, "utf-16le"},
      {std::string("abc\0def", 7), "text/plain", 400, "NUL"},
      {std::string("a\0b\0", 4), "text/plain", 400, "UTF-16"},
      {"", "text/plain", 400, "empty"},
      {"\xef\xbb\xbf", "text/plain", 400, "empty"},
      {R"({"text": null})", "application/json", 400, "text is missing"},
      {R"({"text": 5})", "application/json", 400, "text=5"},
      {R"({"text": "x", "chat": "no"})", "application/json", 400, "chat"},
      {R"({"text": "x", "nmae": "y"})", "application/json", 400, "nmae"},
      {R"({"text": "x\ud800"})", "application/json", 400, "byte"},
      {std::string(200000, '['), "application/json", 400, "64"},
      {form_of_two, kFormType, 400, "more than one file"},
      {Form("Content-Disposition: form-data; name=name\r\n\r\na"), kFormType, 400, "no file"},
      {Form("Content-Disposition: form-data; name=what\r\n\r\na"), kFormType, 400, "what"},
      {Form(""), "multipart/form-data", 400, "boundary"},
      {"nothing of it", kFormType, 400, "boundary is not in"},
      {"--XX\r\n\r\nabc", kFormType, 400, "no end"},
      {"--XX\r\nX: " + std::string(10000, 'x') + "\r\n\r\nabc\r\n--XX--", kFormType, 400, "head"},
      {Form("Content-Disposition: form-data; name=f; filename=f\r\n"
            "Content-Transfer-Encoding: base64\r\n\r\nYQ=="),
       kFormType, 415, "base64"},
  };
  for (const auto& c : cases) {
    const auto given = Read(c.body, c.type);
    ASSERT_FALSE(given.ok()) << c.type << " " << c.body.substr(0, 40);
    EXPECT_EQ(ErrorOf(given.status()).status, c.status) << given.status();
    EXPECT_THAT(std::string(given.status().message()), HasSubstr(c.words));
    EXPECT_LT(given.status().message().size(), 1000u);
  }
  EXPECT_EQ(ErrorOf(Read("x", "text/plain", "", "gzip").status()).status, 415);
  EXPECT_TRUE(Read("x", "text/plain", "", "Identity").ok());
}

TEST(DocumentBodyTest, QueryAndFields_SayTheRest) {
  const auto given = Read("x", "text/plain", "name=a%2Db&chat=false&missing_bytes=drop");
  ASSERT_TRUE(given.ok()) << given.status();
  EXPECT_EQ(given->name, "a-b");
  EXPECT_FALSE(given->in_turn);
  EXPECT_TRUE(given->drop_missing);
  EXPECT_FALSE(Read("x", "text/plain", "nmae=a").ok());
  EXPECT_FALSE(Read("x", "text/plain", "chat=no").ok());
  EXPECT_FALSE(Read("x", "text/plain", "missing_bytes=keep").ok());
  const auto json =
      Read(R"({"name": "n", "text": "x", "chat": false})", "application/json", "name=q");
  ASSERT_TRUE(json.ok());
  EXPECT_EQ(json->name, "n");
  EXPECT_FALSE(json->in_turn);
  const auto form = Read(Form("Content-Disposition: form-data; name=name\r\n\r\nn\r\n--XX\r\n"
                              "Content-Disposition: form-data; name=f; filename=f\r\n\r\nx"),
                         kFormType);
  ASSERT_TRUE(form.ok()) << form.status();
  EXPECT_EQ(form->name, "n");
  EXPECT_EQ(form->text, "x");
}

// No bytes make it fail otherwise than by a status.
TEST(DocumentBodyTest, RandomForms_AreReadOrRefused) {
  std::mt19937_64 random(TestSeed());
  const std::string pieces[] = {"--XX",
                                "--XX--",
                                "\r\n",
                                "\r\n\r\n",
                                "--",
                                "XX",
                                "Content-Type: x",
                                "; name=",
                                "\"",
                                "a",
                                "Content-Disposition: form-data; name=f; filename=f",
                                ":",
                                "\xff"};
  for (int trial = 0; trial < 20000; ++trial) {
    std::string body;
    for (uint64_t i = random() % 14; i > 0; --i) body += pieces[random() % std::size(pieces)];
    const auto given = Read(body, random() % 2 == 0 ? kFormType : body);
    EXPECT_TRUE(!given.ok() || !given->text.empty());
  }
}

}  // namespace
}  // namespace carrel::http_api
