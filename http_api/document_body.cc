#include "http_api/document_body.h"

#include <algorithm>
#include <array>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/json.h"
#include "common/shown.h"
#include "common/status.h"
#include "http_api/api_error.h"
#include "http_api/http_message.h"
#include "library/text_kind.h"

namespace carrel::http_api {
namespace {

using nlohmann::json;

absl::Status NoText(absl::string_view words) {
  return WithHttpStatus(absl::InvalidArgumentError(words), 415);
}

absl::Status Bad(absl::string_view field, absl::string_view value, absl::string_view wanted) {
  return WithParam(
      absl::InvalidArgumentError(absl::StrCat(field, "=", Shown(value), ": must be ", wanted)),
      field);
}

struct MediaType {
  std::string type;  // "text/plain", in small letters; empty: none is said
  std::map<std::string, std::string> parameters;
};

// Malformed parameters are none.
MediaType ParseMediaType(absl::string_view header) {
  MediaType media;
  const size_t end = header.find(';');
  media.type = absl::AsciiStrToLower(absl::StripAsciiWhitespace(header.substr(0, end)));
  absl::string_view rest = end == absl::string_view::npos ? "" : header.substr(end + 1);
  while (!rest.empty()) {
    const size_t equals = rest.find_first_of("=;");
    if (equals == absl::string_view::npos) break;
    const absl::string_view name = absl::StripAsciiWhitespace(rest.substr(0, equals));
    const bool has_value = rest[equals] == '=';
    rest.remove_prefix(equals + 1);
    if (!has_value) continue;
    rest = absl::StripLeadingAsciiWhitespace(rest);
    std::string value;
    if (absl::ConsumePrefix(&rest, "\"")) {
      while (!rest.empty() && rest.front() != '"') {
        if (rest.front() == '\\' && rest.size() > 1) rest.remove_prefix(1);
        value += rest.front();
        rest.remove_prefix(1);
      }
    } else {
      value = std::string(absl::StripAsciiWhitespace(rest.substr(0, rest.find(';'))));
    }
    media.parameters.emplace(absl::AsciiStrToLower(name), std::move(value));
    const size_t next = rest.find(';');
    rest = next == absl::string_view::npos ? "" : rest.substr(next + 1);
  }
  return media;
}

bool IsText(const std::string& type) {
  static constexpr std::array<absl::string_view, 16> kTexts = {
      "application/octet-stream", "application/xml",  "application/yaml",
      "application/x-yaml",       "application/toml", "application/x-ndjson",
      "application/jsonl",        "application/sql",  "application/javascript",
      "application/x-javascript", "application/x-sh", "application/x-tex",
      "application/x-latex",      "application/csv",  "application/x-subrip",
      "application/markdown"};
  if (type.empty() || absl::StartsWith(type, "text/")) return true;
  if (absl::EndsWith(type, "+xml") || absl::EndsWith(type, "+json")) return true;
  return std::find(kTexts.begin(), kTexts.end(), type) != kTexts.end();
}

// RFC 8259, and the suffix of RFC 6839.
bool IsJson(const std::string& type) {
  return type == "application/json" || type == "text/json" || absl::EndsWith(type, "+json");
}

// Each byte is the character of its number.
std::string FromLatin1(absl::string_view bytes) {
  std::string text;
  text.reserve(bytes.size());
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x80) {
      text += c;
    } else {
      text += static_cast<char>(0xc0 | (byte >> 6));
      text += static_cast<char>(0x80 | (byte & 0x3f));
    }
  }
  return text;
}

// As the charset says, in a form that TakeText knows.
absl::StatusOr<std::string> FromCharset(std::string bytes, const std::string& charset) {
  const std::string name = absl::AsciiStrToLower(charset);
  const bool little = absl::StartsWith(bytes, "\xff\xfe"),
             big = absl::StartsWith(bytes, "\xfe\xff");
  if (name.empty() || name == "utf-8" || name == "utf8") return bytes;
  if (name == "us-ascii" || name == "ascii") {
    const auto beyond = std::find_if(bytes.begin(), bytes.end(),
                                     [](char c) { return static_cast<unsigned char>(c) > 0x7f; });
    if (beyond == bytes.end()) return bytes;
    return absl::InvalidArgumentError(absl::StrCat("text: charset ", name,
                                                   ", but the byte at offset ",
                                                   beyond - bytes.begin(), " is above 0x7f"));
  }
  if (name == "iso-8859-1" || name == "latin1" || name == "latin-1") return FromLatin1(bytes);
  if (name == "utf-16") {
    if (little || big) return bytes;
    return absl::InvalidArgumentError(
        "text: charset utf-16 without a byte order mark: say utf-16le or utf-16be");
  }
  if (name == "utf-16le") return little ? bytes : absl::StrCat("\xff\xfe", bytes);
  if (name == "utf-16be") return big ? bytes : absl::StrCat("\xfe\xff", bytes);
  const bool plain =
      name.size() <= 40 && std::all_of(name.begin(), name.end(), [](char c) {
        return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_';
      });
  return NoText(absl::StrCat(
      "charset ", Shown(name, 64),
      " is not read: utf-8, us-ascii, iso-8859-1, utf-16, utf-16le and utf-16be are; ",
      plain ? absl::StrCat("iconv -f ", name, " -t utf-8 FILE > FILE.txt") : std::string("iconv"),
      " makes utf-8 of it"));
}

