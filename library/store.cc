#include "carrel/store.h"

#include <utility>

#include "carrel/v1/context.pb.h"
#include "common/status.h"
#include "kvstore/service/context_client.h"
#include "kvstore/service/convert.h"
#include "library/handles.h"
#include "library/move_context.h"
#include "library/status.h"

namespace carrel {
inline namespace api {

namespace {

Result<std::shared_ptr<Store>> OpenAt(library::StoreAddress address, kvstore::StoreMode mode) {
  absl::StatusOr<std::shared_ptr<library::StoreAccess>> access =
      library::StoreAccess::Open(address, mode);
  if (!access.ok()) return library::ToPublic(access.status());
  return std::shared_ptr<Store>(
      std::make_shared<library::StoreHandle>(std::move(address), *std::move(access)));
}

}  // namespace

Result<std::shared_ptr<Store>> Store::Open(const std::string& folder, StoreMode mode) {
  return OpenAt({.folder = folder}, mode == StoreMode::kRead ? kvstore::StoreMode::kReadOnly
                                                             : kvstore::StoreMode::kReadWrite);
}

Result<std::shared_ptr<Store>> Store::Connect(const std::string& server, const Login& login) {
  library::StoreAddress address;
  address.server = server;
  address.tls = {.certificate = login.tls_cert, .key = login.tls_key, .ca = login.tls_ca};
  address.key_file = login.key_file;
  if (!(login.retry_for_s >= 0 && login.retry_for_s <= 86400)) {
    return Status(StatusCode::kInvalidArgument,
                  absl::StrCat("retry_for_s=", login.retry_for_s, " is outside [0, 86400]"));
  }
  address.retry_for = absl::Seconds(login.retry_for_s);
  return OpenAt(std::move(address), kvstore::StoreMode::kReadOnly);
}

}  // namespace api

namespace library {

ContextInfo Describe(const v1::Manifest& manifest) {
  ContextInfo info;
  info.name = manifest.name();
  info.content_id = manifest.content_id();
  info.tokens = manifest.tokens();
  info.layers = static_cast<int32_t>(manifest.layers());
  info.q_heads = static_cast<int32_t>(manifest.q_heads());
  info.kv_heads = static_cast<int32_t>(manifest.kv_heads());
  info.head_dim = static_cast<int32_t>(manifest.head_dim());
  info.index = manifest.index().kind();
  info.stored_bytes = kvstore::FactsOf(manifest).bytes;
  info.created_unix_s = manifest.created_unix_s();
  info.has_summaries = manifest.summary_rows() > 0;
  info.measured = manifest.head_fidelity_size() > 0;
  return info;
}

Result<std::vector<ContextInfo>> StoreHandle::List(std::vector<std::string>* unreadable) {
  const auto list = [&]() -> absl::StatusOr<std::vector<ContextInfo>> {
    ASSIGN_OR_RETURN(const auto client, access_->NewContextClient());
    ASSIGN_OR_RETURN(const v1::ListResponse listed, client->List());
    if (unreadable != nullptr) {
      unreadable->assign(listed.unreadable().begin(), listed.unreadable().end());
    }
    std::vector<ContextInfo> contexts;
    for (const auto& summary : listed.contexts()) {
      absl::StatusOr<v1::Manifest> manifest = client->Get(summary.name());
      if (absl::IsNotFound(manifest.status())) continue;  // deleted meanwhile
      RETURN_IF_ERROR(manifest.status());
      contexts.push_back(Describe(*manifest));
    }
    return contexts;
  };
  return ToPublic(list());
}

Result<ContextInfo> StoreHandle::Get(const std::string& name) {
  const auto get = [&]() -> absl::StatusOr<ContextInfo> {
    ASSIGN_OR_RETURN(const auto client, access_->NewContextClient());
    ASSIGN_OR_RETURN(const v1::Manifest manifest, client->Get(name));
    return Describe(manifest);
  };
  return ToPublic(get());
}

Status StoreHandle::Delete(const std::string& name) {
  const auto remove = [&]() -> absl::Status {
    ASSIGN_OR_RETURN(const auto client, access_->NewContextClient());
    return client->Delete(name);
  };
  return ToPublic(remove());
}

Result<VerifyReport> StoreHandle::Verify(const std::string& name, bool deep) {
  const auto verify = [&]() -> absl::StatusOr<VerifyReport> {
    ASSIGN_OR_RETURN(const auto client, access_->NewContextClient());
    ASSIGN_OR_RETURN(const v1::VerifyResponse response, client->Verify(name, deep));
    VerifyReport report;
    report.segments = response.segments();
    report.bytes = response.bytes();
    report.errors.assign(response.errors().begin(), response.errors().end());
    return report;
  };
  return ToPublic(verify());
}

Status StoreHandle::Export(const std::string& name,
                           const std::function<Status(std::string_view)>& sink) {
  const auto send = [&]() -> absl::Status {
    return ExportContext(*access_, name,
                         [&](absl::string_view piece, int64_t) {
                           return FromPublic(sink({piece.data(), piece.size()}));
                         })
        .status();
  };
  return ToPublic(send());
}

Result<ContextInfo> StoreHandle::Import(
    const std::string& name,
    const std::function<Result<std::string_view>(int64_t offset)>& source) {
  const auto receive = [&]() -> absl::StatusOr<ContextInfo> {
    const auto next = [&](int64_t offset) -> absl::StatusOr<absl::string_view> {
      const Result<std::string_view> piece = source(offset);
      if (!piece.ok()) return FromPublic(piece.status());
      return absl::string_view(piece->data(), piece->size());
    };
    ASSIGN_OR_RETURN(const v1::ImportReply reply,
                     ImportContext(*access_, name, next, [](int64_t, int64_t) {}));
    ASSIGN_OR_RETURN(const auto client, access_->NewContextClient(reply.name()));
    ASSIGN_OR_RETURN(const v1::Manifest manifest, client->Get(reply.name()));
    return Describe(manifest);
  };
  return ToPublic(receive());
}

Result<std::vector<int32_t>> StoreHandle::DocumentTokens(const std::string& name) {
  return ToPublic(access_->DocumentTokens(name, ""));
}

}  // namespace library
}  // namespace carrel
