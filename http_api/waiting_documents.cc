#include "http_api/waiting_documents.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/file.h"
#include "common/status.h"
#include "kvstore/format/context_name.h"

namespace carrel::http_api {
namespace {

namespace fs = std::filesystem;

constexpr absl::string_view kSuffix = ".document";

absl::StatusOr<WaitingDocument> Parse(const std::string& path, const std::string& name) {
  ASSIGN_OR_RETURN(const std::string bytes, ReadFile(path));
  v1::WaitingDocument message;
  if (!message.ParseFromString(bytes)) {
    return absl::DataLossError(absl::StrCat(path, " is no document that waits"));
  }
  if (message.format_version() != WaitingDocuments::kFormatVersion) {
    return absl::FailedPreconditionError(absl::StrCat(path, " has format version ",
                                                      message.format_version(), ", must be ",
                                                      WaitingDocuments::kFormatVersion));
  }
  const std::string& ids = message.token_ids();
  if (message.name() != name || ids.size() % sizeof(TokenId) != 0 ||
      Sha256Hex(ids) != message.token_ids_sha256()) {
    return absl::DataLossError(absl::StrCat(
        path,
        ": its name or tokens are not those that were written; delete it, or bring it again"));
  }
  WaitingDocument document;
  document.name = name;
  document.tokens.resize(ids.size() / sizeof(TokenId));
  std::memcpy(document.tokens.data(), ids.data(), ids.size());
  for (const auto& field : message.fingerprint().fields()) {
    document.fingerprint.emplace_back(field.name(), field.value());
  }
  document.created_unix_s = message.created_unix_s();
  return document;
}

}  // namespace

std::string WaitingDocuments::PathOf(const std::string& name) const {
  return absl::StrCat(folder_, "/", name, kSuffix);
}

absl::Status WaitingDocuments::Put(const WaitingDocument& document) const {
  RETURN_IF_ERROR(kvstore::ValidateContextName(document.name));
  RETURN_IF_ERROR(MakePrivateFolder(folder_));
  v1::WaitingDocument message;
  message.set_format_version(kFormatVersion);
  message.set_name(document.name);
  message.set_created_unix_s(document.created_unix_s);
  for (const auto& [name, value] : document.fingerprint) {
    v1::Fingerprint::Field& field = *message.mutable_fingerprint()->add_fields();
    field.set_name(name);
    field.set_value(value);
  }
  message.set_token_ids(document.tokens.data(), document.tokens.size() * sizeof(TokenId));
  message.set_token_ids_sha256(Sha256Hex(message.token_ids()));
  return WriteFileAtomically(PathOf(document.name), message.SerializeAsString());
}

absl::Status WaitingDocuments::Remove(const std::string& name) const {
  RETURN_IF_ERROR(kvstore::ValidateContextName(name));
  std::error_code error;
  fs::remove(PathOf(name), error);
  if (!error) return absl::OkStatus();
  return absl::ErrnoToStatus(error.value(), absl::StrCat("removing ", PathOf(name)));
}

absl::StatusOr<std::vector<WaitingDocuments::Found>> WaitingDocuments::Read() const {
  std::error_code error;
  std::vector<std::pair<fs::file_time_type, std::string>> files;
  for (fs::directory_iterator it(folder_, error), end; !error && it != end; it.increment(error)) {
    std::error_code gone;
    const std::string file = it->path().filename().string();
    absl::string_view name = file;
    if (!absl::ConsumeSuffix(&name, kSuffix) || !kvstore::ValidateContextName(name).ok()) {
      fs::remove(it->path(), gone);  // a write that was interrupted
      continue;
    }
    files.emplace_back(fs::last_write_time(it->path(), gone), name);
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    return absl::ErrnoToStatus(error.value(), absl::StrCat("reading ", folder_));
  }
  std::sort(files.begin(), files.end());
  std::vector<Found> found;
  for (const auto& [when, name] : files) found.push_back({name, Parse(PathOf(name), name)});
  return found;
}

}  // namespace carrel::http_api
