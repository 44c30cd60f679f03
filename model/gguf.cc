#include "model/gguf.h"

#include <cstring>
#include <filesystem>
#include <optional>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/status.h"

namespace carrel::model {
namespace {

using kernels::GgufType;

constexpr absl::string_view kMagic = "GGUF";
constexpr uint32_t kOldestVersion = 2;  // version 1 counts in 32 bits; nobody writes it any more
constexpr uint32_t kNewestVersion = 3;
constexpr int64_t kDefaultAlignment = 32;
constexpr int64_t kMaxAlignment = int64_t{1} << 20;
constexpr uint32_t kMaxRank = 4;
constexpr int64_t kMaxNameBytes = 1024;  // ggml itself allows 64
constexpr int64_t kMaxKeyBytes = 65535;  // of the format
constexpr int kMaxDepth = 4;             // of arrays in arrays
constexpr int64_t kMaxParts = 1000;
constexpr int64_t kMinKeyBytes = 8 + 4 + 1;         // an empty name, a type, the smallest value
constexpr int64_t kMinTensorBytes = 8 + 4 + 4 + 8;  // an empty name, rank 0, a type, an offset

// Names come from the file: printable, and not without end.
std::string Quote(absl::string_view name) {
  return absl::StrCat("\"", absl::CHexEscape(name.substr(0, 200)), "\"");
}

// The fewest bytes that one value of an array can take.
int64_t MinBytes(GgufValueType type) {
  if (type == GgufValueType::kString) return 8;
  if (type == GgufValueType::kArray) return 12;
  return ScalarBytes(type);
}

}  // namespace

// One file: header, metadata, tensors. Every read is bounded by what is left of the file.
class GgufReader {
 public:
  GgufReader(const std::string& path, absl::string_view file) : path_(path), file_(file) {}

