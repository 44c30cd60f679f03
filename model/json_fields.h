// What:   typed, bounded reads from a JSON object; every message names the file, the field, the
//         value and the bound.
// Edge:   "null" counts as absent for the ...Or readers, as transformers treats it.
// Errors: InvalidArgument malformed or too deeply nested JSON, a field that is absent, of another type or out of range.
// Ownership: keeps a reference to the object, which outlives it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "nlohmann/json_fwd.hpp"

namespace carrel::model {

// An object at the top level, else InvalidArgument naming `where` and the byte. With `unique_names`
// a name that occurs twice at the top level is refused; otherwise the last one counts.
absl::StatusOr<nlohmann::json> ParseJsonObject(absl::string_view text, absl::string_view where,
                                               bool unique_names);

class JsonFields {
 public:
  // `where` is what messages begin with: a file, or a file and the field that holds the object.
  // The object must outlive this.
  JsonFields(std::string where, const nlohmann::json& object)
      : where_(std::move(where)), object_(object) {}

  const std::string& where() const { return where_; }
  const nlohmann::json& object() const { return object_; }
  const nlohmann::json* Find(absl::string_view name) const;  // null if absent or JSON null
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

  // "where: name=value what": the value is cut to a readable length.
  absl::Status Invalid(absl::string_view name, absl::string_view what) const;
  absl::Status Unsupported(absl::string_view name, absl::string_view what) const;

 private:
  std::string Describe(absl::string_view name, absl::string_view what) const;

  const std::string where_;
  const nlohmann::json& object_;
};

// Unimplemented, naming it, for a field that is neither in `known` nor empty (null, false, "", [],
// {}): what is not understood could change results.
absl::Status RefuseUnknownFields(const JsonFields& fields,
                                 absl::Span<const absl::string_view> known);

}  // namespace carrel::model
