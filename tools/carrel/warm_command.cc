// carrel warm
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "carrel/v1/context.pb.h"
#include "common/json.h"
#include "common/progress.h"
#include "common/status.h"
#include "http_api/api_client.h"
#include "kvstore/service/context_client.h"
#include "tools/carrel/commands.h"
#include "tools/carrel/known_names.h"
#include "tools/carrel/store_flags.h"

namespace carrel::tools {
namespace {

struct WarmFlags {
  StoreFlags store;
  std::string api;
  std::vector<std::string> names;
  bool quiet = false;
};

void Show(Progress& progress, const std::string& name, int64_t bytes, int64_t of, bool room) {
  const double share = of > 0 ? static_cast<double>(bytes) / static_cast<double>(of) : 0;
  progress.Update(std::min(share, 1.0), absl::StrCat(name, room ? ": waits for room" : ""));
}

absl::Status WarmByServer(const WarmFlags& flags, Progress& progress) {
  ASSIGN_OR_RETURN(const std::unique_ptr<library::StoreAccess> store,
                   library::StoreAccess::Open(flags.store, kvstore::StoreMode::kReadOnly));
  for (const std::string& name : flags.names) {
    ASSIGN_OR_RETURN(const auto client, store->NewContextClient(name));
    const absl::Status here = client->Warm(name, [&](const v1::WarmReply& reply) {
      Show(progress, name, reply.bytes(), reply.of(), reply.waits_for_room());
      return true;
    });
    progress.Clear();
    if (!here.ok()) return WithNames(here, flags.store, name);
    absl::PrintF("%s is here\n", name);
  }
  return absl::OkStatus();
}

absl::Status WarmByApi(const WarmFlags& flags, Progress& progress) {
  ASSIGN_OR_RETURN(http_api::ApiClient client, http_api::ApiClient::Create(flags.api));
  if (!flags.store.key_file.empty()) {
    library::StoreAddress address = flags.store;  // which says where a key may travel
    ASSIGN_OR_RETURN(const ServerLogin login, address.LoginTo(client.address()));
    client.set_key(login.key);
  }
  for (const std::string& name : flags.names) {
    client.set_context(name);
    for (;;) {
      ASSIGN_OR_RETURN(const std::string said,
                       client.Call(absl::StrCat("/v1/contexts/", name, "/warm?wait=2"), "{}"));
      ASSIGN_OR_RETURN(const nlohmann::json answer,
                       ParseJsonObject(said, "the server's answer", kMessageBounds));
      if (JsonBool(JsonAt(answer, {"resident"}))) break;
      Show(progress, name, JsonInt(JsonAt(answer, {"bytes"})), JsonInt(JsonAt(answer, {"of"})),
           JsonBool(JsonAt(answer, {"waits_for_room"})));
    }
    progress.Clear();
    absl::PrintF("%s is here\n", name);
  }
  return absl::OkStatus();
}

absl::Status RunWarm(const WarmFlags& flags) {
  if (flags.api.empty() == flags.store.server.empty()) {
    return absl::InvalidArgumentError("warm: one of --server ADDRESS and --api URL is needed");
  }
  Progress progress(flags.quiet ? Progress::Mode::kQuiet : Progress::ModeFor(stderr));
  return flags.api.empty() ? WarmByServer(flags, progress) : WarmByApi(flags, progress);
}

}  // namespace

void AddWarm(CLI::App& app, Run& chosen) {
  auto flags = std::make_shared<WarmFlags>();
  CLI::App& command = *app.add_subcommand(
      "warm",
      "Have contexts brought to where a server reads them, if they come from a bucket, and wait "
      "until they are there");
  command.add_option("NAME", flags->names, "contexts")->required();
  flags->store.DeclareServer(command);
  command.add_option("--api", flags->api, "http://HOST:PORT of a carrel api, instead of --server");
  command.add_flag("--quiet", flags->quiet, "no progress");
  command.callback([flags, &chosen] { chosen = [flags] { return RunWarm(*flags); }; });
}

}  // namespace carrel::tools
