// carrel verify | upgrade
#include <CLI/CLI.hpp>
#include <cstdio>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "carrel/v1/context.pb.h"
#include "common/progress.h"
#include "common/status.h"
#include "kvstore/remote/bucket.h"
#include "kvstore/remote/verify.h"
#include "kvstore/service/context_client.h"
#include "kvstore/storage/store.h"
#include "tools/carrel/bucket_flags.h"
#include "tools/carrel/commands.h"
#include "tools/carrel/json_report.h"
#include "tools/carrel/known_names.h"
#include "tools/carrel/store_flags.h"

namespace carrel::tools {
namespace {

struct VerifyFlags {
  StoreFlags store;
  BucketFlags bucket;
  std::string name;  // empty: every context
  bool deep = false;
  bool json = false;
};

// What came of one context.
struct Outcome {
  nlohmann::json json;
  std::string looked_at;  // "3 segments, 1.5 MiB read"
  std::vector<std::string> errors;
  int64_t error_count = 0;  // errors are the first of them
};

// Of a store, or of a bucket.
struct Verifier {
  std::vector<std::string> names, unreadable;  // of all contexts
  // None: the context was removed meanwhile.
  std::function<absl::StatusOr<std::optional<Outcome>>(const std::string& name)> verify;
};

absl::Status VerifyEach(const VerifyFlags& flags, const Verifier& verifier) {
  int64_t damaged = std::ssize(verifier.unreadable);
  nlohmann::json contexts = nlohmann::json::array();
  for (const std::string& why : verifier.unreadable) {
    if (!flags.json) absl::PrintF("cannot be read: %s\n", why);
  }
  for (const std::string& name : verifier.names) {
    ASSIGN_OR_RETURN(std::optional<Outcome> outcome, verifier.verify(name));
    if (!outcome.has_value()) continue;
    damaged += outcome->error_count > 0 ? 1 : 0;
    outcome->json["name"] = name;
    contexts.push_back(std::move(outcome->json));
    if (flags.json) continue;
    absl::PrintF("%-24s %s  %s\n", name, outcome->error_count == 0 ? "right  " : "DAMAGED",
                 outcome->looked_at);
    for (const std::string& error : outcome->errors) absl::PrintF("  %s\n", error);
    const int64_t more = outcome->error_count - std::ssize(outcome->errors);
    if (more > 0) absl::PrintF("  and %d more\n", more);
  }
  if (flags.json) {
    PrintJson({{"deep", flags.deep},
               {"contexts", contexts},
               {"unreadable", verifier.unreadable},
               {"damaged", damaged}});
  }
  if (damaged == 0) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("verify: ", damaged, " contexts are damaged"));
}

absl::Status VerifyInBucket(const VerifyFlags& flags) {
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Bucket> bucket,
                   flags.bucket.Open(flags.store.folder));
  Verifier verifier;
  const bool all = flags.name.empty();
  if (all) {
    std::vector<absl::Status> cannot;
    ASSIGN_OR_RETURN(const std::vector<kvstore::BoundName> names, bucket->ListNames(&cannot));
    for (const kvstore::BoundName& bound : names) verifier.names.push_back(bound.name);
    for (const absl::Status& why : cannot) verifier.unreadable.emplace_back(why.message());
  } else {
    verifier.names.push_back(flags.name);
  }
  Progress progress(flags.json ? Progress::Mode::kQuiet : Progress::ModeFor(stderr));
  verifier.verify = [&](const std::string& name) -> absl::StatusOr<std::optional<Outcome>> {
    absl::StatusOr<kvstore::Verified> verified = kvstore::VerifyInBucket(
        *bucket, name, flags.deep, [&](double share) { progress.Update(share, name); });
    progress.Clear();
    if (all && absl::IsNotFound(verified.status())) return std::nullopt;
    RETURN_IF_ERROR(verified.status());
    return Outcome{
        {{"content_id", verified->content_id},
         {"files", verified->files},
         {"bytes", verified->bytes_read},
         {"errors", verified->errors}},
        absl::StrCat(verified->files, " files, ", FormatBytes(verified->bytes_read), " read"),
        verified->errors,
        std::ssize(verified->errors)};
  };
  return VerifyEach(flags, verifier);
}

