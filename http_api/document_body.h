// What:   a document as a request brings it: the text itself in an encoding that its Content-Type says, a JSON object
//         {"name", "text", "chat", "missing_bytes"}, or a form (multipart/form-data) with one file and the same
//         fields; the query says the same, and less than a body does.
// Source: RFC 9110 8.3 (media types: no case, parameters in quotes or not); RFC 7578 and 2046 5.1 (forms).
// Errors: 415 (api_error.h) a media type that is no text, an encoding that is not read, a Content-Encoding;
//         InvalidArgument a field, or bytes that are no text of the encoding, at offsets of what was sent.
// Bounds: a form has at most kMaxParts parts, whose heads are at most kMaxPartHead bytes.
// Threads: any.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "http_api/http_server.h"

namespace carrel::http_api {

struct GivenDocument {
  std::string name;     // empty: none was said
  std::string text;     // UTF-8
  std::string remark;   // for people: why it may not be what they mean; mostly empty
  bool in_turn = true;  // as "chat" says: inside a user's turn, where the model knows chats
  bool drop_missing =
      false;  // "missing_bytes": "drop": what the tokenizer has no token for is left out
};

inline constexpr int kMaxParts = 16;
inline constexpr size_t kMaxPartHead = 8 << 10;

// 415 of a body that is not as it stands: nothing is decoded here.
absl::Status CheckCoding(absl::string_view content_encoding);

// query: of the target, behind its '?'.
absl::StatusOr<GivenDocument> ReadDocument(const HttpRequest& request, absl::string_view query);

}  // namespace carrel::http_api
