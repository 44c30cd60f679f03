#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <set>

#include "absl/cleanup/cleanup.h"
#include "common/json.h"
#include "common/status.h"
#include "model/safetensors.h"
#include "nlohmann/json.hpp"

namespace carrel::model {
namespace {

// Padding the header to this keeps every tensor aligned to its element: the files are mapped.
constexpr size_t kHeaderAlignment = 8;

const char* FormatName(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "F32";
    case DType::kF16:
      return "F16";
    case DType::kBf16:
      return "BF16";
    case DType::kI32:
      return "I32";
    case DType::kI64:
      return "I64";
  }
  return "unknown";
}

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
    entries[tensor.name] = {{"dtype", FormatName(tensor.view.dtype)},
                            {"shape", tensor.view.shape},
                            {"data_offsets", {offset, offset + bytes}}};
    offset += bytes;
  }
  std::string text = DumpJson(entries);
  text.append((kHeaderAlignment - text.size() % kHeaderAlignment) % kHeaderAlignment, ' ');
  const uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + text;
}

absl::Status WriteAll(int fd, const std::string& path, absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, absl::StrCat("write ", path));
    bytes.remove_prefix(n);
  }
  return absl::OkStatus();
}

// Tensors go straight from where they lie to the file: no copy of the whole.
absl::Status WriteAndSync(const std::string& path, absl::string_view header,
                          absl::Span<const NamedTensor> tensors) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return ErrnoStatus(errno, absl::StrCat("create ", path));
  absl::Cleanup close_fd = [fd] { close(fd); };
  RETURN_IF_ERROR(WriteAll(fd, path, header));
  for (const NamedTensor& tensor : tensors) {
    RETURN_IF_ERROR(WriteAll(fd, path, tensor.view.bytes));
  }
  if (fsync(fd) != 0) return ErrnoStatus(errno, absl::StrCat("fsync ", path));
  return absl::OkStatus();
}

absl::Status SyncFolderOf(const std::string& path) {
  const std::filesystem::path parent = std::filesystem::path(path).parent_path();
  const std::string folder = parent.empty() ? "." : parent.string();
  const int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return ErrnoStatus(errno, absl::StrCat("open ", folder));
  absl::Cleanup close_fd = [fd] { close(fd); };
  if (fsync(fd) != 0) return ErrnoStatus(errno, absl::StrCat("fsync ", folder));
  return absl::OkStatus();
}

}  // namespace

absl::Status WriteSafetensors(const std::string& path, absl::Span<const NamedTensor> tensors) {
  ASSIGN_OR_RETURN(const std::string header, MakeHeader(path, tensors));
  const std::string temporary = path + ".tmp";
  if (absl::Status status = WriteAndSync(temporary, header, tensors); !status.ok()) {
    unlink(temporary.c_str());
    return status;
  }
  if (rename(temporary.c_str(), path.c_str()) != 0) {
    const absl::Status status =
        ErrnoStatus(errno, absl::StrCat("rename ", temporary, " to ", path));
    unlink(temporary.c_str());
    return status;
  }
  return SyncFolderOf(path);
}

}  // namespace carrel::model