absl::Status RunVerify(const VerifyFlags& flags) {
  if (kvstore::BucketAddress::IsOne(flags.store.folder)) return VerifyInBucket(flags);
  RETURN_IF_ERROR(flags.bucket.RefuseWithoutBucket());
  ASSIGN_OR_RETURN(const ConnectedStore at, flags.store.Connect(kvstore::StoreMode::kReadOnly));
  Verifier verifier;
  if (flags.name.empty()) {
    ASSIGN_OR_RETURN(const v1::ListResponse list, at.client->List());
    for (const auto& context : list.contexts()) verifier.names.push_back(context.name());
    verifier.unreadable.assign(list.unreadable().begin(), list.unreadable().end());
  } else {
    verifier.names.push_back(flags.name);
  }
  verifier.verify = [&](const std::string& name) -> absl::StatusOr<std::optional<Outcome>> {
    absl::StatusOr<v1::VerifyResponse> verified = at.client->Verify(name, flags.deep);
    if (absl::IsDataLoss(verified.status())) {  // so damaged that it cannot be opened
      const std::string why(verified.status().message());
      verified = v1::VerifyResponse();
      verified->set_error_count(1);
      verified->add_errors(why);
    }
    RETURN_IF_ERROR(verified.status());
    return Outcome{JsonOf(*verified),
                   absl::StrCat(verified->segments(), " segments, ", FormatBytes(verified->bytes()),
                                " read", verified->content_id().empty() ? ", unbound" : ""),
                   {verified->errors().begin(), verified->errors().end()},
                   verified->error_count()};
  };
  return VerifyEach(flags, verifier);
}

struct UpgradeFlags {
  std::string folder;
  std::string name;  // empty: every context that is of an older format
  bool quiet = false;
  bool json = false;
};

absl::Status RunUpgrade(const UpgradeFlags& flags) {
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Store> store,
                   kvstore::Store::Open(flags.folder, kvstore::StoreMode::kReadWrite));
  std::vector<std::string> names;
  if (flags.name.empty()) {
    std::vector<absl::Status> unreadable;
    ASSIGN_OR_RETURN(const std::vector<v1::Manifest> all, store->List(&unreadable));
    for (const v1::Manifest& manifest : all) {
      if (manifest.content_id().empty()) names.push_back(manifest.name());
    }
    TellUnreadable(unreadable);
  } else {
    names.push_back(flags.name);
  }
  Progress progress(flags.quiet ? Progress::Mode::kQuiet : Progress::ModeFor(stderr));
  nlohmann::json upgraded = nlohmann::json::array();
  absl::Status first;
  for (const std::string& name : names) {
    const absl::Status status =
        store->Upgrade(name, [&](double share) { progress.Update(share, name); });
    progress.Clear();
    if (!status.ok()) {  // the others are upgraded all the same
      if (!first.ok()) absl::FPrintF(stderr, "%s\n", status.message());
      first.Update(status);
      continue;
    }
    ASSIGN_OR_RETURN(const v1::Manifest manifest, store->GetManifest(name));
    upgraded.push_back({{"name", name}, {"content_id", manifest.content_id()}});
    if (!flags.json) absl::PrintF("%s: content id %s\n", name, manifest.content_id());
  }
  if (flags.json) PrintJson({{"upgraded", upgraded}});
  if (!flags.json && names.empty()) absl::PrintF("nothing to upgrade\n");
  return first;
}

}  // namespace

void AddVerify(CLI::App& app, Run& chosen) {
  auto flags = std::make_shared<VerifyFlags>();
  CLI::App& command = *app.add_subcommand(
      "verify", "Check contexts against their manifests: every key, footer and digest");
  command.add_option("NAME", flags->name, "the context; without one all of them");
  flags->store.Declare(command);
  command.add_flag("--deep", flags->deep,
                   "also every byte of rows, indexes and summaries, and that these open");
  flags->bucket.DeclareForStore(command);
  command.add_flag("--json", flags->json, "one JSON object");
  command.callback([flags, &chosen] {
    chosen = [flags] { return WithNames(RunVerify(*flags), flags->store, flags->name); };
  });
}

void AddUpgrade(CLI::App& app, Run& chosen) {
  auto flags = std::make_shared<UpgradeFlags>();
  CLI::App& command = *app.add_subcommand(
      "upgrade",
      "Rewrite contexts of an older format in this one, without the model: they get a content id "
      "and are bound to their files as these are now");
  command.add_option("NAME", flags->name, "the context; without one all that are of an older one");
  command.add_option("--store", flags->folder, "folder of the store")->required();
  command.add_flag("--quiet", flags->quiet, "no progress");
  command.add_flag("--json", flags->json, "one JSON object");
  command.callback([flags, &chosen] { chosen = [flags] { return RunUpgrade(*flags); }; });
}

}  // namespace carrel::tools
