#include "kvstore/remote/bucket.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/json.h"
#include "common/shown.h"
#include "common/status.h"
#include "kvstore/format/context_name.h"
#include "kvstore/format/little_endian.h"
#include "kvstore/format/manifest.h"

namespace carrel::kvstore {
namespace {

constexpr absl::string_view kMagic = "CARRELBK";
constexpr uint32_t kVersion = 1;
constexpr size_t kFixedBytes = 24;
constexpr int64_t kMostManifestObject = int64_t{400} << 20;
constexpr int64_t kMostNameObject = 64 << 10;

// Some servers quote it in lists, all in headers.
absl::string_view BareEtag(absl::string_view etag) {
  return absl::StripSuffix(absl::StripPrefix(etag, "\""), "\"");
}

bool IsHex(absl::string_view text, size_t digits) {
  return text.size() == digits && std::all_of(text.begin(), text.end(), [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
         });
}

}  // namespace

bool BucketAddress::IsOne(absl::string_view text) { return absl::StartsWith(text, "s3://"); }

absl::StatusOr<BucketAddress> BucketAddress::Parse(absl::string_view text) {
  const auto refuse = [&](absl::string_view why) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", Shown(text), "\" must be s3://BUCKET or s3://BUCKET/PREFIX", why));
  };
  absl::string_view rest = text;
  if (!absl::ConsumePrefix(&rest, "s3://")) return refuse("");
  BucketAddress address;
  const size_t slash = std::min(rest.find('/'), rest.size());
  address.bucket = std::string(rest.substr(0, slash));
  address.prefix =
      std::string(absl::StripSuffix(rest.substr(std::min(slash + 1, rest.size())), "/"));
  if (address.bucket.empty()) return refuse("");
  const auto plain = [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '.' || c == '_' ||
           c == '/';
  };
  if (address.prefix.size() > 512 ||
      !std::all_of(address.prefix.begin(), address.prefix.end(), plain) ||
      absl::StrContains(absl::StrCat("/", address.prefix, "/"), "//.") ||
      absl::StrContains(absl::StrCat("/", address.prefix, "/"), "/../") ||
      (!address.prefix.empty() && absl::StrContains(absl::StrCat("/", address.prefix), "//"))) {
    return refuse(", the prefix up to 512 of A-Z a-z 0-9 . _ - with single slashes between");
  }
  if (!address.prefix.empty()) address.prefix += '/';
  return address;
}

std::string BucketManifest::Encode() const {
  const std::string stream = header.Encode();
  std::string out(kMagic);
  AppendLittleEndian(out, kVersion);
  AppendLittleEndian(out, uint32_t{0});
  AppendLittleEndian(out, uint64_t{stream.size()});
  out += stream;
  for (const std::string& digest : digests) out += absl::HexStringToBytes(digest);
  return out + StreamDigest(out);
}

absl::StatusOr<BucketManifest> BucketManifest::Decode(absl::string_view bytes,
                                                      absl::string_view where) {
  const auto refuse = [&](absl::string_view why) {
    return absl::DataLossError(absl::StrCat(where, ": ", why));
  };
  if (bytes.size() < kFixedBytes + 32 || !absl::StartsWith(bytes, kMagic)) {
    return refuse("it does not begin with \"CARRELBK\": is no manifest of a bucket");
  }
  const auto version = LoadLittleEndian<uint32_t>(bytes.data() + 8);
  if (version != kVersion) {
    return absl::FailedPreconditionError(absl::StrCat(where, ": it has version ", version,
                                                      ", this program reads version ", kVersion));
  }
  const absl::string_view proven = bytes.substr(0, bytes.size() - 32);
  if (StreamDigest(proven) != bytes.substr(proven.size())) {
    return refuse("it does not match its SHA-256");
  }
  const auto size = LoadLittleEndian<uint64_t>(bytes.data() + 16);
  if (size > proven.size() - kFixedBytes) {
    return refuse(absl::StrCat("its header of ", size, " bytes is longer than it"));
  }
  const absl::string_view stream = bytes.substr(kFixedBytes, size);
  const absl::StatusOr<int64_t> wanted = StreamHeader::BytesWanted(stream);
  if (!wanted.ok()) return Annotate(wanted.status(), where);
  if (*wanted != static_cast<int64_t>(size)) return refuse("its header has another length");
  BucketManifest manifest;
  absl::StatusOr<StreamHeader> header = StreamHeader::Decode(stream);
  if (!header.ok()) return Annotate(header.status(), where);
  manifest.header = *std::move(header);
  absl::string_view digests = proven.substr(kFixedBytes + size);
  if (digests.size() != 32 * manifest.header.file_bytes.size()) {
    return refuse(absl::StrCat("it has ", digests.size(), " bytes of digests for ",
                               manifest.header.file_bytes.size(), " files of 32 each"));
  }
  for (; !digests.empty(); digests.remove_prefix(32)) {
    manifest.digests.push_back(absl::BytesToHexString(digests.substr(0, 32)));
  }
  return manifest;
}

