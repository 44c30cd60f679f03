#include "common/json.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/shown.h"
#include "common/status.h"
#include "nlohmann/json.hpp"

namespace carrel {
namespace {

using nlohmann::json;

// Builds the document as the parser reads it, and ends it at the first bound: the parser itself does not recurse.
class Builder {
 public:
  Builder(absl::string_view where, const JsonBounds& bounds) : where_(where), bounds_(bounds) {}

  bool null() { return Add(json()); }
  bool boolean(bool value) { return Add(json(value)); }
  bool number_integer(int64_t value) { return Add(json(value)); }
  bool number_unsigned(uint64_t value) { return Add(json(value)); }
  bool number_float(double value, const std::string&) { return Add(json(value)); }
  bool string(std::string& value) { return Add(json(std::move(value))); }
  bool binary(json::binary_t&) { return Refuse("binary"); }  // JSON text has none
  bool start_object(size_t) { return Enter(json::object()); }
  bool start_array(size_t) { return Enter(json::array()); }
  bool end_object() { return Leave(); }
  bool end_array() { return Leave(); }
  bool key(std::string& name) {
    json::object_t& object = open_.back()->get_ref<json::object_t&>();
    if (bounds_.unique_names && object.contains(name)) {
      return Refuse(absl::StrCat("the name ", ShownJson(json(name)), " occurs twice"));
    }
    place_ = &object[name];
    return true;
  }
  bool parse_error(size_t byte, const std::string&, const json::exception& error) {
    // What the library says stands behind "[json.exception...] parse error at line 1, column 2: ".
    absl::string_view what = error.what();
    const size_t place = what.find("column ");
    const size_t colon = what.find(": ", place == absl::string_view::npos ? 0 : place);
    what = colon == absl::string_view::npos ? "" : what.substr(colon + 2);
    status_ = absl::InvalidArgumentError(absl::StrCat(where_, ": not valid JSON at byte ", byte,
                                                      what.empty() ? "" : ": ", Shown(what, 200)));
    return false;
  }

  absl::Status status() const { return status_; }
  json Take() { return std::move(root_); }

 private:
  bool Refuse(absl::string_view why) {
    status_ = absl::InvalidArgumentError(absl::StrCat(where_, ": ", why));
    return false;
  }

  json* Put(json value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    if (open_.back()->is_array()) {
      open_.back()->push_back(std::move(value));
      return &open_.back()->back();
    }
    *place_ = std::move(value);
    return place_;
  }

  bool Add(json value) {
    if (++values_ > bounds_.values) {
      return Refuse(absl::StrCat("JSON of more than ", bounds_.values, " values"));
    }
    Put(std::move(value));
    return true;
  }

  bool Enter(json empty) {
    if (static_cast<int>(open_.size()) >= bounds_.depth) {
      return Refuse(absl::StrCat("JSON nests deeper than ", bounds_.depth, " levels"));
    }
    if (++values_ > bounds_.values) {
      return Refuse(absl::StrCat("JSON of more than ", bounds_.values, " values"));
    }
    open_.push_back(Put(std::move(empty)));
    return true;
  }

  bool Leave() {
    open_.pop_back();
    return true;
  }

  const absl::string_view where_;
  const JsonBounds& bounds_;
  json root_;
  std::vector<json*> open_;  // what is being read, from the outside in
  json* place_ = nullptr;    // of the field whose name was read
  int64_t values_ = 0;
  absl::Status status_;
};

template <typename Json>
std::string Dump(const Json& value, JsonLetters letters, int indent) {
  return value.dump(indent, ' ', letters == JsonLetters::kAscii, Json::error_handler_t::replace);
}

// As much of a value as a message shows, without printing all of it: a list may have a million entries.
void AppendShown(const json& value, size_t most, std::string& out) {
  if (out.size() > most) return;
  if (value.is_string()) {
    const std::string& text = value.get_ref<const std::string&>();
    absl::StrAppend(&out, Dump(json(text.substr(0, most + 4)), JsonLetters::kAscii, -1));
    return;
  }
  if (!value.is_structured()) {
    absl::StrAppend(&out, Dump(value, JsonLetters::kAscii, -1));
    return;
  }
  out += value.is_array() ? '[' : '{';
  bool first = true;
  for (auto entry = value.begin(); entry != value.end() && out.size() <= most; ++entry) {
    if (!first) out += ',';
    first = false;
    if (value.is_object()) {
      AppendShown(json(entry.key()), most, out);
      out += ':';
    }
    AppendShown(*entry, most, out);
  }
  out += value.is_array() ? ']' : '}';
}

}  // namespace

absl::StatusOr<json> ParseJson(absl::string_view text, absl::string_view where,
                               const JsonBounds& bounds) {
  if (static_cast<int64_t>(text.size()) > bounds.bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": JSON of ", text.size(), " bytes: must be at most ", bounds.bytes));
  }
  Builder builder(where, bounds);
  if (!json::sax_parse(text.begin(), text.end(), &builder)) return builder.status();
  return builder.Take();
}

