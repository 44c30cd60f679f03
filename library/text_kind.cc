#include "library/text_kind.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "common/status.h"
#include "model/tokenizer/utf8.h"

namespace carrel::library {
namespace {

using absl::string_view;

// What bytes begin with, and the command that writes its text to standard output; %s: the file.
struct Magic {
  string_view begin;
  string_view name;
  string_view command;
};

constexpr char kPdf[] = "%PDF-", kPostScript[] = "%!PS";
constexpr size_t kLatestPdf =
    1020;  // where the header begins before, all of it is among 1,024 bytes
constexpr char kPicture[] = "tesseract %s - (which reads the letters in it)";
constexpr char kOldOffice[] = "catdoc %s";

constexpr Magic kMagics[] = {
    {kPdf, "a PDF", "pdftotext %s -"},
    {kPostScript, "PostScript", "ps2ascii %s"},
    {"\x1f\x8b", "gzip", "zcat %s"},
    {"\xfd"
     "7zXZ",
     "xz", "xzcat %s"},
    {"BZh", "bzip2", "bzcat %s"},
    {"\x28\xb5\x2f\xfd", "zstd", "zstdcat %s"},
    {"7z\xbc\xaf\x27\x1c", "a 7z archive", "7z x -so %s"},
    {"Rar!\x1a\x07", "a RAR archive", "unrar p -inul %s"},
    {"\x89PNG\r\n\x1a\n", "a PNG picture", kPicture},
    {"\xff\xd8\xff", "a JPEG picture", kPicture},
    {"GIF87a", "a GIF picture", kPicture},
    {"GIF89a", "a GIF picture", kPicture},
    {string_view("II*\0", 4), "a TIFF picture", kPicture},
    {string_view("MM\0*", 4), "a TIFF picture", kPicture},
    {"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "a file of an old Office (.doc, .xls, .ppt)", kOldOffice},
};

// Beginnings of names, or a whole first member, that tell what a ZIP archive is.
constexpr Magic kZips[] = {
    {"word/", "a DOCX (Word)", "pandoc -t plain %s"},
    {"application/epub+zip", "an EPUB", "pandoc -t plain %s"},
    {"application/vnd.oasis.opendocument.text", "an ODT", "pandoc -t plain %s"},
    {"xl/", "an XLSX (Excel)", "xlsx2csv %s"},
    {"ppt/", "a PPTX (PowerPoint)", "markitdown %s"},
    {"", "a ZIP archive", "unzip -p %s"},
};

std::string ShellWord(string_view word) {
  const bool plain = std::all_of(word.begin(), word.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) ||
           absl::StrContains("_./+:,@%=-", string_view(&c, 1)) ||
           static_cast<unsigned char>(c) >= 0x80;
  });
  if (plain) return std::string(word);
  return absl::StrCat("'", absl::StrReplaceAll(word, {{"'", "'\\''"}}), "'");
}

// The command for people: of a file, and where its output goes.
struct Suggestion {
  string_view file, then;

