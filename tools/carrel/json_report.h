// What: what commands tell machines: one JSON object, a line of standard output; and messages of a store as JSON.
#pragma once

#include <initializer_list>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace google::protobuf {
class Message;
}

namespace carrel::tools {

void PrintJson(const nlohmann::json& json);
// The object as JSON, or else the text for people.
absl::Status Report(bool as_json, const nlohmann::json& json, const std::string& text);

// A line of standard error for each: "cannot be read: ..".
void TellUnreadable(absl::Span<const absl::Status> statuses);

// The message's fields under their names, with what is within them; what is not set has its default.
nlohmann::json JsonOf(const google::protobuf::Message& message,
                      std::initializer_list<absl::string_view> left_out = {});
void Rename(nlohmann::json& object, const char* from, const char* to);

}  // namespace carrel::tools
