#include "model/safetensors.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_join.h"
#include "common/file.h"
#include "common/json.h"
#include "common/status.h"
#include "nlohmann/json.hpp"

namespace carrel::model {
namespace {

using nlohmann::json;

constexpr int64_t kLengthBytes = 8;                // the u64 before the header
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the bound of the reference implementation
constexpr int64_t kMaxRank = 8;
constexpr absl::string_view kMetadataName = "__metadata__";

// Names come from the file: printable, and not without end.
std::string Quote(absl::string_view name) {
  return absl::StrCat("\"", absl::CHexEscape(name.substr(0, 200)), "\"");
}

// However many there are.
std::string Listed(absl::Span<const int64_t> counts) {
  constexpr size_t kMost = 8;
  return absl::StrCat("[", absl::StrJoin(counts.subspan(0, kMost), ", "),
                      counts.size() > kMost ? ", ..]" : "]");
}

absl::Status BadTensor(const std::string& path, absl::string_view name, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": tensor ", Quote(name), ": ", what));
}

std::optional<DType> ParseDType(absl::string_view name) {
  if (name == "F32") return DType::kF32;
  if (name == "F16") return DType::kF16;
  if (name == "BF16") return DType::kBf16;
  if (name == "I32") return DType::kI32;
  if (name == "I64") return DType::kI64;
  return std::nullopt;
}

// The bytes of a tensor, or nothing if the product leaves int64.
std::optional<int64_t> CheckedBytes(DType dtype, absl::Span<const int64_t> shape) {
  // A zero anywhere makes the product zero, but the other factors must still be sane.
  int64_t bytes = DTypeBytes(dtype);
  bool empty = false;
  for (int64_t extent : shape) {
    if (extent < 0) return std::nullopt;
    if (extent == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(bytes, extent, &bytes)) {
      return std::nullopt;
    }
  }
  return empty ? 0 : bytes;
}

struct Header {
  json entries;
  absl::string_view data;  // what follows the header
};

absl::StatusOr<Header> ReadHeader(const std::string& path, absl::string_view file) {
  const int64_t file_bytes = static_cast<int64_t>(file.size());
  if (file_bytes < kLengthBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, ": truncated: ", file_bytes, " bytes, the header length alone takes ", kLengthBytes));
  }
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, file.data(), sizeof(header_bytes));
  if (header_bytes > kMaxHeaderBytes) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": header length ", header_bytes,
                                                   " exceeds ", kMaxHeaderBytes,
                                                   "; not a safetensors file?"));
  }
  if (header_bytes > static_cast<uint64_t>(file_bytes - kLengthBytes)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": truncated: the header takes ",
                                                   header_bytes, " bytes and only ",
                                                   file_bytes - kLengthBytes, " follow"));
  }
  Header header;
  ASSIGN_OR_RETURN(header.entries,
                   ParseJsonObject(file.substr(kLengthBytes, header_bytes),
                                   absl::StrCat(path, ": header"), {.unique_names = true}));
  header.data = file.substr(kLengthBytes + header_bytes);
  return header;
}

struct Entry {
  std::string name;
  int64_t begin = 0;
  int64_t end = 0;
  TensorView view;
};

absl::StatusOr<std::vector<int64_t>> ParseCounts(const std::string& path, const std::string& name,
                                                 const json& tensor, const char* field) {
  const auto it = tensor.find(field);
  if (it == tensor.end() || !it->is_array()) {
    return BadTensor(path, name, absl::StrCat(field, " is not an array"));
  }
  std::vector<int64_t> counts;
  for (const json& value : *it) {
    if (!value.is_number_unsigned() || value.get<uint64_t>() > uint64_t{INT64_MAX}) {
      return BadTensor(path, name, absl::StrCat(field, " holds something that is not a count"));
    }
    counts.push_back(value.get<int64_t>());
  }
  return counts;
}