// What bytes of a media type are as a text, by the charset that it says.
absl::StatusOr<library::GivenText> TextOf(std::string bytes, const MediaType& media) {
  const auto charset = media.parameters.find("charset");
  ASSIGN_OR_RETURN(
      std::string in_charset,
      FromCharset(std::move(bytes), charset == media.parameters.end() ? "" : charset->second));
  absl::StatusOr<library::GivenText> text = library::TakeText(std::move(in_charset));
  if (!text.ok()) return WithParam(Annotate(text.status(), "text"), "text");
  return text;
}

absl::Status SetText(std::string bytes, const MediaType& media, GivenDocument& document) {
  absl::StatusOr<library::GivenText> text = TextOf(std::move(bytes), media);
  if (!IsText(media.type)) {
    // Its bytes may tell what makes a text of it.
    return NoText(!text.ok() ? std::string(text.status().message())
                             : absl::StrCat("Content-Type ", Shown(media.type),
                                            " is not read: send a text, as text/plain"));
  }
  RETURN_IF_ERROR(text.status());
  document.text = std::move(text->text);
  document.remark = std::move(text->remark);
  return absl::OkStatus();
}

// A field by its text; false: there is none of the name.
absl::StatusOr<bool> SetField(absl::string_view name, const std::string& value,
                              GivenDocument& document) {
  if (name == "name") {
    document.name = value;
  } else if (name == "chat") {
    if (value != "true" && value != "false") return Bad("chat", value, "true or false");
    document.in_turn = value == "true";
  } else if (name == "missing_bytes") {
    if (value != "refuse" && value != "drop") return Bad(name, value, "refuse or drop");
    document.drop_missing = value == "drop";
  } else {
    return false;
  }
  return true;
}

absl::Status ReadQuery(absl::string_view query, GivenDocument& document) {
  for (const absl::string_view one : absl::StrSplit(query, '&', absl::SkipEmpty())) {
    const absl::string_view name = one.substr(0, one.find('='));
    const std::string value = QueryParameter(one, name);
    if (value.empty()) continue;
    ASSIGN_OR_RETURN(const bool known, SetField(name, value, document));
    if (!known)
      return Bad(Shown(name, 64), value, "left out: name, chat and missing_bytes are read");
  }
  return absl::OkStatus();
}

absl::Status ReadJson(absl::string_view body, GivenDocument& document) {
  JsonBounds bounds = kMessageBounds;
  bounds.unique_names = true;
  ASSIGN_OR_RETURN(const json given, ParseJsonObject(body, "the body", bounds));
  bool has_text = false;
  for (const auto& [name, value] : given.items()) {
    if (value.is_null()) continue;
    if (name == "text") {
      if (!value.is_string()) return Bad(name, ShownJson(value), "a text");
      has_text = true;
      RETURN_IF_ERROR(SetText(value.get<std::string>(), {}, document));
      continue;
    }
    if (name == "chat" && !value.is_boolean()) return Bad(name, ShownJson(value), "true or false");
    if (name != "chat" && !value.is_string())
      return Bad(Shown(name, 64), ShownJson(value), "a text");
    const std::string text =
        name == "chat" ? (value.get<bool>() ? "true" : "false") : value.get<std::string>();
    ASSIGN_OR_RETURN(const bool known, SetField(name, text, document));
    if (!known) {
      return Bad(Shown(name, 64), ShownJson(value),
                 "left out: name, text, chat and missing_bytes are read");
    }
  }
  if (has_text) return absl::OkStatus();
  return WithParam(absl::InvalidArgumentError("text is missing"), "text");
}

struct Part {
  std::string name, file;  // of its Content-Disposition
  bool is_file = false;
  MediaType media;
  std::string body;
};

