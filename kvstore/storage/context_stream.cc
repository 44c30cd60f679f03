#include "kvstore/storage/context_stream.h"

#include <array>

#include "absl/strings/str_cat.h"
#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/status.h"
#include "kvstore/format/context_name.h"
#include "kvstore/format/little_endian.h"
#include "kvstore/format/manifest.h"

namespace carrel::kvstore {
namespace {

constexpr absl::string_view kMagic = "CARRELEX";
constexpr uint32_t kVersion = 1;
constexpr int64_t kFixedBytes = 32;
constexpr uint64_t kMostManifestBytes = uint64_t{256} << 20;
constexpr uint32_t kMostNameBytes = 128;

absl::Status Refuse(absl::string_view field, uint64_t value, uint64_t most) {
  return absl::DataLossError(
      absl::StrCat("export: ", field, "=", value, ", must be at most ", most));
}

}  // namespace

std::string StreamDigest(absl::string_view bytes) {
  Sha256 sha;
  sha.Update(bytes);
  const std::array<uint8_t, 32> digest = sha.Finish();
  return std::string(reinterpret_cast<const char*>(digest.data()), digest.size());
}

std::string StreamHeader::Encode() const {
  std::string out(kMagic);
  AppendLittleEndian(out, kVersion);
  AppendLittleEndian(out, static_cast<uint32_t>(name.size()));
  AppendLittleEndian(out, uint64_t{manifest.size()});
  AppendLittleEndian(out, static_cast<uint32_t>(file_bytes.size()));
  AppendLittleEndian(out, uint32_t{0});
  absl::StrAppend(&out, name, manifest);
  for (const int64_t bytes : file_bytes) AppendLittleEndian(out, static_cast<uint64_t>(bytes));
  return out + StreamDigest(out);
}

absl::StatusOr<int64_t> StreamHeader::BytesWanted(absl::string_view so_far) {
  const absl::string_view magic = so_far.substr(0, kMagic.size());
  if (magic != kMagic.substr(0, magic.size())) {
    return absl::DataLossError("export: it does not begin with \"CARRELEX\": is no export");
  }
  if (static_cast<int64_t>(so_far.size()) < kFixedBytes) return kFixedBytes;
  const auto version = LoadLittleEndian<uint32_t>(so_far.data() + 8);
  if (version != kVersion) {
    return absl::FailedPreconditionError(absl::StrCat("export: it has version ", version,
                                                      ", this program reads version ", kVersion));
  }
  const auto name_bytes = LoadLittleEndian<uint32_t>(so_far.data() + 12);
  const auto manifest_bytes = LoadLittleEndian<uint64_t>(so_far.data() + 16);
  const auto files = LoadLittleEndian<uint32_t>(so_far.data() + 24);
  if (name_bytes > kMostNameBytes) return Refuse("name bytes", name_bytes, kMostNameBytes);
  if (manifest_bytes > kMostManifestBytes) {
    return Refuse("manifest bytes", manifest_bytes, kMostManifestBytes);
  }
  if (files > kMostStreamFiles) return Refuse("files", files, kMostStreamFiles);
  if (LoadLittleEndian<uint32_t>(so_far.data() + 28) != 0) {
    return absl::DataLossError("export: reserved bytes of its header are not 0");
  }
  return kFixedBytes + name_bytes + static_cast<int64_t>(manifest_bytes) + int64_t{8} * files +
         kStreamDigestBytes;
}

absl::StatusOr<bool> StreamHeader::Take(std::string& so_far, absl::string_view& bytes) {
  for (;;) {
    ASSIGN_OR_RETURN(const int64_t wanted, BytesWanted(so_far));
    const absl::string_view taken = bytes.substr(0, static_cast<size_t>(wanted) - so_far.size());
    if (taken.empty()) return static_cast<int64_t>(so_far.size()) == wanted;
    so_far.append(taken.data(), taken.size());
    bytes.remove_prefix(taken.size());
  }
}

absl::StatusOr<StreamHeader> StreamHeader::Decode(absl::string_view all) {
  const absl::string_view proven = all.substr(0, all.size() - kStreamDigestBytes);
  if (StreamDigest(proven) != all.substr(proven.size())) {
    return absl::DataLossError("export: its header does not match the header's SHA-256");
  }
  const auto name_bytes = LoadLittleEndian<uint32_t>(all.data() + 12);
  const auto manifest_bytes = LoadLittleEndian<uint64_t>(all.data() + 16);
  const auto files = LoadLittleEndian<uint32_t>(all.data() + 24);
  StreamHeader header;
  header.name = std::string(all.substr(kFixedBytes, name_bytes));
  header.manifest = std::string(all.substr(kFixedBytes + name_bytes, manifest_bytes));
  const char* sizes = all.data() + kFixedBytes + name_bytes + manifest_bytes;
  RETURN_IF_ERROR(ValidateContextName(header.name));
  uint64_t left = kMaxStoredBytes;
  for (uint32_t i = 0; i < files; ++i) {
    const auto bytes = LoadLittleEndian<uint64_t>(sizes + size_t{8} * i);
    if (bytes > left) return Refuse("bytes of files", bytes, left);
    left -= bytes;
    header.file_bytes.push_back(static_cast<int64_t>(bytes));
  }
  if (files == 0) return absl::DataLossError("export: it has no files");
  return header;
}

absl::StatusOr<v1::Manifest> ImportFrom(
    absl::FunctionRef<absl::StatusOr<absl::string_view>(int64_t offset)> source,
    ContextImport& into, absl::FunctionRef<void(int64_t position, int64_t bytes)> progress) {
  for (;;) {
    ASSIGN_OR_RETURN(const absl::string_view bytes, source(into.position()));
    // Also where the source ends too early: the import says what is missing.
    if (bytes.empty()) return into.Publish();
    RETURN_IF_ERROR(into.Take(bytes));
    progress(into.position(), into.bytes());
  }
}

}  // namespace carrel::kvstore
