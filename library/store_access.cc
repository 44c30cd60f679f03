#include "library/store_access.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/file.h"
#include "common/status.h"
#include "kvstore/engine/engine.h"
#include "kvstore/format/manifest.h"
#include "kvstore/service/context_client.h"
#include "kvstore/service/credentials.h"
#include "kvstore/service/listen_address.h"
#include "kvstore/service/server.h"
#include "kvstore/storage/token_ids.h"
#include "library/embedded_client.h"
#include "library/quiet_log.h"
#include "library/remote_store.h"
#include "retrieval/session.h"

namespace carrel::library {
namespace {

constexpr absl::Duration kDeadline = absl::Seconds(10);

// The first line of a file that not everybody may read.
absl::StatusOr<std::string> ReadKeyFile(const std::string& path) {
  struct stat info;
  if (stat(path.c_str(), &info) == 0 && (info.st_mode & S_IROTH) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("key file ", path, ": everybody may read it (chmod o= it)"));
  }
  ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  const absl::string_view key =
      absl::StripAsciiWhitespace(absl::string_view(text).substr(0, text.find('\n')));
  const bool printable =
      std::all_of(key.begin(), key.end(), [](char c) { return c > ' ' && c < 0x7f; });
  if (key.empty() || key.size() > 256 || !printable) {
    return absl::InvalidArgumentError(absl::StrCat(
        "key file ", path, ": its first line is no key of 1 .. 256 printable characters"));
  }
  return std::string(key);
}

absl::StatusOr<std::vector<TokenId>> ReadDocumentTokens(const kvstore::StoredContext& context) {
  const v1::Manifest& manifest = context.manifest();
  ASSIGN_OR_RETURN(const std::string bytes, kvstore::ReadTokenIds(context, 0, manifest.tokens()));
  if (Sha256Hex(bytes) != manifest.token_ids_sha256()) {
    return absl::DataLossError(absl::StrCat("context \"", manifest.name(),
                                            "\": its token ids are not those of its manifest"));
  }
  std::vector<TokenId> tokens(static_cast<size_t>(manifest.tokens()));
  std::memcpy(tokens.data(), bytes.data(), bytes.size());
  return tokens;
}

class EmbeddedStore final : public StoreAccess {
 public:
  explicit EmbeddedStore(std::unique_ptr<kvstore::Engine> engine) : engine_(std::move(engine)) {}
  ~EmbeddedStore() override {
    if (server_ != nullptr) server_->Drain(kDeadline);
  }

  absl::StatusOr<std::unique_ptr<retrieval::Session>> NewClient(ThreadPool* pool) override {
    return MakeEmbeddedClient(engine_.get(), pool);
  }
  absl::StatusOr<std::unique_ptr<kvstore::ContextClient>> NewContextClient(
      const std::string&) override {
    absl::MutexLock lock(&mu_);
    if (server_ == nullptr) {
      RETURN_IF_ERROR(CheckDescriptorsOfGrpc());
      kvstore::ServerConfig config;
      config.listen.clear();
      config.source = source_;
      ASSIGN_OR_RETURN(server_, kvstore::Server::Start(config, engine_.get()));
    }
    return std::make_unique<kvstore::ContextClient>(server_->InProcessChannel(),
                                                    "the embedded store", kDeadline);
  }
  absl::StatusOr<std::vector<TokenId>> DocumentTokens(const std::string& context,
                                                      const std::string& content_id) override {
    RETURN_IF_ERROR(engine_->store().Refresh().status());
    ASSIGN_OR_RETURN(const auto stored, engine_->store().OpenContext(context));
    RETURN_IF_ERROR(kvstore::CheckContentId(content_id, stored->manifest()));
    return ReadDocumentTokens(*stored);
  }
  bool brings() const override { return source_ != nullptr; }
  std::shared_ptr<void> Bring(const std::string& name, kvstore::ContextWaiter waiter) override {
    if (source_ != nullptr) return source_->Bring(name, std::move(waiter));
    return StoreAccess::Bring(name, std::move(waiter));
  }
  kvstore::Store* store() override { return &engine_->store(); }
  kvstore::Engine* engine() override { return engine_.get(); }
  void SetSource(kvstore::ContextSource* source) override { source_ = source; }

 private:
  const std::unique_ptr<kvstore::Engine> engine_;
  kvstore::ContextSource* source_ = nullptr;
  absl::Mutex mu_;
  std::unique_ptr<kvstore::Server> server_;  // written under mu_
};

}  // namespace

absl::StatusOr<ServerLogin> StoreAddress::LoginTo(const std::string& at) const {
  ServerLogin login;
  if (tls.ca.empty() && !(tls.certificate.empty() && tls.key.empty())) {
    return absl::InvalidArgumentError("--tls-cert and --tls-key need --tls-ca");
  }
  ASSIGN_OR_RETURN(login.tls, ReadTlsFiles(tls, absl::Now()));
  if (key_file.empty()) return login;
  ASSIGN_OR_RETURN(login.key, ReadKeyFile(key_file));
  if (!login.uses_tls()) {
    const auto address = kvstore::ParseListenAddress(at);
    if (!address.ok() || (address->unix_path.empty() && !kvstore::IsLoopback(*address))) {
      return absl::FailedPreconditionError(
          absl::StrCat("the key of ", key_file, " would travel to ", at,
                       " for everybody to read: --tls-ca is needed"));
    }
  }
  return login;
}

absl::Status StoreAddress::Validate() const {
  if (folder.empty() != server.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(folder.empty()
                                        ? "one of --store FOLDER and --server ADDRESS is needed"
                                        : "only one of --store and --server can be given");
}

absl::StatusOr<std::unique_ptr<kvstore::ContextClient>> StoreAccess::NewContextClient() {
  return NewContextClient("");
}

std::shared_ptr<void> StoreAccess::Bring(const std::string&, kvstore::ContextWaiter waiter) {
  waiter.done(absl::OkStatus());
  return nullptr;
}

absl::StatusOr<std::unique_ptr<StoreAccess>> StoreAccess::Open(const StoreAddress& address,
                                                               kvstore::StoreMode mode) {
  QuietLog();
  RETURN_IF_ERROR(address.Validate());
  if (!address.server.empty()) return OpenRemoteStore(address);
  ASSIGN_OR_RETURN(std::unique_ptr<kvstore::Store> store,
                   kvstore::Store::Open(address.folder, mode));
  ASSIGN_OR_RETURN(std::unique_ptr<kvstore::Engine> engine,
                   kvstore::Engine::Create(kvstore::EngineConfig(), std::move(store)));
  return std::make_unique<EmbeddedStore>(std::move(engine));
}

}  // namespace carrel::library
