#include "tools/carrel/store_access.h"

#include <grpcpp/grpcpp.h>

#include <CLI/CLI.hpp>
#include <cstdio>

#include "absl/time/time.h"
#include "common/status.h"
#include "decoder/resuming_client.h"
#include "decoder/store_client.h"
#include "kvstore/engine/engine.h"
#include "kvstore/service/context_client.h"
#include "kvstore/service/server.h"

namespace carrel::tools {
namespace {

constexpr absl::Duration kDeadline = absl::Seconds(10);

class RemoteStore final : public StoreAccess {
 public:
  RemoteStore(std::string address, absl::Duration retry_for)
      : address_(std::move(address)),
        retry_for_(retry_for),
        channel_(grpc::CreateChannel(address_, grpc::InsecureChannelCredentials())) {}

  absl::StatusOr<std::unique_ptr<decoder::StoreClient>> NewClient() override {
    return decoder::MakeResumingClient(
        {.connect =
             [address = address_](absl::Duration within) {
               return decoder::StoreClient::Connect(address, within);
             },
         .retry_for = retry_for_,
         .open_within = kDeadline,
         .tell =
             [](const std::string& what) { std::fprintf(stderr, "carrel: %s\n", what.c_str()); }});
  }
  absl::StatusOr<std::unique_ptr<kvstore::ContextClient>> NewContextClient() override {
    return std::make_unique<kvstore::ContextClient>(channel_, address_, kDeadline);
  }

 private:
  const std::string address_;
  const absl::Duration retry_for_;
  const std::shared_ptr<grpc::Channel> channel_;
};

class EmbeddedStore final : public StoreAccess {
 public:
  EmbeddedStore(std::unique_ptr<kvstore::Engine> engine, std::unique_ptr<kvstore::Server> server)
      : engine_(std::move(engine)), server_(std::move(server)) {}
  // Clients of this process have closed their sessions by now, but the server may not have seen it.
  ~EmbeddedStore() override { server_->Drain(kDeadline); }

  absl::StatusOr<std::unique_ptr<decoder::StoreClient>> NewClient() override {
    return decoder::StoreClient::OverChannel(server_->InProcessChannel(), kDeadline);
  }
  absl::StatusOr<std::unique_ptr<kvstore::ContextClient>> NewContextClient() override {
    return std::make_unique<kvstore::ContextClient>(server_->InProcessChannel(),
                                                    "the embedded store", kDeadline);
  }

 private:
  const std::unique_ptr<kvstore::Engine> engine_;
  const std::unique_ptr<kvstore::Server> server_;
};

}  // namespace

void StoreFlags::Declare(CLI::App& command) {
  command.add_option("--store", folder, "folder of a store, opened in this process");
  command.add_option("--server", server, "address of a carrel serve: unix:PATH or HOST:PORT");
}

absl::Status StoreFlags::Validate() const {
  if (folder.empty() != server.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(folder.empty()
                                        ? "one of --store FOLDER and --server ADDRESS is needed"
                                        : "only one of --store and --server can be given");
}

absl::StatusOr<std::unique_ptr<StoreAccess>> StoreAccess::Open(const StoreFlags& flags,
                                                               kvstore::StoreMode mode) {
  RETURN_IF_ERROR(flags.Validate());
  if (!flags.server.empty()) return std::make_unique<RemoteStore>(flags.server, flags.retry_for);
  ASSIGN_OR_RETURN(std::unique_ptr<kvstore::Store> store, kvstore::Store::Open(flags.folder, mode));
  ASSIGN_OR_RETURN(std::unique_ptr<kvstore::Engine> engine,
                   kvstore::Engine::Create(kvstore::EngineConfig(), std::move(store)));
  kvstore::ServerConfig config;
  config.listen.clear();
  ASSIGN_OR_RETURN(std::unique_ptr<kvstore::Server> server,
                   kvstore::Server::Start(config, engine.get()));
  return std::make_unique<EmbeddedStore>(std::move(engine), std::move(server));
}

}  // namespace carrel::tools