absl::StatusOr<Entry> ParseEntry(const std::string& path, const std::string& name,
                                 const json& tensor, absl::string_view data) {
  if (!tensor.is_object()) return BadTensor(path, name, "its header entry is not an object");
  Entry entry;
  entry.name = name;
  const auto dtype = tensor.find("dtype");
  if (dtype == tensor.end() || !dtype->is_string()) {
    return BadTensor(path, name, "dtype is not a string");
  }
  const std::string dtype_name = dtype->get<std::string>();
  const std::optional<DType> parsed = ParseDType(dtype_name);
  if (!parsed) {
    return BadTensor(
        path, name,
        absl::StrCat("dtype ", Quote(dtype_name), " is not one of F32, F16, BF16, I32, I64"));
  }
  entry.view.dtype = *parsed;
  ASSIGN_OR_RETURN(entry.view.shape, ParseCounts(path, name, tensor, "shape"));
  if (static_cast<int64_t>(entry.view.shape.size()) > kMaxRank) {
    return BadTensor(path, name,
                     absl::StrCat("shape has ", entry.view.shape.size(), " dimensions, at most ",
                                  kMaxRank, " are read"));
  }
  ASSIGN_OR_RETURN(const std::vector<int64_t> offsets,
                   ParseCounts(path, name, tensor, "data_offsets"));
  if (offsets.size() != 2 || offsets[0] > offsets[1]) {
    return BadTensor(
        path, name,
        absl::StrCat("data_offsets ", Listed(offsets), " is not [begin, end] with begin <= end"));
  }
  entry.begin = offsets[0];
  entry.end = offsets[1];
  const std::optional<int64_t> bytes = CheckedBytes(entry.view.dtype, entry.view.shape);
  if (!bytes || *bytes != entry.end - entry.begin) {
    return BadTensor(path, name,
                     absl::StrCat("data_offsets [", entry.begin, ", ", entry.end, ") span ",
                                  entry.end - entry.begin, " bytes, ", dtype_name, " [",
                                  absl::StrJoin(entry.view.shape, ", "), "] takes ",
                                  bytes ? absl::StrCat(*bytes) : "more than fits 63 bits"));
  }
  if (entry.end > static_cast<int64_t>(data.size())) {
    return BadTensor(path, name,
                     absl::StrCat("truncated: it ends at byte ", entry.end,
                                  " of the data and the file holds ", data.size()));
  }
  entry.view.bytes = data.substr(entry.begin, entry.end - entry.begin);
  return entry;
}

// The format wants every byte of the data in exactly one tensor.
absl::Status CheckCoverage(const std::string& path, std::vector<Entry>& entries,
                           int64_t data_bytes) {
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  int64_t end = 0;
  absl::string_view previous = "the header";
  for (const Entry& entry : entries) {
    if (entry.begin < end) {
      return BadTensor(path, entry.name,
                       absl::StrCat("begins at byte ", entry.begin, " and overlaps ",
                                    Quote(previous), ", which ends at ", end));
    }
    if (entry.begin > end) {
      return BadTensor(path, entry.name,
                       absl::StrCat("begins at byte ", entry.begin, "; the ", entry.begin - end,
                                    " bytes before it belong to no tensor"));
    }
    end = entry.end;
    previous = entry.name;
  }
  if (end != data_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", data_bytes - end,
                                                   " bytes after the last tensor, ",
                                                   Quote(previous), ", belong to no tensor"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Entry>> ParseFile(const std::string& path, absl::string_view file) {
  ASSIGN_OR_RETURN(const Header header, ReadHeader(path, file));
  std::vector<Entry> entries;
  for (const auto& [name, tensor] : header.entries.items()) {
    if (name == kMetadataName) {
      if (!tensor.is_object()) {
        return absl::InvalidArgumentError(absl::StrCat(path, ": __metadata__ is not an object"));
      }
      continue;
    }
    ASSIGN_OR_RETURN(Entry entry, ParseEntry(path, name, tensor, header.data));
    entries.push_back(std::move(entry));
  }
  RETURN_IF_ERROR(CheckCoverage(path, entries, static_cast<int64_t>(header.data.size())));
  return entries;
}

// tensor name -> file name, and the file names in order.
struct ShardIndex {
  std::map<std::string, std::string> file_of;
  std::set<std::string> files;
};

absl::StatusOr<ShardIndex> ReadIndex(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  ASSIGN_OR_RETURN(const json index, ParseJsonObject(text, path));
  const auto weight_map = index.find("weight_map");
  if (weight_map == index.end() || !weight_map->is_object() || weight_map->empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": weight_map is missing, empty or not an object"));
  }
  ShardIndex shards;
  for (const auto& [name, file] : weight_map->items()) {
    if (!file.is_string()) {
      return BadTensor(path, name, "its shard is not a string");
    }
    const std::string file_name = file.get<std::string>();
    // A shard is a file of this folder: an index must not reach elsewhere.
    if (file_name.empty() || file_name == "." || file_name == ".." ||
        file_name.find('/') != std::string::npos || file_name.find('\0') != std::string::npos) {
      return BadTensor(path, name,
                       absl::StrCat("its shard ", Quote(file_name), " is not a plain file name"));
    }
    shards.file_of.emplace(name, file_name);
    shards.files.insert(file_name);
  }
  return shards;
}

}  // namespace

