// carrel verify | upgrade
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "carrel/v1/context.pb.h"
#include "common/json.h"
#include "common/progress.h"
#include "common/status.h"
#include "kvstore/remote/bucket.h"
#include "kvstore/service/context_client.h"
#include "kvstore/storage/store.h"
#include "tools/carrel/bucket_contexts.h"
#include "tools/carrel/bucket_flags.h"
#include "tools/carrel/commands.h"
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

nlohmann::json VerifiedJson(const std::string& name, const v1::VerifyResponse& verified) {
  nlohmann::json errors = nlohmann::json::array();
  for (const std::string& error : verified.errors()) errors.push_back(error);
  return {{"name", name},
          {"content_id", verified.content_id()},
          {"segments", verified.segments()},
          {"bytes", verified.bytes()},
          {"error_count", verified.error_count()},
          {"errors", errors}};
}

void PrintVerified(const std::string& name, const v1::VerifyResponse& verified) {
  std::printf("%-24s %s  %lld segments, %s read", name.c_str(),
              verified.error_count() == 0 ? "right  " : "DAMAGED",
              static_cast<long long>(verified.segments()), FormatBytes(verified.bytes()).c_str());
  if (verified.content_id().empty()) std::printf(", unbound");
  std::printf("\n");
  for (const std::string& error : verified.errors()) std::printf("  %s\n", error.c_str());
  const auto shown = static_cast<int64_t>(verified.errors_size());
  if (verified.error_count() > shown) {
    std::printf("  and %lld more\n", static_cast<long long>(verified.error_count() - shown));
  }
}

absl::Status RunVerify(const VerifyFlags& flags) {
  if (kvstore::BucketAddress::IsOne(flags.store.folder)) {
    return VerifyInBucket(flags.bucket, flags.store.folder, flags.name, flags.deep, flags.json);
  }
  RETURN_IF_ERROR(flags.bucket.RefuseWithoutBucket());
  RETURN_IF_ERROR(flags.store.Validate());
  ASSIGN_OR_RETURN(const std::unique_ptr<library::StoreAccess> store,
                   library::StoreAccess::Open(flags.store, kvstore::StoreMode::kReadOnly));
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::ContextClient> client, store->NewContextClient());
  std::vector<std::string> names;
  int64_t damaged = 0;
  nlohmann::json contexts = nlohmann::json::array(), unreadable = nlohmann::json::array();
  if (flags.name.empty()) {
    ASSIGN_OR_RETURN(const v1::ListResponse list, client->List());
    for (const auto& context : list.contexts()) names.push_back(context.name());
    for (const std::string& why : list.unreadable()) {
      ++damaged;
      unreadable.push_back(why);
      if (!flags.json) std::printf("cannot be read: %s\n", why.c_str());
    }
  } else {
    names.push_back(flags.name);
  }
  for (const std::string& name : names) {
    absl::StatusOr<v1::VerifyResponse> verified = client->Verify(name, flags.deep);
    if (absl::IsDataLoss(verified.status())) {  // so damaged that it cannot be opened
      const std::string why(verified.status().message());
      verified = v1::VerifyResponse();
      verified->set_error_count(1);
      verified->add_errors(why);
    }
    RETURN_IF_ERROR(verified.status());
    damaged += verified->error_count() > 0 ? 1 : 0;
    if (flags.json) {
      contexts.push_back(VerifiedJson(name, *verified));
    } else {
      PrintVerified(name, *verified);
    }
  }
  if (flags.json) {
    std::printf("%s\n", DumpJson(nlohmann::json{{"deep", flags.deep},
                                                {"contexts", contexts},
                                                {"unreadable", unreadable},
                                                {"damaged", damaged}})
                            .c_str());
  }
  if (damaged == 0) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("verify: ", damaged, " contexts are damaged"));
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
    for (const absl::Status& why : unreadable) {
      std::fprintf(stderr, "cannot be read: %s\n", std::string(why.message()).c_str());
    }
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
      if (!first.ok()) std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
      first.Update(status);
      continue;
    }
    ASSIGN_OR_RETURN(const v1::Manifest manifest, store->GetManifest(name));
    upgraded.push_back({{"name", name}, {"content_id", manifest.content_id()}});
    if (!flags.json) {
      std::printf("%s: content id %s\n", name.c_str(), manifest.content_id().c_str());
    }
  }
  if (flags.json) std::printf("%s\n", DumpJson(nlohmann::json{{"upgraded", upgraded}}).c_str());
  if (!flags.json && names.empty()) std::printf("nothing to upgrade\n");
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
