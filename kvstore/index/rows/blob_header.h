// What:   the header that a blob of code, int8, ivf or hnsw begins with.
// Bytes:  Raw, 64 of them: a magic of 4, the version u16, what the kind says of itself, and last
//         the CRC of the rest.
// Errors: DataLoss: too short, another magic, a CRC that does not fit; FailedPrecondition: another
//         version. The caller checks what the kind says of itself.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "common/checksum.h"

namespace carrel::kvstore {

inline constexpr int64_t kBlobHeaderBytes = 64;

template <typename Raw>
uint32_t BlobHeaderCrc(const Raw& raw) {
  static_assert(sizeof(Raw) == kBlobHeaderBytes);
  return Crc32c(absl::string_view(reinterpret_cast<const char*>(&raw), sizeof(raw) - 4));
}

// Of a header that is complete but for magic and CRC.
template <typename Raw>
void SealBlobHeader(const char (&magic)[4], Raw& raw) {
  std::memcpy(raw.magic, magic, sizeof(magic));
  raw.crc = BlobHeaderCrc(raw);
}

// FailedPrecondition unless it is one of those known. kind: "int8", for the message.
inline absl::Status CheckBlobVersion(absl::string_view kind, uint16_t version,
                                     std::initializer_list<uint16_t> known) {
  if (std::find(known.begin(), known.end(), version) != known.end()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(kind, " blob has version ", version,
                                                    ", this program reads version ",
                                                    absl::StrJoin(known, " and ")));
}

// bytes: verified, of the blob's beginning.
template <typename Raw>
absl::StatusOr<Raw> ReadBlobHeader(absl::string_view kind, const char (&magic)[4],
                                   std::initializer_list<uint16_t> versions,
                                   absl::string_view bytes) {
  const auto refuse = [kind](const auto&... what) {
    return absl::DataLossError(absl::StrCat(kind, " blob: ", what...));
  };
  Raw raw;
  if (bytes.size() < sizeof(raw)) return refuse(bytes.size(), " bytes hold no header");
  std::memcpy(&raw, bytes.data(), sizeof(raw));
  if (std::memcmp(raw.magic, magic, sizeof(magic)) != 0) {
    return refuse("no magic ", absl::string_view(magic, sizeof(magic)));
  }
  if (raw.crc != BlobHeaderCrc(raw)) return refuse("the header's CRC does not fit");
  if (absl::Status status = CheckBlobVersion(kind, raw.version, versions); !status.ok()) {
    return status;
  }
  return raw;
}

}  // namespace carrel::kvstore
