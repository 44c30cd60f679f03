#include "library/text_kind.h"

#include "absl/strings/str_cat.h"
#include "common/test_util.h"

namespace carrel::library {
namespace {

using absl::string_view;

std::string TextOf(string_view bytes) {
  const absl::StatusOr<GivenText> given = TakeText(std::string(bytes));
  EXPECT_TRUE(given.ok()) << given.status();
  return given.ok() ? given->text : "";
}

std::string Refusal(string_view bytes, const std::string& file = "", const std::string& then = "") {
  const absl::StatusOr<GivenText> given = TakeText(std::string(bytes), file, then);
  EXPECT_EQ(given.status().code(), absl::StatusCode::kInvalidArgument) << given.status();
  return std::string(given.status().message());
}

// One member, stored.
std::string Zip(string_view name, string_view content) {
  std::string header("PK\x03\x04", 4);
  header.append(22, '\0');
  header.push_back(static_cast<char>(name.size()));
  header.append(3, '\0');
  return absl::StrCat(header, name, content);
}

std::string Wide(string_view ascii, int size, bool big) {
  std::string wide;
  for (const char c : ascii) {
    const std::string zeros(static_cast<size_t>(size - 1), '\0');
    absl::StrAppend(&wide, big ? zeros : "", string_view(&c, 1), big ? "" : zeros);
  }
  return wide;
}

TEST(TextKindTest, TextsAreTakenAsTheyAre) {
  for (const string_view text :
       {string_view("plain\r\n\tand \x1b[1mbold"), string_view("caf\xc3\xa9 \xf0\x9f\x93\x9a"),
        string_view("GIF89a is how a picture begins"), string_view("%PDF-1.7 begins a PDF"),
        string_view("%!PS begins PostScript"), string_view("%!TEX root = a.tex"),
        string_view("A PDF begins with %PDF-1.7, and its objects end with endobj."),
        string_view("BZh, PK\x03\x04 and Rar! stand in texts, too"), string_view("{\\n}"),
        string_view("<p>a part of a page</p>"), string_view("")}) {
    const auto given = TakeText(std::string(text));
    ASSERT_TRUE(given.ok()) << given.status();
    EXPECT_EQ(given->text, text);
    EXPECT_EQ(given->remark, "");
  }
}

TEST(TextKindTest, ByteOrderMarksSayTheEncoding) {
  EXPECT_EQ(TextOf("\xef\xbb\xbfone"), "one");
  const string_view one = "one\n";
  EXPECT_EQ(TextOf(absl::StrCat("\xff\xfe", Wide(one, 2, false))), one);
  EXPECT_EQ(TextOf(absl::StrCat("\xfe\xff", Wide(one, 2, true))), one);
  EXPECT_EQ(TextOf(absl::StrCat(string_view("\xff\xfe\0\0", 4), Wide(one, 4, false))), one);
  EXPECT_EQ(TextOf(absl::StrCat(string_view("\0\0\xfe\xff", 4), Wide(one, 4, true))), one);
  // U+20AC and U+1F4DA, the latter as a pair of surrogates.
  EXPECT_EQ(TextOf("\xff\xfe\xac\x20\x3d\xd8\xda\xdc"), "\xe2\x82\xac\xf0\x9f\x93\x9a");
}

TEST(TextKindTest, BrokenWideTextsNameTheOffsetInTheFile) {
  EXPECT_THAT(Refusal(string_view("\xff\xfe\x61\0\x3d\xd8\x61\0", 8)),
              testing::HasSubstr("UTF-16LE at byte offset 4 of 8"));
  EXPECT_THAT(Refusal(string_view("\xff\xfe\x61\0\x3d\xd8", 6)),
              testing::HasSubstr("UTF-16LE at byte offset 4 of 6"));
  EXPECT_THAT(Refusal(string_view("\xfe\xff\0\x61\0", 5)),
              testing::HasSubstr("UTF-16BE at byte offset 4 of 5"));
  EXPECT_THAT(Refusal(string_view("\0\0\xfe\xff\0\x11\0\0", 8)),
              testing::HasSubstr("UTF-32BE at byte offset 4 of 8"));
}

TEST(TextKindTest, WideTextsWithoutAMarkAreNamed) {
  const string_view text = "Two words, and more.\n";
  EXPECT_THAT(Refusal(Wide(text, 2, false), "a.txt", " | carrel prefill --input -"),
              testing::HasSubstr("iconv -f utf-16le -t utf-8 a.txt | carrel prefill --input -"));
  EXPECT_THAT(Refusal(Wide(text, 2, true)), testing::HasSubstr("iconv -f utf-16be"));
  EXPECT_THAT(Refusal(Wide(text, 4, false)), testing::HasSubstr("iconv -f utf-32le"));
  EXPECT_THAT(Refusal(Wide(text, 4, true)), testing::HasSubstr("iconv -f utf-32be"));
}

TEST(TextKindTest, KindsOfFilesAreNamedWithTheirCommand) {
  const std::string zeros(64, '\0');
  const struct {
    std::string bytes;
    const char* name;
    const char* command;
  } kinds[] = {
      {"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n1 0 obj", "a PDF", "pdftotext FILE - > FILE.txt"},
      {"%PDF-1.4\n1 0 obj << >> endobj\n%%EOF", "a PDF", "pdftotext"},
      {"a letterhead\n%PDF-1.4\n%\xe2\xe3\xcf\xd3", "a PDF", "pdftotext"},
      {"\n\n%PDF-1.4\n1 0 obj << >> endobj\n%%EOF", "a PDF", "pdftotext"},
      {"HTTP/1.1 200 OK\r\n\r\n%PDF-1.7\r\n1 0 obj\r\nendobj\r\n", "a PDF", "pdftotext"},
      {"%PDF is its name. %PDF-1.4\n1 0 obj\nendobj\n", "a PDF", "pdftotext"},
      {std::string(1019, ' ') + "%PDF-1.4\n1 0 obj\nendobj\n", "a PDF", "pdftotext"},
      {"%!PS-Adobe-3.0\n%%Pages: 1\nshowpage\n", "PostScript", "ps2ascii FILE > FILE.txt"},
      {"%!PS\n/Times findfont\n", "PostScript", "ps2ascii"},
      {"%!PS-Adobe-3.0 EPSF-3.0\n\xe2", "PostScript", "ps2ascii"},
      {Zip("[Content_Types].xml", "") + Zip("word/document.xml", "x"), "DOCX", "pandoc -t plain"},
      {Zip("mimetype", "application/epub+zip"), "EPUB", "pandoc"},
      {Zip("mimetype", "application/vnd.oasis.opendocument.text"), "ODT", "pandoc"},
      {Zip("xl/workbook.xml", "word/"), "XLSX", "xlsx2csv"},
      {Zip("ppt/slides/slide1.xml", ""), "PPTX", "markitdown"},
      {Zip("notes.txt", "xl/ and word/"), "ZIP", "unzip -p"},
      {"\x1f\x8b\x08" + zeros, "gzip", "zcat FILE"},
      {"BZh91AY&SY" + zeros, "bzip2", "bzcat"},
      {"\x89PNG\r\n\x1a\n" + zeros, "PNG", "tesseract"},
      {"\xff\xd8\xff\xe0" + zeros, "JPEG", "tesseract"},
      {"GIF89a" + zeros, "GIF", "tesseract"},
      {"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + zeros, "old Office", "catdoc"},
      {"\x7f"
       "ELF\x02\x01\x01" +
           zeros,
       "binary", "NUL byte is at offset 7"},
      {"abc" + zeros, "binary", "NUL byte is at offset 3 of 67"},
  };
  for (const auto& kind : kinds) {
    const std::string said = Refusal(kind.bytes);
    EXPECT_THAT(said, testing::HasSubstr(kind.name));
    EXPECT_THAT(said, testing::HasSubstr(kind.command));
  }
  EXPECT_THAT(Refusal("%PDF-1.4\n\xe2", "it's mine.pdf"),
              testing::HasSubstr("pdftotext 'it'\\''s mine.pdf' -"));
}

TEST(TextKindTest, APdfThatBeginsLaterThanReadersLook_IsAText) {
  const std::string text = std::string(1020, ' ') + "%PDF-1.4\n1 0 obj\nendobj\n";
  EXPECT_EQ(TextOf(text), text);
}

TEST(TextKindTest, ForeignEncodingsNameByteAndOffsetOfTheFile) {
  const std::string said = Refusal("the caf\xe9 is open");
  EXPECT_THAT(said, testing::HasSubstr("byte offset 7 of 16 (byte 0xe9)"));
  EXPECT_THAT(said, testing::HasSubstr("iconv -f latin1 -t utf-8 FILE"));
  EXPECT_THAT(Refusal("\xef\xbb\xbf"
                      "ab\xe9 c"),
              testing::HasSubstr("byte offset 5 of 8"));
  const std::string cut = Refusal("caf\xc3");
  EXPECT_THAT(cut, testing::HasSubstr("ends inside a character"));
  EXPECT_THAT(cut, testing::HasSubstr("byte offset 3 of 4"));
}

TEST(TextKindTest, MarkupIsTakenAndRemarkedOn) {
  for (const string_view page :
       {string_view("<!DOCTYPE html><p>x"), string_view("\xef\xbb\xbf\n <HTML lang=en>"),
        string_view("<?xml version='1.0'?>\n<html xmlns='..'>")}) {
    const auto given = TakeText(std::string(page), "page.html");
    ASSERT_TRUE(given.ok()) << given.status();
    EXPECT_THAT(given->remark, testing::HasSubstr("pandoc -f html -t plain page.html"));
  }
  const auto rtf = TakeText("{\\rtf1\\ansi x}");
  ASSERT_TRUE(rtf.ok());
  EXPECT_THAT(rtf->remark, testing::HasSubstr("pandoc -f rtf"));
}

}  // namespace
}  // namespace carrel::library