std::string BucketManifest::ContentId() const { return Sha256Hex(header.manifest); }

absl::StatusOr<ContextId> BucketManifest::Id() const {
  v1::Manifest manifest;
  if (!manifest.ParseFromString(header.manifest)) {
    return absl::DataLossError("the manifest is no Manifest message");
  }
  return ContextIdOf(manifest);
}

int64_t BucketManifest::bytes() const {
  int64_t sum = 0;
  for (const int64_t bytes : header.file_bytes) sum += bytes;
  return sum;
}

std::string BoundName::Encode() const {
  return DumpJson(nlohmann::json{{"context_id", context_id},
                                 {"content_id", content_id},
                                 {"files", files},
                                 {"bytes", bytes},
                                 {"tokens", tokens}});
}

absl::StatusOr<BoundName> BoundName::Decode(const std::string& name, absl::string_view json,
                                            absl::string_view where) {
  const auto refuse = [&](const absl::Status& status) {
    return absl::DataLossError(absl::StrCat(where, ": ", status.message()));
  };
  const absl::StatusOr<nlohmann::json> object = ParseJsonObject(json, "it", kMessageBounds);
  if (!object.ok()) return refuse(object.status());
  const JsonFields fields("", *object);
  BoundName bound{.name = name};
  absl::Status bad;
  const auto text = [&](const char* field, size_t digits) {
    const absl::StatusOr<std::string> value = fields.String(field);
    bad.Update(value.status());
    if (value.ok() && !IsHex(*value, digits)) {
      bad.Update(absl::DataLossError(
          absl::StrCat(field, "=\"", Shown(*value), "\" must be ", digits, " hexadecimal digits")));
    }
    return value.ok() ? *value : "";
  };
  const auto number = [&](const char* field) {
    const absl::StatusOr<int64_t> value = fields.Int(field, 0, kMaxStoredBytes);
    bad.Update(value.status());
    return value.ok() ? *value : 0;
  };
  bound.context_id = text("context_id", 32);
  bound.content_id = text("content_id", 64);
  bound.files = number("files");
  bound.bytes = number("bytes");
  bound.tokens = number("tokens");
  if (!bad.ok()) return refuse(bad);
  return bound;
}

std::string Bucket::Folder(absl::string_view folder) const {
  return absl::StrCat(prefix_, folder, "/");
}
std::string Bucket::NameKey(absl::string_view name) const {
  return absl::StrCat(Folder("names"), name);
}
std::string Bucket::ContextFolder(absl::string_view id) const {
  return absl::StrCat(Folder("contexts"), id, "/");
}
std::string Bucket::ManifestKey(absl::string_view id) const {
  return ContextFolder(id) + "manifest";
}
std::string Bucket::FileKey(absl::string_view id, int64_t file, absl::string_view sha256) const {
  return absl::StrFormat("%s%04d-%s.sst", ContextFolder(id), file, sha256);
}
std::string Bucket::PushFolder(absl::string_view id) const {
  return absl::StrCat(Folder("pushes"), id, "/");
}
std::string Bucket::SweepKey(absl::string_view id) const {
  return absl::StrCat(Folder("sweeps"), id);
}