std::string ShapeText(absl::Span<const int64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

int64_t TensorView::elements() const {
  return static_cast<int64_t>(bytes.size()) / DTypeBytes(dtype);
}

absl::StatusOr<Safetensors> Safetensors::OpenFile(const std::string& path) {
  Safetensors result;
  ASSIGN_OR_RETURN(std::unique_ptr<MappedFile> file, MappedFile::Open(path));
  file->Expect(FileAccess::kLargePages);  // products read all of it for each token
  ASSIGN_OR_RETURN(std::vector<Entry> entries, ParseFile(path, file->bytes()));
  for (Entry& entry : entries) {
    result.tensors_.emplace(std::move(entry.name), std::move(entry.view));
  }
  result.files_.push_back(std::move(file));
  return result;
}

absl::StatusOr<Safetensors> Safetensors::OpenModel(const std::string& model_dir) {
  const std::filesystem::path folder(model_dir);
  const std::string single = (folder / "model.safetensors").string();
  const std::string index_path = (folder / "model.safetensors.index.json").string();
  std::error_code ignored;
  if (std::filesystem::exists(single, ignored)) return OpenFile(single);
  if (!std::filesystem::exists(index_path, ignored)) {
    return absl::NotFoundError(absl::StrCat(
        model_dir, ": neither model.safetensors nor model.safetensors.index.json is there"));
  }
  ASSIGN_OR_RETURN(const ShardIndex index, ReadIndex(index_path));

  Safetensors result;
  for (const std::string& file_name : index.files) {
    const std::string path = (folder / file_name).string();
    absl::StatusOr<Safetensors> shard = OpenFile(path);
    if (absl::IsNotFound(shard.status())) {
      return absl::InvalidArgumentError(
          absl::StrCat(index_path, ": names the shard ", Quote(file_name), ", which is missing"));
    }
    RETURN_IF_ERROR(shard.status());
    for (auto& [name, view] : shard->tensors_) {
      const auto indexed = index.file_of.find(name);
      if (indexed == index.file_of.end())
        return BadTensor(path, name, "the index does not name it");
      if (indexed->second != file_name) {
        return BadTensor(path, name,
                         absl::StrCat("the index places it in ", Quote(indexed->second)));
      }
      result.tensors_.emplace(name, std::move(view));
    }
    for (auto& file : shard->files_) result.files_.push_back(std::move(file));
  }
  for (const auto& [name, file_name] : index.file_of) {
    if (!result.Has(name)) {
      return BadTensor(index_path, name,
                       absl::StrCat("the shard ", Quote(file_name), " does not hold it"));
    }
  }
  return result;
}

Safetensors Safetensors::Of(std::map<std::string, TensorView, std::less<>> tensors) {
  Safetensors result;
  result.tensors_ = std::move(tensors);
  return result;
}

absl::StatusOr<TensorView> Safetensors::Get(absl::string_view name) const {
  const auto it = tensors_.find(name);
  if (it == tensors_.end()) {
    return absl::NotFoundError(absl::StrCat("no tensor ", Quote(name), " among the ",
                                            tensors_.size(), " of the checkpoint"));
  }
  return it->second;
}

bool Safetensors::Has(absl::string_view name) const {
  return tensors_.find(name) != tensors_.end();
}

}  // namespace carrel::model
