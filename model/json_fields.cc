#include "model/json_fields.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "common/json_depth.h"
#include "common/status.h"
#include "nlohmann/json.hpp"

namespace carrel::model {
namespace {

using nlohmann::json;

constexpr size_t kMaxValueInMessage = 80;

// As ASCII JSON: a message stays one line, and cutting it cuts no character.
std::string Shorten(const json& value) {
  // `replace` because a string from valid JSON is valid UTF-8, but one must not rely on it here.
  std::string text = value.dump(-1, ' ', true, json::error_handler_t::replace);
  if (text.size() > kMaxValueInMessage) text = text.substr(0, kMaxValueInMessage) + "...";
  return text;
}

}  // namespace

absl::StatusOr<json> ParseJsonObject(absl::string_view text, absl::string_view where,
                                     bool unique_names) {
  std::set<std::string> names;
  std::string repeated;
  const json::parser_callback_t note_names = [&](int depth, json::parse_event_t event,
                                                 json& parsed) {
    if (event == json::parse_event_t::key && depth == 1 && repeated.empty()) {
      if (!names.insert(parsed.get<std::string>()).second) repeated = parsed.get<std::string>();
    }
    return true;
  };
  RETURN_IF_ERROR(CheckJsonDepth(text, where));
  json object;
  try {
    object = json::parse(text.begin(), text.end(), unique_names ? note_names : nullptr);
  } catch (const json::exception& error) {
    const auto* parse_error = dynamic_cast<const json::parse_error*>(&error);
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": not valid JSON",
                     parse_error ? absl::StrCat(" at byte ", parse_error->byte) : std::string()));
  }
  if (!object.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": a JSON ", object.type_name(), " where an object is expected"));
  }
  if (!repeated.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": the name ", Shorten(json(repeated)), " occurs twice"));
  }
  return object;
}

const json* JsonFields::Find(absl::string_view name) const {
  const auto it = object_.find(name);
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

bool JsonFields::IsNull(absl::string_view name) const {
  const auto it = object_.find(name);
  return it != object_.end() && it->is_null();
}

std::string JsonFields::Describe(absl::string_view name, absl::string_view what) const {
  const json* value = Find(name);
  return absl::StrCat(where_, ": ", name, "=", value == nullptr ? "null" : Shorten(*value), " ",
                      what);
}

absl::Status JsonFields::Invalid(absl::string_view name, absl::string_view what) const {
  return absl::InvalidArgumentError(Describe(name, what));
}

absl::Status JsonFields::Unsupported(absl::string_view name, absl::string_view what) const {
  return absl::UnimplementedError(Describe(name, what));
}

absl::StatusOr<int64_t> JsonFields::Int(absl::string_view name, int64_t min, int64_t max) const {
  const json* value = Find(name);
  if (value == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(where_, ": ", name, " is missing"));
  }
  if (!value->is_number_integer()) return Invalid(name, "is not an integer");
  const bool too_large =
      value->is_number_unsigned() && value->get<uint64_t>() > uint64_t{INT64_MAX};
  const int64_t x = too_large ? 0 : value->get<int64_t>();
  if (too_large || x < min || x > max) {
    return Invalid(name, absl::StrCat("is outside [", min, ", ", max, "]"));
  }
  return x;
}

absl::StatusOr<int64_t> JsonFields::IntOr(absl::string_view name, int64_t fallback, int64_t min,
                                          int64_t max) const {
  if (!Has(name)) return fallback;
  return Int(name, min, max);
}

absl::StatusOr<double> JsonFields::Number(absl::string_view name, double min, double max) const {
  const json* value = Find(name);
  if (value == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(where_, ": ", name, " is missing"));
  }
  if (!value->is_number()) return Invalid(name, "is not a number");
  const double x = value->get<double>();
  if (!(x >= min && x <= max)) {  // also NaN
    return Invalid(name, absl::StrCat("is outside [", min, ", ", max, "]"));
  }
  return x;
}

absl::StatusOr<double> JsonFields::NumberOr(absl::string_view name, double fallback, double min,
                                            double max) const {
  if (!Has(name)) return fallback;
  return Number(name, min, max);
}

absl::StatusOr<bool> JsonFields::BoolOr(absl::string_view name, bool fallback) const {
  const json* value = Find(name);
  if (value == nullptr) return fallback;
  if (!value->is_boolean()) return Invalid(name, "is not true or false");
  return value->get<bool>();
}

absl::StatusOr<std::string> JsonFields::String(absl::string_view name) const {
  const json* value = Find(name);
  if (value == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(where_, ": ", name, " is missing"));
  }
  if (!value->is_string()) return Invalid(name, "is not a string");
  return value->get<std::string>();
}

absl::Status RefuseUnknownFields(const JsonFields& fields,
                                 absl::Span<const absl::string_view> known) {
  for (const auto& [name, value] : fields.object().items()) {
    const bool empty = value.is_null() || value == false || value == "" ||
                       (value.is_structured() && value.empty());
    if (!empty && std::find(known.begin(), known.end(), name) == known.end()) {
      return fields.Unsupported(name, "is not understood, and could change results");
    }
  }
  return absl::OkStatus();
}

}  // namespace carrel::model
