#include "tools/carrel/json_report.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"
#include "common/json.h"

namespace carrel::tools {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

// The field's value, or one of its list.
nlohmann::json ValueOf(const Message& message, const FieldDescriptor& field, int at) {
  const google::protobuf::Reflection& of = *message.GetReflection();
  const auto get = [&](auto one, auto repeated) -> nlohmann::json {
    return field.is_repeated() ? (of.*repeated)(message, &field, at) : (of.*one)(message, &field);
  };
  using R = google::protobuf::Reflection;
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT64:
      return get(&R::GetInt64, &R::GetRepeatedInt64);
    case FieldDescriptor::CPPTYPE_UINT32:
      return get(&R::GetUInt32, &R::GetRepeatedUInt32);
    case FieldDescriptor::CPPTYPE_FLOAT:
      return get(&R::GetFloat, &R::GetRepeatedFloat);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return get(&R::GetDouble, &R::GetRepeatedDouble);
    case FieldDescriptor::CPPTYPE_BOOL:
      return get(&R::GetBool, &R::GetRepeatedBool);
    case FieldDescriptor::CPPTYPE_STRING:
      return get(&R::GetString, &R::GetRepeatedString);
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return JsonOf(field.is_repeated() ? of.GetRepeatedMessage(message, &field, at)
                                        : of.GetMessage(message, &field));
    default:  // what these messages do not have
      return nullptr;
  }
}

}  // namespace

nlohmann::json JsonOf(const Message& message, std::initializer_list<absl::string_view> left_out) {
  nlohmann::json json = nlohmann::json::object();
  const google::protobuf::Descriptor& type = *message.GetDescriptor();
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor& field = *type.field(i);
    if (std::find(left_out.begin(), left_out.end(), field.name()) != left_out.end()) continue;
    nlohmann::json& value = json[field.name()];
    if (!field.is_repeated()) {
      value = ValueOf(message, field, 0);
      continue;
    }
    value = nlohmann::json::array();
    const int count = message.GetReflection()->FieldSize(message, &field);
    for (int k = 0; k < count; ++k) value.push_back(ValueOf(message, field, k));
  }
  return json;
}

void Rename(nlohmann::json& object, const char* from, const char* to) {
  object[to] = std::move(object[from]);
  object.erase(from);
}

void PrintJson(const nlohmann::json& json) { absl::PrintF("%s\n", DumpJson(json)); }

void TellUnreadable(absl::Span<const absl::Status> statuses) {
  for (const absl::Status& status : statuses) {
    absl::FPrintF(stderr, "cannot be read: %s\n", status.message());
  }
}

absl::Status Report(bool as_json, const nlohmann::json& json, const std::string& text) {
  absl::PrintF("%s", as_json ? DumpJson(json) + "\n" : text);
  return absl::OkStatus();
}

}  // namespace carrel::tools
