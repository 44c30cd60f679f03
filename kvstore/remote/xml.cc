#include "kvstore/remote/xml.h"

#include <expat.h>

#include <cstdint>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/shown.h"

namespace carrel::kvstore {
namespace {

struct Building {
  XML_Parser parser = nullptr;
  XmlElement top;  // holds the root
  std::vector<XmlElement*> open = {&top};
  int64_t elements = 0;
  std::string refused;

  void Refuse(std::string why) {
    if (refused.empty()) refused = std::move(why);
    XML_StopParser(parser, XML_FALSE);
  }
};

void OnStart(void* user, const XML_Char* name, const XML_Char**) {
  auto& building = *static_cast<Building*>(user);
  if (++building.elements > kMostXmlElements) {
    return building.Refuse(absl::StrCat("more than ", kMostXmlElements, " elements"));
  }
  if (static_cast<int>(building.open.size()) > kMostXmlDepth) {
    return building.Refuse(
        absl::StrCat("more than ", kMostXmlDepth, " elements within each other"));
  }
  absl::string_view local(name);
  if (const size_t colon = local.rfind(':'); colon != absl::string_view::npos) {
    local.remove_prefix(colon + 1);
  }
  // The parent gets no other child while this one is open: the pointer holds.
  building.open.back()->children.push_back({.name = std::string(local)});
  building.open.push_back(&building.open.back()->children.back());
}

void OnEnd(void* user, const XML_Char*) {
  auto& building = *static_cast<Building*>(user);
  if (building.open.size() > 1) building.open.pop_back();
}

void OnText(void* user, const XML_Char* text, int size) {
  static_cast<Building*>(user)->open.back()->text.append(text, static_cast<size_t>(size));
}

void OnDocumentType(void* user, const XML_Char*, const XML_Char*, const XML_Char*, int) {
  static_cast<Building*>(user)->Refuse("a document type");
}

}  // namespace

const XmlElement* XmlElement::Find(absl::string_view wanted) const {
  for (const XmlElement& child : children) {
    if (child.name == wanted) return &child;
  }
  return nullptr;
}

absl::string_view XmlElement::Text(absl::string_view wanted) const {
  const XmlElement* const child = Find(wanted);
  return child == nullptr ? absl::string_view() : absl::string_view(child->text);
}

absl::StatusOr<XmlElement> ParseXml(absl::string_view text, absl::string_view where) {
  if (text.size() > (size_t{1} << 30)) {
    return absl::DataLossError(absl::StrCat(where, ": the XML has ", text.size(), " bytes"));
  }
  Building building;
  building.parser = XML_ParserCreate(nullptr);
  if (building.parser == nullptr) return absl::ResourceExhaustedError("no memory for XML");
  const absl::Cleanup free_it = [&building] { XML_ParserFree(building.parser); };
  XML_SetUserData(building.parser, &building);
  XML_SetElementHandler(building.parser, OnStart, OnEnd);
  XML_SetCharacterDataHandler(building.parser, OnText);
  XML_SetStartDoctypeDeclHandler(building.parser, OnDocumentType);
  const XML_Status status =
      XML_Parse(building.parser, text.data(), static_cast<int>(text.size()), XML_TRUE);
  if (!building.refused.empty()) {
    return absl::DataLossError(absl::StrCat(where, ": the XML has ", building.refused));
  }
  if (status != XML_STATUS_OK || building.top.children.empty()) {
    return absl::DataLossError(absl::StrCat(
        where, ": no well-formed XML (line ", XML_GetCurrentLineNumber(building.parser), ": ",
        XML_ErrorString(XML_GetErrorCode(building.parser)), "): ", Shown(text, 80)));
  }
  return std::move(building.top.children.front());
}

std::string XmlEscaped(absl::string_view text) {
  return absl::StrReplaceAll(
      text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}, {"\r", "&#13;"}});
}

}  // namespace carrel::kvstore