  std::string Command(string_view command) const {
    return absl::StrCat(
        absl::StrReplaceAll(command, {{"%s", file.empty() ? "FILE" : ShellWord(file)}}),
        then.empty() ? " > FILE.txt" : then);
  }
  absl::Status Refuse(string_view what, string_view command) const {
    return absl::InvalidArgumentError(
        absl::StrCat("this is ", what, ", no text; make one of it: ", Command(command)));
  }
};

// Whether a member of the archive has a name, or content that is stored as it is, that begins so.
bool HasMember(string_view bytes, string_view begin) {
  constexpr string_view kMember = "PK\x03\x04";
  constexpr size_t kHeader = 30, kMimetype = 8;  // bytes before a name; the name "mimetype"
  for (size_t at = 0; (at = bytes.find(kMember, at)) != string_view::npos; at += kHeader) {
    if (bytes.size() < at + kHeader) return false;
    const string_view name = bytes.substr(at + kHeader);
    if (absl::StartsWith(name, begin)) return true;
    if (absl::StartsWith(name, "mimetype") && absl::StartsWith(name.substr(kMimetype), begin))
      return true;
  }
  return false;
}

bool EndsLine(string_view rest) { return rest.empty() || rest[0] == '\n' || rest[0] == '\r'; }

// ASCII can be the bytes of a PDF, or of PostScript, throughout. A text that speaks of them does not begin like one:
// "%!PS" is followed by the end of its line, or "-Adobe-"; "%PDF-1.7" by objects. Readers of PDF take one whose
// header comes late, among the first 1,024 bytes, at the end of a line then.
bool IsPage(string_view text) {
  if (absl::ConsumePrefix(&text, kPostScript)) {
    return EndsLine(text) || absl::StartsWith(text, "-Adobe-");
  }
  if (!absl::StrContains(text, "endobj")) return false;
  if (absl::StartsWith(text, kPdf)) return true;
  constexpr size_t kHeader = sizeof(kPdf) - 1, kVersion = 3;  // "1.7"
  for (size_t at = 0; (at = text.find(kPdf, at)) < kLatestPdf; at += kHeader) {
    const string_view version = text.substr(at + kHeader);
    if (version.size() > kVersion && absl::ascii_isdigit(version[0]) && version[1] == '.' &&
        absl::ascii_isdigit(version[2]) && EndsLine(version.substr(kVersion))) {
      return true;
    }
  }
  return false;
}

std::optional<Magic> FindMagic(string_view bytes) {
  if (absl::StartsWith(bytes, "PK\x03\x04")) {
    for (const Magic& zip : kZips) {
      if (HasMember(bytes, zip.begin)) return zip;
    }
  }
  for (const Magic& magic : kMagics) {
    if (absl::StartsWith(bytes, magic.begin)) return magic;
  }
  if (bytes.find(kPdf) < kLatestPdf) return kMagics[0];
  return std::nullopt;
}

// UTF-16 and UTF-32: bytes of a unit, and whether the first is the highest.
struct WideEncoding {
  int size = 2;
  bool big = false;

