// What:   the one table of what a completion request may say: which fields are read, which change nothing here,
//         which would change the answer and are not done. docs/api-fields.md shows it (request_fields_test.cc).
// Rules:  kRead: read by completion.cc. kHarmless: changes no answer, whatever it says: taken in silence.
//         kNeutral: taken if it says what is done anyway, refused otherwise. What is not in the table: taken if it
//         says nothing (null, false, "", [], {}); refused if it is nearly a name that is read (with that name);
//         otherwise named in the answer, carrel.ignored.
// Errors: InvalidArgument names field and value, with the field as `param`.
// Threads: any.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json_fwd.hpp"

namespace carrel::http_api {

enum class RequestKind { kChat, kPrompt, kMessage };  // kMessage: an entry of messages

struct FieldRule {
  enum Kind { kRead, kHarmless, kNeutral };
  const char* name;
  const char* where;  // of "chat", "prompt", "message"
  Kind kind;
  const char* neutral;  // of kNeutral: a JSON list of what is taken
  const char* words;    // what it is, or what to do instead
};

const std::vector<FieldRule>& FieldRules();

// Of an object: its fields by the rules. Names of those that are ignored are added, behind `path`.
absl::Status CheckFields(RequestKind kind, const nlohmann::json& object, absl::string_view path,
                         std::vector<std::string>& ignored);

}  // namespace carrel::http_api