  static absl::StatusOr<Gguf> Read(const std::string& path) {
    Gguf gguf;
    gguf.path_ = path;
    gguf.metadata_.where_ = path;
    std::error_code ignored;
    if (std::filesystem::exists(path, ignored) &&
        !std::filesystem::is_regular_file(path, ignored)) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": is not a regular file"));
    }
    ASSIGN_OR_RETURN(std::unique_ptr<MappedFile> file, MappedFile::Open(path));
    file->Expect(FileAccess::kLargePages);  // products read all of it for each token
    RETURN_IF_ERROR(GgufReader(path, file->bytes()).Run(gguf));
    gguf.files_.push_back(std::move(file));
    return gguf;
  }

 private:
  absl::Status Run(Gguf& gguf) {
    uint32_t version = 0;
    uint64_t tensors = 0, keys = 0;
    if (!absl::StartsWith(file_, kMagic))
      return Bad("not a GGUF file: it does not begin with GGUF");
    at_ = static_cast<int64_t>(kMagic.size());
    if (!Take(&version)) return Truncated("the version");
    if (version < kOldestVersion || version > kNewestVersion) {
      const bool swapped = __builtin_bswap32(version) <= kNewestVersion && version != 0;
      return Bad(absl::StrCat("version ", version, swapped ? " (a big-endian file)" : "",
                              " is not read, only ", kOldestVersion, " to ", kNewestVersion));
    }
    if (!Take(&tensors) || !Take(&keys)) return Truncated("the counts");
    RETURN_IF_ERROR(CheckCount("metadata keys", keys, kMinKeyBytes));
    for (uint64_t i = 0; i < keys; ++i) RETURN_IF_ERROR(ReadKey(gguf.metadata_));
    RETURN_IF_ERROR(CheckCount("tensors", tensors, kMinTensorBytes));
    ASSIGN_OR_RETURN(const int64_t alignment, Alignment(gguf.metadata_));
    std::vector<Info> infos;
    for (uint64_t i = 0; i < tensors; ++i) {
      ASSIGN_OR_RETURN(Info info, ReadInfo());
      infos.push_back(std::move(info));
    }
    return PlaceTensors(infos, alignment, gguf);
  }

  struct Info {
    std::string name;
    GgufTensor tensor;
    int64_t bytes = 0;
    uint64_t offset = 0;
  };

  int64_t left() const { return static_cast<int64_t>(file_.size()) - at_; }

  template <typename T>
  bool Take(T* value) {
    if (left() < static_cast<int64_t>(sizeof(T))) return false;
    std::memcpy(value, file_.data() + at_, sizeof(T));
    at_ += static_cast<int64_t>(sizeof(T));
    return true;
  }

  absl::Status Bad(absl::string_view what) const {
    return absl::InvalidArgumentError(absl::StrCat(path_, ": ", what));
  }
  absl::Status Truncated(absl::string_view what) const {
    return Bad(absl::StrCat("truncated: it ends at byte ", file_.size(), " within ", what,
                            ", which begins at or before byte ", at_));
  }
  absl::Status BadKey(absl::string_view key, absl::string_view what) const {
    return Bad(absl::StrCat("key ", Quote(key), ": ", what));
  }
  absl::Status BadTensor(absl::string_view name, absl::string_view what) const {
    return Bad(absl::StrCat("tensor ", Quote(name), ": ", what));
  }

  absl::Status CheckCount(absl::string_view what, uint64_t count, int64_t least_bytes) const {
    const int64_t most = left() / least_bytes;
    if (count > static_cast<uint64_t>(most)) {
      return Bad(absl::StrCat("truncated: ", count, " ", what, " do not fit into the ", left(),
                              " bytes that are left of the file"));
    }
    return absl::OkStatus();
  }

  // A length and as many bytes; nothing if they are not all there.
  std::optional<absl::string_view> TakeString() {
    uint64_t size = 0;
    if (!Take(&size) || size > static_cast<uint64_t>(left())) return std::nullopt;
    const absl::string_view text = file_.substr(static_cast<size_t>(at_), size);
    at_ += static_cast<int64_t>(size);
    return text;
  }

  absl::StatusOr<GgufValueType> TakeType(absl::string_view key) {
    uint32_t type = 0;
    if (!Take(&type)) return Truncated(absl::StrCat("key ", Quote(key)));
    if (type > static_cast<uint32_t>(GgufValueType::kF64)) {
      return BadKey(key, absl::StrCat("value type ", type, " does not exist"));
    }
    return static_cast<GgufValueType>(type);
  }

  absl::Status ReadKey(GgufMetadata& metadata) {
    const std::optional<absl::string_view> key = TakeString();
    if (!key) return Truncated("the name of a key");
    if (key->empty() || static_cast<int64_t>(key->size()) > kMaxKeyBytes) {
      return BadKey(*key,
                    absl::StrCat("its name has ", key->size(), " bytes, not 1 to ", kMaxKeyBytes));
    }
    ASSIGN_OR_RETURN(const GgufValueType type, TakeType(*key));
    GgufValue value;
    value.type = type;
    RETURN_IF_ERROR(ReadValue(*key, 0, value));
    if (!metadata.values_.emplace(std::string(*key), value).second) {
      return BadKey(*key, "occurs twice");
    }
    return absl::OkStatus();
  }

  // The value of value.type; moves past it.
  absl::Status ReadValue(absl::string_view key, int depth, GgufValue& value) {
    if (value.type == GgufValueType::kString) {
      const std::optional<absl::string_view> text = TakeString();
      if (!text) return Truncated(absl::StrCat("key ", Quote(key)));
      value.bytes = *text;
      return absl::OkStatus();
    }
    if (value.type == GgufValueType::kArray) return ReadArray(key, depth, value);
    const int64_t size = ScalarBytes(value.type);
    if (size > left()) return Truncated(absl::StrCat("key ", Quote(key)));
    value.bytes = file_.substr(static_cast<size_t>(at_), static_cast<size_t>(size));
    at_ += size;
    return absl::OkStatus();
  }

  absl::Status ReadArray(absl::string_view key, int depth, GgufValue& array) {
    if (depth >= kMaxDepth) {
      return BadKey(key, absl::StrCat("arrays are nested deeper than ", kMaxDepth));
    }
    ASSIGN_OR_RETURN(array.element, TakeType(key));
    uint64_t count = 0;
    if (!Take(&count)) return Truncated(absl::StrCat("key ", Quote(key)));
    const int64_t least = MinBytes(array.element);
    if (count > static_cast<uint64_t>(left() / least)) {
      return BadKey(key,
                    absl::StrCat("truncated: an array of ", count, " values does not fit into the ",
                                 left(), " bytes that are left of the file"));
    }
    array.count = static_cast<int64_t>(count);
    const int64_t begin = at_;
    if (ScalarBytes(array.element) > 0) {
      at_ += array.count * least;
    } else {
      for (int64_t i = 0; i < array.count; ++i) {
        GgufValue inner;
        inner.type = array.element;
        RETURN_IF_ERROR(ReadValue(key, depth + 1, inner));
      }
    }
    array.bytes = file_.substr(static_cast<size_t>(begin), static_cast<size_t>(at_ - begin));
    return absl::OkStatus();
  }

  absl::StatusOr<int64_t> Alignment(const GgufMetadata& metadata) const {
    ASSIGN_OR_RETURN(const int64_t alignment,
                     metadata.IntOr("general.alignment", kDefaultAlignment, 1, kMaxAlignment));
    if ((alignment & (alignment - 1)) != 0) {
      return metadata.Invalid("general.alignment", "is not a power of two");
    }
    return alignment;
  }

  absl::StatusOr<Info> ReadInfo() {
    const std::optional<absl::string_view> name = TakeString();
    if (!name) return Truncated("the name of a tensor");
    if (name->empty() || static_cast<int64_t>(name->size()) > kMaxNameBytes) {
      return BadTensor(
          *name, absl::StrCat("its name has ", name->size(), " bytes, not 1 to ", kMaxNameBytes));
    }
    Info info;
    info.name = std::string(*name);
    uint32_t rank = 0, type = 0;
    if (!Take(&rank)) return Truncated(absl::StrCat("tensor ", Quote(*name)));
    if (rank == 0 || rank > kMaxRank) {
      return BadTensor(*name, absl::StrCat("it has ", rank, " dimensions, not 1 to ", kMaxRank));
    }
    // The file names the fastest dimension first.
    info.tensor.shape.resize(rank);
    for (uint32_t i = 0; i < rank; ++i) {
      if (!Take(&info.tensor.shape[rank - 1 - i])) {
        return Truncated(absl::StrCat("tensor ", Quote(*name)));
      }
    }
    if (!Take(&type) || !Take(&info.offset)) {
      return Truncated(absl::StrCat("tensor ", Quote(*name)));
    }
    RETURN_IF_ERROR(SetType(type, info));
    return info;
  }

  absl::Status SetType(uint32_t number, Info& info) const {
    const std::optional<GgufType> type = kernels::ParseGgufType(number);
    if (!type) {
      const absl::string_view known = kernels::GgufTypeName(number);
      if (known.empty()) {
        return BadTensor(info.name, absl::StrCat("type ", number, " does not exist"));
      }
      return absl::UnimplementedError(absl::StrCat(path_, ": tensor ", Quote(info.name), ": type ",
                                                   known, " is not supported"));
    }
    info.tensor.type = *type;
    const kernels::GgufTypeTraits& traits = kernels::TraitsOf(*type);
    const std::string shape = absl::StrJoin(info.tensor.shape, ", ");
    int64_t elements = 1;
    for (const int64_t extent : info.tensor.shape) {
      if (extent < 1 || __builtin_mul_overflow(elements, extent, &elements)) {
        return BadTensor(info.name, absl::StrCat("shape [", shape, "] is empty or beyond 63 bits"));
      }
    }
    if (info.tensor.shape.back() % traits.block_elements != 0) {
      return BadTensor(info.name, absl::StrCat("rows of shape [", shape,
                                               "] are not whole blocks of ", traits.block_elements,
                                               " elements, as ", traits.name, " has them"));
    }
    if (__builtin_mul_overflow(elements / traits.block_elements, int64_t{traits.block_bytes},
                               &info.bytes)) {
      return BadTensor(info.name, absl::StrCat("shape [", shape, "] is beyond 63 bits of bytes"));
    }
    return absl::OkStatus();
  }

  absl::Status PlaceTensors(std::vector<Info>& infos, int64_t alignment, Gguf& gguf) const {
    const auto aligned = [alignment](int64_t x) {
      return (x + alignment - 1) / alignment * alignment;
    };
    const int64_t data = aligned(at_);
    int64_t next = 0;  // all sums stay below the file's size plus an alignment
    for (Info& info : infos) {
      if (info.offset != static_cast<uint64_t>(next)) {
        return BadTensor(
            info.name, absl::StrCat("it lies at byte ", info.offset, " of the data, not at ", next,
                                    ", where the one before it ends"));
      }
      const int64_t room = static_cast<int64_t>(file_.size()) - data - next;
      if (info.bytes > room) {
        return BadTensor(info.name, absl::StrCat("truncated: it takes ", info.bytes, " bytes and ",
                                                 room < 0 ? 0 : room, " are left of the file"));
      }
      info.tensor.bytes =
          file_.substr(static_cast<size_t>(data + next), static_cast<size_t>(info.bytes));
      next = aligned(next + info.bytes);
      if (!gguf.tensors_.emplace(info.name, std::move(info.tensor)).second) {
        return BadTensor(info.name, "occurs twice");
      }
    }
    return absl::OkStatus();
  }

  const std::string& path_;
  const absl::string_view file_;
  int64_t at_ = 0;
};

