#include <set>

#include "absl/strings/ascii.h"
#include "common/file.h"
#include "common/json.h"
#include "common/status.h"
#include "model/safetensors.h"
#include "nlohmann/json.hpp"

namespace carrel::model {
namespace {

// Padding the header to this keeps every tensor aligned to its element: the files are mapped.
constexpr size_t kHeaderAlignment = 8;

// The u64 length and the JSON header; checks what a reader would refuse.
absl::StatusOr<std::string> MakeHeader(const std::string& path,
                                       absl::Span<const NamedTensor> tensors) {
  // ordered_json: the header lists the tensors as they lie in the file.
  nlohmann::ordered_json entries = nlohmann::ordered_json::object();
  std::set<std::string> names;
  int64_t offset = 0;
  for (const NamedTensor& tensor : tensors) {
    int64_t bytes = DTypeBytes(tensor.view.dtype);
    bool overflow = false;
    for (int64_t extent : tensor.view.shape) {
      overflow = overflow || extent < 0 || __builtin_mul_overflow(bytes, extent, &bytes);
    }
    if (overflow || bytes != static_cast<int64_t>(tensor.view.bytes.size())) {
      return absl::InvalidArgumentError(
          absl::StrCat("write ", path, ": tensor \"", tensor.name, "\" has ",
                       tensor.view.bytes.size(), " bytes, its shape takes ",
                       overflow ? std::string("no valid number") : absl::StrCat(bytes)));
    }
    if (tensor.name == "__metadata__" || !names.insert(tensor.name).second) {
      return absl::InvalidArgumentError(absl::StrCat("write ", path, ": tensor name \"",
                                                     tensor.name, "\" is reserved or used twice"));
    }
    entries[tensor.name] = {{"dtype", absl::AsciiStrToUpper(DTypeName(tensor.view.dtype))},
                            {"shape", tensor.view.shape},
                            {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string text = DumpJson(entries);
  text.append((kHeaderAlignment - text.size() % kHeaderAlignment) % kHeaderAlignment, ' ');
  const uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + text;
}

}  // namespace

absl::Status WriteSafetensors(const std::string& path, absl::Span<const NamedTensor> tensors) {
  ASSIGN_OR_RETURN(const std::string header, MakeHeader(path, tensors));
  // Tensors go straight from where they lie to the file: no copy of the whole.
  std::vector<absl::string_view> pieces = {header};
  for (const NamedTensor& tensor : tensors) pieces.push_back(tensor.view.bytes);
  return WriteFileAtomically(path, pieces);
}

}  // namespace carrel::model
