// What:   the XML that object stores answer with, as a tree, with bounds. The only place that knows Expat.
// Errors: DataLoss names where the text is from and what is wrong: not well-formed (names the line), a
//         bound exceeded, a document type: entities could make any size of a few bytes.
// Edge:   attributes, comments and processing instructions are left out. Names have no namespace.
// Threads: any.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace carrel::kvstore {

struct XmlElement {
  std::string name;
  std::string text;  // of this element, without that of its children
  std::vector<XmlElement> children;

  const XmlElement* Find(absl::string_view name) const;  // the first child of it; null: none
  absl::string_view Text(absl::string_view name) const;  // the first child's; empty: none
};

inline constexpr int kMostXmlDepth = 16;
inline constexpr int64_t kMostXmlElements = 200'000;

absl::StatusOr<XmlElement> ParseXml(absl::string_view text, absl::string_view where);

// Text as it stands between tags.
std::string XmlEscaped(absl::string_view text);

}  // namespace carrel::kvstore
