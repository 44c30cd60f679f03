// carrel ls | inspect | rm
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "carrel/v1/context.pb.h"
#include "common/json.h"
#include "common/status.h"
#include "kvstore/format/manifest.h"
#include "kvstore/remote/bucket.h"
#include "kvstore/service/context_client.h"
#include "tools/carrel/bucket_contexts.h"
#include "tools/carrel/bucket_flags.h"
#include "tools/carrel/commands.h"
#include "tools/carrel/contexts_report.h"
#include "tools/carrel/dump_rows.h"
#include "tools/carrel/known_names.h"
#include "tools/carrel/manifest_report.h"
#include "tools/carrel/plan_flags.h"
#include "tools/carrel/report.h"
#include "tools/carrel/retrieval_flags.h"
#include "tools/carrel/store_flags.h"

namespace carrel::tools {
namespace {

struct ContextsFlags {
  StoreFlags store;
  BucketFlags bucket;  // ls, rm
  std::string name;
  std::string content_id;
  std::string rows;
  bool json = false;
  // inspect --plan
  bool plan = false;
  PlanFlags planned;
};

absl::Status RunLs(const ContextsFlags& flags) {
  if (kvstore::BucketAddress::IsOne(flags.store.folder)) {
    return ListInBucket(flags.bucket, flags.store.folder, flags.json);
  }
  RETURN_IF_ERROR(flags.bucket.RefuseWithoutBucket());
  RETURN_IF_ERROR(flags.store.Validate());
  ASSIGN_OR_RETURN(const std::unique_ptr<library::StoreAccess> store,
                   library::StoreAccess::Open(flags.store, kvstore::StoreMode::kReadOnly));
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::ContextClient> client, store->NewContextClient());
  ASSIGN_OR_RETURN(const v1::ListResponse list, client->List());
  std::fputs((flags.json ? ContextsJson(list) : ContextsTable(list)).c_str(), stdout);
  if (!flags.json) std::fputs(UnfinishedPrefills(list).c_str(), stdout);
  std::fputs(UnreadableContexts(list).c_str(), stderr);
  return absl::OkStatus();
}

absl::Status RunInspect(const ContextsFlags& flags) {
  RETURN_IF_ERROR(flags.store.Validate());
  if (!flags.rows.empty() && flags.store.folder.empty()) {
    return absl::InvalidArgumentError("--rows reads the stored rows and needs --store");
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<library::StoreAccess> store,
                   library::StoreAccess::Open(flags.store, kvstore::StoreMode::kReadOnly));
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::ContextClient> client, store->NewContextClient());
  ASSIGN_OR_RETURN(const v1::Manifest manifest, client->Get(flags.name));
  RETURN_IF_ERROR(kvstore::CheckContentId(flags.content_id, manifest));
  if (flags.plan) {
    ASSIGN_OR_RETURN(const decoder::Plan plan, PlanOf(flags.planned, flags.store, flags.name));
    if (flags.json) {
      std::printf("%s\n", DumpJson(PlanJson(plan)).c_str());
    } else {
      std::fputs(decoder::PlanTable(plan).c_str(), stdout);
    }
    return absl::OkStatus();
  }
  if (!flags.rows.empty()) RETURN_IF_ERROR(DumpRows(flags.store.folder, flags.name, flags.rows));
  if (flags.json) {
    std::printf("%s\n", ManifestJson(manifest).c_str());
  } else {
    PrintManifest(manifest);
  }
  return absl::OkStatus();
}

absl::Status RunRm(const ContextsFlags& flags) {
  if (kvstore::BucketAddress::IsOne(flags.store.folder)) {
    return RemoveInBucket(flags.bucket, flags.store.folder, flags.name, flags.json);
  }
  RETURN_IF_ERROR(flags.bucket.RefuseWithoutBucket());
  RETURN_IF_ERROR(flags.store.Validate());
  ASSIGN_OR_RETURN(const std::unique_ptr<library::StoreAccess> store,
                   library::StoreAccess::Open(flags.store, kvstore::StoreMode::kReadWrite));
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::ContextClient> client, store->NewContextClient());
  RETURN_IF_ERROR(client->Delete(flags.name));
  if (flags.json) {
    std::printf("%s\n", DumpJson(nlohmann::json{{"removed", flags.name}}).c_str());
  } else {
    std::printf("removed %s\n", flags.name.c_str());
  }
  return absl::OkStatus();
}

CLI::App& Declare(CLI::App& app, const char* name, const char* description,
                  const std::shared_ptr<ContextsFlags>& flags) {
  CLI::App& command = *app.add_subcommand(name, description);
  flags->store.Declare(command);
  command.add_flag("--json", flags->json, "one JSON object");
  return command;
}

}  // namespace

void AddContexts(CLI::App& app, Run& chosen) {
  auto ls = std::make_shared<ContextsFlags>();
  CLI::App& ls_command = Declare(app, "ls", "List the contexts of a store", ls);
  ls->bucket.DeclareForStore(ls_command);
  ls_command.callback([ls, &chosen] { chosen = [ls] { return RunLs(*ls); }; });

  auto inspect = std::make_shared<ContextsFlags>();
  CLI::App& inspect_command =
      Declare(app, "inspect",
              "Show a context: manifest, sizes, index, and how attention looks per layer and head",
              inspect);
  inspect_command.add_option("NAME", inspect->name, "the context")->required();
  DeclareContentId(inspect_command, inspect->content_id);
  inspect_command.add_option("--rows", inspect->rows,
                             "also write every K and V row to this safetensors file (k.LAYER, "
                             "v.LAYER [kv_heads, tokens, head_dim])");
  inspect_command.add_flag("--plan", inspect->plan,
                           "instead: how a decoder of --model would attend to it here, and why");
  inspect->planned.Declare(inspect_command);
  inspect_command.callback([inspect, &chosen] {
    chosen = [inspect] { return WithNames(RunInspect(*inspect), inspect->store, inspect->name); };
  });

  auto rm = std::make_shared<ContextsFlags>();
  CLI::App& rm_command = Declare(
      app, "rm", "Remove a context, or what an unfinished prefill left, and free its space", rm);
  rm_command.add_option("NAME", rm->name, "the context")->required();
  rm->bucket.DeclareForStore(rm_command);
  rm_command.callback(
      [rm, &chosen] { chosen = [rm] { return WithNames(RunRm(*rm), rm->store, rm->name); }; });
}

}  // namespace carrel::tools