absl::StatusOr<BoundName> Bucket::ReadName(const std::string& name) const {
  RETURN_IF_ERROR(ValidateContextName(name));
  const std::string key = NameKey(name);
  ObjectInfo info;
  const absl::StatusOr<std::string> bytes = client_->Read(key, kMostNameObject, &info);
  if (absl::IsNotFound(bytes.status())) {
    return absl::NotFoundError(
        absl::StrCat("there is no context \"", name, "\" (", bytes.status().message(), ")"));
  }
  RETURN_IF_ERROR(bytes.status());
  ASSIGN_OR_RETURN(BoundName bound, BoundName::Decode(name, *bytes, client_->UriOf(key)));
  bound.etag = info.etag;
  bound.modified = info.modified;
  return bound;
}

absl::StatusOr<std::vector<BoundName>> Bucket::ListNames(
    std::vector<absl::Status>* unreadable, const std::map<std::string, BoundName>* known) const {
  std::vector<BoundName> names;
  const std::string folder = Folder("names");
  RETURN_IF_ERROR(client_->ForEach(folder, [&](const ListedObject& object) -> absl::Status {
    const std::string listed = object.key.substr(folder.size());
    if (known != nullptr && !object.etag.empty()) {
      const auto before = known->find(listed);
      if (before != known->end() && BareEtag(before->second.etag) == BareEtag(object.etag)) {
        names.push_back(before->second);
        return absl::OkStatus();
      }
    }
    absl::StatusOr<BoundName> name = ReadName(listed);
    if (absl::IsNotFound(name.status())) return absl::OkStatus();  // freed meanwhile
    if (absl::IsDataLoss(name.status()) || absl::IsInvalidArgument(name.status())) {
      unreadable->push_back(Annotate(name.status(), client_->UriOf(object.key)));
      return absl::OkStatus();
    }
    RETURN_IF_ERROR(name.status());
    names.push_back(*std::move(name));
    return absl::OkStatus();
  }));
  return names;
}

absl::StatusOr<std::map<std::string, int64_t>> Bucket::FileSizes(absl::string_view id) const {
  std::map<std::string, int64_t> sizes;
  RETURN_IF_ERROR(client_->ForEach(ContextFolder(id), [&](const ListedObject& object) {
    sizes[object.key] = object.size;
    return absl::OkStatus();
  }));
  return sizes;
}

absl::StatusOr<BucketManifest> Bucket::ReadManifest(const std::string& id) const {
  const std::string key = ManifestKey(id);
  ASSIGN_OR_RETURN(const std::string bytes, client_->Read(key, kMostManifestObject));
  ASSIGN_OR_RETURN(BucketManifest manifest, BucketManifest::Decode(bytes, client_->UriOf(key)));
  const absl::StatusOr<ContextId> found = manifest.Id();
  if (!found.ok()) return Annotate(found.status(), client_->UriOf(key));
  if (found->ToString() != id) {
    return absl::DataLossError(
        absl::StrCat(client_->UriOf(key), ": it is of context ", found->ToString()));
  }
  return manifest;
}

absl::StatusOr<BucketManifest> Bucket::ReadManifestOf(const BoundName& name) const {
  absl::StatusOr<BucketManifest> manifest = ReadManifest(name.context_id);
  if (absl::IsNotFound(manifest.status())) {
    return absl::NotFoundError(absl::StrCat("context \"", name.name, "\" is being removed (",
                                            manifest.status().message(), ")"));
  }
  RETURN_IF_ERROR(manifest.status());
  if (manifest->ContentId() != name.content_id) {
    return absl::DataLossError(absl::StrCat(
        client_->UriOf(ManifestKey(name.context_id)), ": its content id is ", manifest->ContentId(),
        ", the name ", name.name, " is bound to ", name.content_id));
  }
  return manifest;
}

}  // namespace carrel::kvstore
