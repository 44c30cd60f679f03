// carrel ls | inspect | rm
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "carrel/v1/context.pb.h"
#include "common/progress.h"
#include "common/status.h"
#include "kvstore/format/manifest.h"
#include "kvstore/index/rows/rows.h"
#include "kvstore/remote/sweep.h"
#include "kvstore/storage/token_ids.h"
#include "model/safetensors.h"
#include "tools/carrel/bucket_flags.h"
#include "tools/carrel/commands.h"
#include "tools/carrel/json_report.h"
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

absl::Status ListInBucket(const ContextsFlags& flags) {
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Bucket> bucket,
                   flags.bucket.Open(flags.store.folder));
  std::vector<absl::Status> unreadable;
  ASSIGN_OR_RETURN(const std::vector<kvstore::BoundName> names, bucket->ListNames(&unreadable));
  nlohmann::json contexts = nlohmann::json::array(), damaged = nlohmann::json::array();
  std::string table =
      absl::StrFormat("%-24s %10s %10s  %s\n", "NAME", "TOKENS", "SIZE", "CONTENT ID");
  for (const kvstore::BoundName& name : names) {
    contexts.push_back({{"name", name.name},
                        {"content_id", name.content_id},
                        {"context_id", name.context_id},
                        {"tokens", name.tokens},
                        {"files", name.files},
                        {"bytes", name.bytes}});
    absl::StrAppendFormat(&table, "%-24s %10d %10s  %s\n", name.name, name.tokens,
                          FormatBytes(name.bytes), name.content_id.substr(0, 12));
  }
  for (const absl::Status& status : unreadable) damaged.push_back(status.message());
  RETURN_IF_ERROR(Report(flags.json, {{"contexts", contexts}, {"unreadable", damaged}}, table));
  TellUnreadable(unreadable);
  return absl::OkStatus();
}

absl::Status RunLs(const ContextsFlags& flags) {
  if (kvstore::BucketAddress::IsOne(flags.store.folder)) return ListInBucket(flags);
  RETURN_IF_ERROR(flags.bucket.RefuseWithoutBucket());
  ASSIGN_OR_RETURN(const ConnectedStore at, flags.store.Connect(kvstore::StoreMode::kReadOnly));
  ASSIGN_OR_RETURN(const v1::ListResponse list, at.client->List());
  RETURN_IF_ERROR(Report(flags.json, ContextsJson(list),
                         absl::StrCat(ContextsTable(list), UnfinishedPrefills(list))));
  std::fputs(UnreadableContexts(list).c_str(), stderr);
  return absl::OkStatus();
}

// Every stored K and V row as one safetensors file: k.LAYER, v.LAYER [kv_heads, tokens, head_dim] bf16, token_ids
// [tokens] i32. Every byte is verified before it is written.
absl::Status DumpRows(const ContextsFlags& flags) {
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Store> store,
                   kvstore::Store::Open(flags.store.folder, kvstore::StoreMode::kReadOnly));
  ASSIGN_OR_RETURN(const std::shared_ptr<const kvstore::StoredContext> stored,
                   store->OpenContext(flags.name));
  const v1::Manifest& manifest = stored->manifest();
  std::vector<std::string> bytes(1);
  std::vector<model::NamedTensor> tensors = {{"token_ids", {DType::kI32, {manifest.tokens()}, {}}}};
  ASSIGN_OR_RETURN(bytes[0], kvstore::ReadTokenIds(*stored, 0, manifest.tokens()));
  for (Layer layer(0); layer.value() < static_cast<int32_t>(manifest.layers());
       layer = layer.next()) {
    for (const bool keys : {true, false}) {
      std::string& tensor = bytes.emplace_back();
      for (KvHead head(0); head.value() < static_cast<int32_t>(manifest.kv_heads());
           head = head.next()) {
        ASSIGN_OR_RETURN(const kvstore::Rows rows,
                         keys ? kvstore::Rows::OpenKeys(*stored, layer, head)
                              : kvstore::Rows::OpenValues(*stored, layer, head));
        const RowRange all{0, rows.count()};
        RETURN_IF_ERROR(rows.Verify(all));
        rows.ForEachPiece(all, [&](Position, const void* address, int64_t count) {
          tensor.append(static_cast<const char*>(address),
                        static_cast<size_t>(count * rows.row_bytes()));
        });
      }
      tensors.push_back(
          {absl::StrCat(keys ? "k." : "v.", layer.value()),
           {DType::kBf16, {manifest.kv_heads(), manifest.tokens(), manifest.head_dim()}, {}}});
    }
  }
  for (size_t i = 0; i < tensors.size(); ++i) tensors[i].view.bytes = bytes[i];
  return model::WriteSafetensors(flags.rows, tensors);
}

absl::Status RunInspect(const ContextsFlags& flags) {
  RETURN_IF_ERROR(flags.store.Validate());
  if (!flags.rows.empty() && flags.store.folder.empty()) {
    return absl::InvalidArgumentError("--rows reads the stored rows and needs --store");
  }
  ASSIGN_OR_RETURN(const ConnectedStore at, flags.store.Connect(kvstore::StoreMode::kReadOnly));
  ASSIGN_OR_RETURN(const v1::Manifest manifest, at.client->Get(flags.name));
  RETURN_IF_ERROR(kvstore::CheckContentId(flags.content_id, manifest));
  if (flags.plan) {
    ASSIGN_OR_RETURN(const decoder::Plan plan, PlanOf(flags.planned, flags.store, flags.name));
    return Report(flags.json, PlanJson(plan), decoder::PlanTable(plan));
  }
  if (!flags.rows.empty()) RETURN_IF_ERROR(DumpRows(flags));
  if (flags.json) {
    PrintJson(ManifestJson(manifest));
  } else {
    PrintManifest(manifest);
  }
  return absl::OkStatus();
}

absl::Status RunRm(const ContextsFlags& flags) {
  nlohmann::json json = {{"removed", flags.name}};
  std::string text = absl::StrCat("removed ", flags.name);
  if (kvstore::BucketAddress::IsOne(flags.store.folder)) {
    ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Bucket> bucket,
                     flags.bucket.Open(flags.store.folder));
    ASSIGN_OR_RETURN(const kvstore::Removed removed, kvstore::RemoveContext(*bucket, flags.name));
    json["content_id"] = removed.content_id;
    json["files_stay"] = removed.files_stay;
    if (removed.files_stay) text += "; somebody pushes it: its files stay until carrel gc";
  } else {
    RETURN_IF_ERROR(flags.bucket.RefuseWithoutBucket());
    ASSIGN_OR_RETURN(const ConnectedStore at, flags.store.Connect(kvstore::StoreMode::kReadWrite));
    RETURN_IF_ERROR(at.client->Delete(flags.name));
  }
  return Report(flags.json, json, text + "\n");
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