absl::Status ReadPartHead(absl::string_view head, Part& part) {
  for (const absl::string_view line : absl::StrSplit(head, "\r\n")) {
    const size_t colon = line.find(':');
    if (colon == absl::string_view::npos) continue;
    const std::string name =
        absl::AsciiStrToLower(absl::StripAsciiWhitespace(line.substr(0, colon)));
    const absl::string_view value = absl::StripAsciiWhitespace(line.substr(colon + 1));
    if (name == "content-type") part.media = ParseMediaType(value);
    if (name == "content-transfer-encoding") {
      const std::string coding = absl::AsciiStrToLower(value);
      if (coding != "binary" && coding != "8bit" && coding != "7bit") {
        return NoText(absl::StrCat("Content-Transfer-Encoding ", Shown(coding, 64),
                                   " is not read: send the file as it is"));
      }
    }
    if (name != "content-disposition") continue;
    const MediaType disposition = ParseMediaType(value);
    if (const auto it = disposition.parameters.find("name"); it != disposition.parameters.end()) {
      part.name = it->second;
    }
    for (const char* file : {"filename", "filename*"}) {
      const auto it = disposition.parameters.find(file);
      part.is_file |= it != disposition.parameters.end();
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Part>> ReadParts(absl::string_view body, const std::string& boundary) {
  const auto broken = [](absl::string_view what) {
    return absl::InvalidArgumentError(absl::StrCat("multipart/form-data: ", what));
  };
  if (boundary.empty() || boundary.size() > 70) return broken("boundary: must have 1 .. 70 bytes");
  const std::string first = absl::StrCat("--", boundary), next = absl::StrCat("\r\n--", boundary);
  if (!absl::ConsumePrefix(&body, first)) {  // there may be a preamble
    const size_t at = body.find(next);
    if (at == absl::string_view::npos) return broken("its boundary is not in the body");
    body.remove_prefix(at + next.size());
  }
  std::vector<Part> parts;
  while (!absl::StartsWith(body, "--")) {
    if (static_cast<int>(parts.size()) >= kMaxParts) {
      return broken(absl::StrCat("more than ", kMaxParts, " parts"));
    }
    while (!body.empty() && (body.front() == ' ' || body.front() == '\t')) body.remove_prefix(1);
    if (!absl::ConsumePrefix(&body, "\r\n")) return broken("a part does not begin");
    Part& part = parts.emplace_back();
    if (!absl::ConsumePrefix(&body, "\r\n")) {  // it has a head
      const size_t end = body.substr(0, kMaxPartHead).find("\r\n\r\n");
      if (end == absl::string_view::npos) {
        return broken(
            absl::StrCat("the head of a part has no end within ", kMaxPartHead, " bytes"));
      }
      RETURN_IF_ERROR(ReadPartHead(body.substr(0, end), part));
      body.remove_prefix(end + 4);
    }
    const size_t end = body.find(next);
    if (end == absl::string_view::npos) return broken("a part has no end");
    part.body = std::string(body.substr(0, end));
    body.remove_prefix(end + next.size());
  }
  return parts;
}

absl::Status ReadForm(const HttpRequest& request, const MediaType& media, GivenDocument& document) {
  const auto boundary = media.parameters.find("boundary");
  ASSIGN_OR_RETURN(
      std::vector<Part> parts,
      ReadParts(request.body, boundary == media.parameters.end() ? "" : boundary->second));
  int files = 0;
  for (Part& part : parts) {
    if (part.is_file || part.name == "text" || part.name == "file") {
      if (++files > 1) {
        return absl::InvalidArgumentError(
            "multipart/form-data: more than one file: each document is a request of its own");
      }
      RETURN_IF_ERROR(SetText(std::move(part.body), part.media, document));
      continue;
    }
    ASSIGN_OR_RETURN(const bool known, SetField(part.name, part.body, document));
    if (!known) {
      return Bad(Shown(part.name, 64), part.body,
                 "left out: a file, name, chat and missing_bytes are read");
    }
  }
  if (files == 1) return absl::OkStatus();
  return absl::InvalidArgumentError("multipart/form-data: no file in it: curl -F file=@FILE");
}

}  // namespace

absl::Status CheckCoding(absl::string_view content_encoding) {
  if (content_encoding.empty() || absl::EqualsIgnoreCase(content_encoding, "identity")) {
    return absl::OkStatus();
  }
  return NoText(absl::StrCat("Content-Encoding ", Shown(content_encoding, 64),
                             " is not read: send the body as it is"));
}

absl::StatusOr<GivenDocument> ReadDocument(const HttpRequest& request, absl::string_view query) {
  RETURN_IF_ERROR(CheckCoding(request.content_encoding));
  GivenDocument document;
  RETURN_IF_ERROR(ReadQuery(query, document));
  const MediaType media = ParseMediaType(request.content_type);
  if (media.type == "application/x-www-form-urlencoded") {
    return NoText(
        "Content-Type application/x-www-form-urlencoded is no text, and curl says it unless told "
        "otherwise: curl --data-binary @FILE -H 'Content-Type: text/plain' URL, or curl -F "
        "file=@FILE "
        "URL");
  }
  if (media.type == "multipart/form-data") {
    RETURN_IF_ERROR(ReadForm(request, media, document));
  } else if (IsJson(media.type)) {
    ASSIGN_OR_RETURN(const library::GivenText body, TextOf(request.body, media));
    RETURN_IF_ERROR(ReadJson(body.text, document));
  } else {
    RETURN_IF_ERROR(SetText(request.body, media, document));
  }
  if (document.text.empty()) {
    return WithParam(absl::InvalidArgumentError("text: the document is empty"), "text");
  }
  return document;
}

}  // namespace carrel::http_api