absl::StatusOr<json> ParseJsonObject(absl::string_view text, absl::string_view where,
                                     const JsonBounds& bounds) {
  ASSIGN_OR_RETURN(json value, ParseJson(text, where, bounds));
  if (!value.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": a JSON ", value.type_name(), " where an object is expected"));
  }
  return value;
}

std::string DumpJson(const json& value, JsonLetters letters, int indent) {
  return Dump(value, letters, indent);
}

std::string DumpJson(const nlohmann::ordered_json& value, JsonLetters letters, int indent) {
  return Dump(value, letters, indent);
}

std::string ShownJson(const json& value, size_t most) {
  std::string text;
  AppendShown(value, most, text);
  if (text.size() > most) text = absl::StrCat(text.substr(0, most), "...");
  return text;
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
  return absl::StrCat(where_, where_.empty() ? "" : ": ", Shown(name, 200), "=",
                      value == nullptr ? "null" : ShownJson(*value), " ", what);
}

absl::Status JsonFields::Missing(absl::string_view name) const {
  return absl::InvalidArgumentError(
      absl::StrCat(where_, where_.empty() ? "" : ": ", Shown(name, 200), " is missing"));
}

absl::Status JsonFields::Invalid(absl::string_view name, absl::string_view what) const {
  return absl::InvalidArgumentError(Describe(name, what));
}

absl::Status JsonFields::Unsupported(absl::string_view name, absl::string_view what) const {
  return absl::UnimplementedError(Describe(name, what));
}

absl::StatusOr<int64_t> JsonFields::Int(absl::string_view name, int64_t min, int64_t max) const {
  const json* value = Find(name);
  if (value == nullptr) return Missing(name);
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
  if (value == nullptr) return Missing(name);
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
  if (value == nullptr) return Missing(name);
  if (!value->is_string()) return Invalid(name, "is not a string");
  return value->get<std::string>();
}

absl::StatusOr<std::string> JsonFields::StringOr(absl::string_view name,
                                                 absl::string_view fallback) const {
  if (!Has(name)) return std::string(fallback);
  return String(name);
}

absl::StatusOr<const json*> JsonFields::ArrayOr(absl::string_view name) const {
  const json* value = Find(name);
  if (value != nullptr && !value->is_array()) return Invalid(name, "is not a list");
  return value;
}

absl::StatusOr<const json*> JsonFields::ObjectOr(absl::string_view name) const {
  const json* value = Find(name);
  if (value != nullptr && !value->is_object()) return Invalid(name, "is not an object");
  return value;
}

const json* JsonAt(const json& value, absl::Span<const absl::string_view> path) {
  const json* at = &value;
  for (const absl::string_view name : path) {
    if (size_t index = 0; at->is_array() && absl::SimpleAtoi(name, &index)) {
      if (index >= at->size()) return nullptr;
      at = &(*at)[index];
      continue;
    }
    const auto found = at->find(name);  // end() of what is no object
    if (found == at->end()) return nullptr;
    at = &*found;
  }
  return at;
}

std::string JsonText(const json* value, absl::string_view fallback) {
  if (value == nullptr || !value->is_string()) return std::string(fallback);
  return value->get<std::string>();
}

double JsonNumber(const json* value, double fallback) {
  return value != nullptr && value->is_number() ? value->get<double>() : fallback;
}

int64_t JsonInt(const json* value, int64_t fallback) {
  const bool fits = value != nullptr && value->is_number_integer() &&
                    (!value->is_number_unsigned() || value->get<uint64_t>() <= INT64_MAX);
  return fits ? value->get<int64_t>() : fallback;
}

bool JsonBool(const json* value, bool fallback) {
  return value != nullptr && value->is_boolean() ? value->get<bool>() : fallback;
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

}  // namespace carrel
