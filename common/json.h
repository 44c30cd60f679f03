// What:   JSON, from outside and to outside: the one parser, with bounds; the one printer, which never fails;
//         and typed, bounded reads of an object's fields. Nothing else calls nlohmann's parse, value or dump
//         (tests/tidy): they throw, or recurse as deeply as the text says.
// Errors: InvalidArgument, each naming where the text is from and the byte, or the field, its value and its bound:
//         malformed text (also bytes that are no UTF-8, lone surrogates, NaN), a bound exceeded, a field that is
//         absent, of another type or out of range. Never an exception.
// Cost:   ParseJson is linear in the text and stops at the first bound.
// Ownership: JsonFields keeps a reference to the object, which outlives it.
// Threads: reentrant.
// Example:
//   ASSIGN_OR_RETURN(const nlohmann::json body, ParseJsonObject(text, "the body", kRequestBounds));
//   const JsonFields fields("", body);
//   ASSIGN_OR_RETURN(const int64_t n, fields.IntOr("n", 1, 1, 128));  // "n=\"x\" is not an integer"
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "nlohmann/json_fwd.hpp"

namespace carrel {

struct JsonBounds {
  int depth = 64;  // arrays and objects within each other; what prints or copies a value recurses
  int64_t bytes = int64_t{4} << 30;
  int64_t values =
      int64_t{1} << 28;       // numbers, texts, arrays, ..: each takes memory beyond its bytes
  bool unique_names = false;  // refuse an object that names a field twice; else the last one counts
};

// An answer of another program, or a request: small ones.
inline constexpr JsonBounds kMessageBounds{64, int64_t{64} << 20, int64_t{1} << 20, false};

absl::StatusOr<nlohmann::json> ParseJson(absl::string_view text, absl::string_view where,
                                         const JsonBounds& bounds = {});
// An object at the top level.
absl::StatusOr<nlohmann::json> ParseJsonObject(absl::string_view text, absl::string_view where,
                                               const JsonBounds& bounds = {});

// Bytes of texts that are no UTF-8 become U+FFFD. indent: -1: one line.
enum class JsonLetters { kUtf8, kAscii };
std::string DumpJson(const nlohmann::json& value, JsonLetters letters = JsonLetters::kUtf8,
                     int indent = -1);
std::string DumpJson(const nlohmann::ordered_json& value, JsonLetters letters = JsonLetters::kUtf8,
                     int indent = -1);

// For a message: one line of ASCII, at most `most` bytes and an ellipsis.
std::string ShownJson(const nlohmann::json& value, size_t most = 80);

class JsonFields {
 public:
  // `where` is what messages begin with: a file, or a file and the field that holds the object; empty: nothing.
  // The object must outlive this.
  JsonFields(std::string where, const nlohmann::json& object)
      : where_(std::move(where)), object_(object) {}

  const std::string& where() const { return where_; }
  const nlohmann::json& object() const { return object_; }
  // Null if absent or JSON null: null counts as absent for the ...Or readers, too, as transformers treats it.
  // Of a value that is no object: nothing is there.
  const nlohmann::json* Find(absl::string_view name) const;
  bool Has(absl::string_view name) const { return Find(name) != nullptr; }
  bool IsNull(absl::string_view name) const;  // present, and JSON null

  absl::StatusOr<int64_t> Int(absl::string_view name, int64_t min, int64_t max) const;
  absl::StatusOr<int64_t> IntOr(absl::string_view name, int64_t fallback, int64_t min,
                                int64_t max) const;
  absl::StatusOr<double> Number(absl::string_view name, double min, double max) const;
  absl::StatusOr<double> NumberOr(absl::string_view name, double fallback, double min,
                                  double max) const;
  absl::StatusOr<bool> BoolOr(absl::string_view name, bool fallback) const;
  absl::StatusOr<std::string> String(absl::string_view name) const;
  absl::StatusOr<std::string> StringOr(absl::string_view name, absl::string_view fallback) const;
  // Null: absent. It lives as long as the object.
  absl::StatusOr<const nlohmann::json*> ArrayOr(absl::string_view name) const;
  absl::StatusOr<const nlohmann::json*> ObjectOr(absl::string_view name) const;

  // "where: name=value what": the value is cut to a readable length.
  absl::Status Invalid(absl::string_view name, absl::string_view what) const;
  absl::Status Unsupported(absl::string_view name, absl::string_view what) const;

 private:
  std::string Describe(absl::string_view name, absl::string_view what) const;
  absl::Status Missing(absl::string_view name) const;

  const std::string where_;
  const nlohmann::json& object_;
};

// Of what somebody else sent and nobody vouches for: the value at a path of names (of a list: of places, "0"),
// or null where any of it is absent. The readers below give the fallback for what is of another type.
const nlohmann::json* JsonAt(const nlohmann::json& value, absl::Span<const absl::string_view> path);
std::string JsonText(const nlohmann::json* value, absl::string_view fallback = "");
double JsonNumber(const nlohmann::json* value, double fallback = 0);
int64_t JsonInt(const nlohmann::json* value, int64_t fallback = 0);
bool JsonBool(const nlohmann::json* value, bool fallback = false);

// Unimplemented, naming it, for a field that is neither in `known` nor empty (null, false, "", [],
// {}): what is not understood could change results.
absl::Status RefuseUnknownFields(const JsonFields& fields,
                                 absl::Span<const absl::string_view> known);

}  // namespace carrel