  std::string name() const { return absl::StrCat("UTF-", 8 * size, big ? "BE" : "LE"); }
  uint32_t Unit(string_view bytes, size_t at) const {
    uint32_t unit = 0;
    for (int i = 0; i < size; ++i) {
      const auto byte = static_cast<uint8_t>(bytes[at + static_cast<size_t>(i)]);
      unit |= uint32_t{byte} << (8 * (big ? size - 1 - i : i));
    }
    return unit;
  }
};

void AppendUtf8(uint32_t code_point, std::string& text) {
  const auto add = [&](uint32_t byte) { text.push_back(static_cast<char>(byte)); };
  if (code_point < 0x80) return add(code_point);
  if (code_point < 0x800) {
    add(0xC0 | (code_point >> 6));
  } else if (code_point < 0x10000) {
    add(0xE0 | (code_point >> 12));
    add(0x80 | ((code_point >> 6) & 0x3F));
  } else {
    add(0xF0 | (code_point >> 18));
    add(0x80 | ((code_point >> 12) & 0x3F));
    add(0x80 | ((code_point >> 6) & 0x3F));
  }
  add(0x80 | (code_point & 0x3F));
}

absl::StatusOr<std::string> FromWide(string_view bytes, size_t from, WideEncoding encoding) {
  const auto size = static_cast<size_t>(encoding.size);
  const auto bad = [&](size_t at) {
    return absl::InvalidArgumentError(
        absl::StrCat("invalid ", encoding.name(), " at byte offset ", at, " of ", bytes.size()));
  };
  std::string text;
  text.reserve((bytes.size() - from) / 2);
  for (size_t at = from; at < bytes.size(); at += size) {
    const size_t begin = at;
    if (bytes.size() - at < size) return bad(begin);
    uint32_t code_point = encoding.Unit(bytes, at);
    if (size == 2 && code_point >= 0xD800 && code_point < 0xDC00) {
      if (bytes.size() - at < 2 * size) return bad(begin);
      const uint32_t low = encoding.Unit(bytes, at + size);
      if (low < 0xDC00 || low > 0xDFFF) return bad(begin);
      code_point = 0x10000 + ((code_point - 0xD800) << 10) + (low - 0xDC00);
      at += size;
    } else if ((code_point >= 0xD800 && code_point <= 0xDFFF) || code_point > 0x10FFFF) {
      return bad(begin);
    }
    AppendUtf8(code_point, text);
  }
  return text;
}

// By the mark that it begins with, and the mark's size.
std::optional<std::pair<WideEncoding, size_t>> MarkOf(string_view bytes) {
  static constexpr std::pair<string_view, WideEncoding> kMarks[] = {
      {string_view("\xff\xfe\0\0", 4), {4, false}},
      {string_view("\0\0\xfe\xff", 4), {4, true}},
      {string_view("\xff\xfe", 2), {2, false}},
      {string_view("\xfe\xff", 2), {2, true}},
  };
  for (const auto& [mark, encoding] : kMarks) {
    if (absl::StartsWith(bytes, mark)) return std::pair{encoding, mark.size()};
  }
  return std::nullopt;
}

// Bytes with NULs: the encoding in which they are a text, if there is one.
std::optional<WideEncoding> GuessWide(string_view bytes) {
  for (const WideEncoding encoding : {WideEncoding{4, false}, WideEncoding{4, true},
                                      WideEncoding{2, false}, WideEncoding{2, true}}) {
    const absl::StatusOr<std::string> text = FromWide(bytes, 0, encoding);
    if (!text.ok() || absl::StrContains(*text, string_view("\0", 1))) continue;
    // The other order of bytes often is one as well, but hardly one with spaces or line ends.
    const auto blank = std::count_if(text->begin(), text->end(), [](char c) {
      return absl::ascii_isspace(static_cast<unsigned char>(c)) ||
             absl::ascii_isalnum(static_cast<unsigned char>(c));
    });
    const auto control = std::count_if(text->begin(), text->end(), [](char c) {
      return absl::ascii_iscntrl(static_cast<unsigned char>(c)) &&
             !absl::ascii_isspace(static_cast<unsigned char>(c));
    });
    if (blank > 0 && control == 0) return encoding;
  }
  return std::nullopt;
}

// Of bytes that are no text as they are.
absl::Status Refuse(string_view bytes, const Suggestion& suggest) {
  if (const auto magic = FindMagic(bytes); magic.has_value()) {
    return suggest.Refuse(magic->name, magic->command);
  }
  if (const size_t nul = bytes.find('\0'); nul != string_view::npos) {
    if (const auto wide = GuessWide(bytes); wide.has_value()) {
      const std::string name = wide->name();
      return suggest.Refuse(absl::StrCat(name, " without a byte order mark"),
                            absl::StrCat("iconv -f ", absl::AsciiStrToLower(name), " -t utf-8 %s"));
    }
    return suggest.Refuse(
        absl::StrCat("binary (its first NUL byte is at offset ", nul, " of ", bytes.size(), ")"),
        "strings %s");
  }
  const absl::Status valid = model::ValidateUtf8(bytes);
  // A file that was cut inside a character, and is right before.
  if (const size_t whole = model::CompleteUtf8Size(bytes);
      whole < bytes.size() && model::ValidateUtf8(bytes.substr(0, whole)).ok()) {
    return Annotate(valid, "it ends inside a character");
  }
  return absl::InvalidArgumentError(absl::StrCat(
      valid.message(),
      ": it is in another encoding; in Latin-1: ", suggest.Command("iconv -f latin1 -t utf-8 %s")));
}

std::string RemarkOn(string_view text, const Suggestion& suggest) {
  const string_view begin = absl::StripLeadingAsciiWhitespace(text.substr(0, 4096));
  if (absl::StartsWithIgnoreCase(begin, "<!doctype html") ||
      absl::StartsWithIgnoreCase(begin, "<html") ||
      (absl::StartsWith(begin, "<?xml") &&
       absl::StrContains(absl::AsciiStrToLower(begin), "<html"))) {
    return absl::StrCat(
        "this is HTML: its tags and scripts are read as they stand; the text alone: ",
        suggest.Command("pandoc -f html -t plain %s"));
  }
  if (absl::StartsWith(begin, "{\\rtf")) {
    return absl::StrCat("this is RTF: its commands are read as they stand; the text alone: ",
                        suggest.Command("pandoc -f rtf -t plain %s"));
  }
  return "";
}

}  // namespace

absl::StatusOr<GivenText> TakeText(std::string bytes, string_view file, string_view then) {
  const Suggestion suggest{file, then};
  GivenText given;
  if (const auto mark = MarkOf(bytes); mark.has_value()) {
    ASSIGN_OR_RETURN(given.text, FromWide(bytes, mark->second, mark->first));
  } else {
    given.text = std::move(bytes);
  }
  if (IsPage(given.text) || absl::StrContains(given.text, string_view("\0", 1)) ||
      !model::ValidateUtf8(given.text).ok()) {
    return Refuse(given.text, suggest);
  }
  if (absl::StartsWith(given.text, "\xef\xbb\xbf")) given.text.erase(0, 3);
  given.remark = RemarkOn(given.text, suggest);
  return given;
}

}  // namespace carrel::library