namespace {

// NAME-00002-of-00003.gguf, taken apart.
struct PartName {
  std::string stem;  // NAME
  int64_t number;    // 2
  int64_t count;     // 3
};

std::optional<PartName> ParsePartName(const std::string& path) {
  constexpr absl::string_view kShape = "-00000-of-00000.gguf";
  if (path.size() <= kShape.size()) return std::nullopt;
  const size_t begin = path.size() - kShape.size();
  const absl::string_view end = absl::string_view(path).substr(begin);
  for (size_t i = 0; i < kShape.size(); ++i) {
    const bool digit = end[i] >= '0' && end[i] <= '9';
    if (kShape[i] == '0' ? !digit : end[i] != kShape[i]) return std::nullopt;
  }
  PartName name{path.substr(0, begin), 0, 0};
  const bool read = absl::SimpleAtoi(end.substr(1, 5), &name.number) &&
                    absl::SimpleAtoi(end.substr(10, 5), &name.count);
  CARREL_CHECK(read);
  return name;
}

std::string PartPath(const PartName& name, int64_t number) {
  return absl::StrFormat("%s-%05d-of-%05d.gguf", name.stem, number, name.count);
}

// That a part says of itself what its name says.
absl::Status CheckPart(const GgufMetadata& metadata, int64_t number, int64_t count) {
  ASSIGN_OR_RETURN(const int64_t stored_count, metadata.Int("split.count", 1, kMaxParts));
  ASSIGN_OR_RETURN(const int64_t stored_number, metadata.Int("split.no", 0, kMaxParts - 1));
  if (stored_count != count) {
    return metadata.Invalid("split.count", absl::StrCat("is not ", count, ", as its name says"));
  }
  if (stored_number != number - 1) {
    return metadata.Invalid(
        "split.no", absl::StrCat("is not ", number - 1, ", one less than the number in its name"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status Gguf::Join(Gguf part) {
  for (auto& [name, tensor] : part.tensors_) {
    if (!tensors_.emplace(name, std::move(tensor)).second) {
      return absl::InvalidArgumentError(
          absl::StrCat(part.path_, ": tensor ", Quote(name), ": an earlier part has it too"));
    }
  }
  for (auto& file : part.files_) files_.push_back(std::move(file));
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<const Gguf>> Gguf::Open(const std::string& path) {
  ASSIGN_OR_RETURN(Gguf named, GgufReader::Read(path));
  ASSIGN_OR_RETURN(const int64_t count, named.metadata_.IntOr("split.count", 1, 0, kMaxParts));
  if (count <= 1) return std::make_shared<const Gguf>(std::move(named));

  const std::optional<PartName> name = ParsePartName(path);
  if (!name) {
    return named.metadata_.Invalid("split.count",
                                   "says that there are other parts, but the name does not end in "
                                   "-NNNNN-of-NNNNN.gguf, by which they would be found");
  }
  RETURN_IF_ERROR(CheckPart(named.metadata_, name->number, name->count));
  Gguf whole;
  for (int64_t number = 1; number <= name->count; ++number) {
    const std::string part_path = PartPath(*name, number);
    absl::StatusOr<Gguf> part =
        number == name->number ? std::move(named) : GgufReader::Read(part_path);
    if (absl::IsNotFound(part.status())) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": its part ", part_path, " is missing"));
    }
    RETURN_IF_ERROR(part.status());
    RETURN_IF_ERROR(CheckPart(part->metadata_, number, name->count));
    if (number == 1) {
      whole = *std::move(part);
    } else {
      RETURN_IF_ERROR(whole.Join(*std::move(part)));
    }
  }
  const int64_t found = static_cast<int64_t>(whole.tensors_.size());
  ASSIGN_OR_RETURN(const int64_t expected,
                   whole.metadata_.IntOr("split.tensors.count", found, 0, INT64_MAX));
  if (expected != found) {
    return whole.metadata_.Invalid("split.tensors.count",
                                   absl::StrCat("but the parts hold ", found));
  }
  whole.path_ = path;
  return std::make_shared<const Gguf>(std::move(whole));
}

const GgufTensor* Gguf::Find(absl::string_view name) const {
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : &it->second;
}

int64_t GgufTensor::elements() const {
  int64_t product = 1;
  for (const int64_t extent : shape) product *= extent;
  return product;
}

bool IsGgufPath(const std::string& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) return false;
  return absl::EndsWithIgnoreCase(path, ".gguf") || std::filesystem::is_regular_file(path, ignored);
}

}  // namespace carrel::model
