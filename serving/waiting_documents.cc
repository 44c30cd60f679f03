#include "serving/waiting_documents.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/file.h"
#include "common/json.h"
#include "common/resource_status.h"
#include "common/shown.h"
#include "common/status.h"
#include "kvstore/format/context_name.h"
#include "serving/status_details.h"

namespace carrel::serving {
namespace {

namespace fs = std::filesystem;

constexpr absl::string_view kSuffix = ".document", kFailed = ".failed";
constexpr size_t kLongestError = 2000;

// As it was: an error again, whatever the file says.
absl::Status ReadFailure(const std::string& path) {
  const absl::StatusOr<std::string> bytes = ReadFile(path);
  if (!bytes.ok()) return bytes.status();
  const absl::StatusOr<nlohmann::json> said = ParseJsonObject(*bytes, path, kMessageBounds);
  if (!said.ok()) return absl::DataLossError(std::string(said.status().message()));
  const int64_t code = JsonInt(JsonAt(*said, {"code"}));
  const bool known = code > 0 && code <= static_cast<int64_t>(absl::StatusCode::kUnauthenticated);
  absl::Status error(known ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown,
                     JsonText(JsonAt(*said, {"message"})));
  if (JsonBool(JsonAt(*said, {"disk_full"}))) error = MakeDiskFull(error.message());
  return OfMachine(std::move(error));
}

// Version 1 says nobody's name.
std::string DigestOf(const v1::WaitingDocument& message) {
  return Sha256Hex(absl::StrCat(message.who(), message.token_ids()));
}

absl::StatusOr<WaitingDocument> Parse(const std::string& path, const std::string& name) {
  ASSIGN_OR_RETURN(const std::string bytes, ReadFile(path));
  v1::WaitingDocument message;
  if (!message.ParseFromString(bytes)) {
    return absl::DataLossError(absl::StrCat(path, " is no document that waits"));
  }
  if (message.format_version() < 1 || message.format_version() > WaitingDocuments::kFormatVersion) {
    return absl::FailedPreconditionError(absl::StrCat(path, " has format version ",
                                                      message.format_version(), ", must be 1 to ",
                                                      WaitingDocuments::kFormatVersion));
  }
  const std::string& ids = message.token_ids();
  if (message.name() != name || ids.size() % sizeof(TokenId) != 0 ||
      DigestOf(message) != message.token_ids_sha256()) {
    return absl::DataLossError(absl::StrCat(
        path,
        ": its name or tokens are not those that were written; delete it, or bring it again"));
  }
  WaitingDocument document;
  document.name = name;
  document.who = message.who();
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

std::string WaitingDocuments::FailurePathOf(const std::string& name) const {
  return absl::StrCat(folder_, "/", name, kFailed);
}

absl::Status WaitingDocuments::PutFailure(const std::string& name,
                                          const absl::Status& error) const {
  RETURN_IF_ERROR(Remove(name));  // first: the disk may be full
  const nlohmann::json said = {{"code", static_cast<int>(error.code())},
                               {"message", Shown(error.message(), kLongestError)},
                               {"disk_full", IsDiskFull(error)}};
  return WriteFileAtomically(FailurePathOf(name), DumpJson(said));
}

absl::Status WaitingDocuments::Put(const WaitingDocument& document) const {
  RETURN_IF_ERROR(kvstore::ValidateContextName(document.name));
  RETURN_IF_ERROR(MakePrivateFolder(folder_));
  v1::WaitingDocument message;
  message.set_format_version(kFormatVersion);
  message.set_name(document.name);
  message.set_who(document.who);
  message.set_created_unix_s(document.created_unix_s);
  for (const auto& [name, value] : document.fingerprint) {
    v1::Fingerprint::Field& field = *message.mutable_fingerprint()->add_fields();
    field.set_name(name);
    field.set_value(value);
  }
  message.set_token_ids(document.tokens.data(), document.tokens.size() * sizeof(TokenId));
  message.set_token_ids_sha256(DigestOf(message));
  RETURN_IF_ERROR(WriteFileAtomically(PathOf(document.name), message.SerializeAsString()));
  std::error_code error;
  fs::remove(FailurePathOf(document.name), error);
  return absl::OkStatus();
}

absl::Status WaitingDocuments::Remove(const std::string& name) const {
  RETURN_IF_ERROR(kvstore::ValidateContextName(name));
  for (const std::string& path : {PathOf(name), FailurePathOf(name)}) {
    std::error_code error;
    fs::remove(path, error);
    if (error) return ErrnoStatus(error.value(), absl::StrCat("removing ", path));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<WaitingDocuments::Found>> WaitingDocuments::Read() const {
  std::error_code error;
  std::vector<std::pair<fs::file_time_type, std::string>> files;
  for (fs::directory_iterator it(folder_, error), end; !error && it != end; it.increment(error)) {
    std::error_code gone;
    const std::string file = it->path().filename().string();
    absl::string_view name = file;
    const bool ours = absl::ConsumeSuffix(&name, kSuffix) || absl::ConsumeSuffix(&name, kFailed);
    if (!ours || !kvstore::ValidateContextName(name).ok()) {
      fs::remove(it->path(), gone);  // a write that was interrupted
      continue;
    }
    files.emplace_back(fs::last_write_time(it->path(), gone), file);
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    return absl::ErrnoToStatus(error.value(), absl::StrCat("reading ", folder_));
  }
  std::sort(files.begin(), files.end());
  std::vector<Found> found;
  for (const auto& [when, file] : files) {
    absl::string_view name = file;
    const bool failed = absl::ConsumeSuffix(&name, kFailed);
    if (!failed) absl::ConsumeSuffix(&name, kSuffix);
    const std::string path = absl::StrCat(folder_, "/", file);
    if (failed && fs::exists(PathOf(std::string(name)))) continue;  // it was brought again
    found.push_back({std::string(name), absl::StatusOr<WaitingDocument>(absl::UnknownError(""))});
    if (failed) {
      found.back().document = ReadFailure(path);
    } else {
      found.back().document = Parse(path, std::string(name));
    }
  }
  return found;
}

}  // namespace carrel::serving
