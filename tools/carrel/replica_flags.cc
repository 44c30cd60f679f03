#include "tools/carrel/replica_flags.h"

#include <CLI/CLI.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
#include "kvstore/engine/engine.h"
#include "kvstore/format/context_name.h"
#include "kvstore/replica/cache_folder.h"

namespace carrel::tools {

void ReplicaFlags::Declare(CLI::App& command) {
  command.add_option(
      "--remote", remote,
      "s3://BUCKET/PREFIX: contexts are in a bucket, and come into --cache when they "
      "are first asked for; instead of --store");
  command.add_option("--cache", cache, "--remote: folder for contexts that came; of its own");
  command
      .add_option("--cache-bytes", cache_bytes,
                  "--remote: what they may take there, as bytes or 500GB; those that nobody opened "
                  "for longest go")
      ->transform(CLI::AsSizeValue(/*kb_is_1000=*/true))
      ->default_str("");
  command.add_option("--pulls", pulls, "--remote: contexts that come at a time")
      ->check(CLI::Range(1, 64));
  command
      .add_option(
          "--warm", warm,
          "--remote: a context that is to be here before this server says that it is ready; "
          "may be repeated")
      ->allow_extra_args(false);
  bucket.Declare(command);
}

absl::Status ReplicaFlags::Resolve(bool read_only, std::string& folder) const {
  if (!given()) {
    if (!cache.empty()) return absl::InvalidArgumentError("--cache is of --remote s3://..");
    if (!warm.empty()) return absl::InvalidArgumentError("--warm is of --remote s3://..");
    if (cache_bytes != 0) return absl::InvalidArgumentError("--cache-bytes is of --remote s3://..");
    return bucket.RefuseWithoutBucket();
  }
  RETURN_IF_ERROR(kvstore::BucketAddress::Parse(remote).status());
  if (!folder.empty()) {
    return absl::InvalidArgumentError(
        "--store and --remote: contexts lie in one or come from the "
        "other; give one");
  }
  if (cache.empty()) return absl::InvalidArgumentError("--remote needs --cache FOLDER");
  if (cache_bytes <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--remote needs --cache-bytes above 0, not ", cache_bytes));
  }
  if (read_only) {
    return absl::InvalidArgumentError("--read-only with --remote: what comes must be written");
  }
  for (const std::string& name : warm) {
    RETURN_IF_ERROR(Annotate(kvstore::ValidateContextName(name), "--warm"));
  }
  folder = cache;
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<kvstore::Residence>> ReplicaFlags::Start(
    kvstore::Engine& engine, const kvstore::ResidenceTarget* target) const {
  if (!given()) return nullptr;
  RETURN_IF_ERROR(kvstore::ClaimCacheFolder(cache, remote, engine.store()));
  kvstore::ResidenceConfig config;
  config.stop = std::make_shared<std::atomic<bool>>(false);
  ASSIGN_OR_RETURN(std::unique_ptr<kvstore::Bucket> names,
                   bucket.Open(remote, kSoon, config.stop.get()));
  ASSIGN_OR_RETURN(std::unique_ptr<kvstore::Bucket> files,
                   bucket.Open(remote, {}, config.stop.get()));
  config.cache_bytes = cache_bytes;
  config.pulls = pulls;
  return kvstore::Residence::Create(config, std::move(names), std::move(files),
                                    target != nullptr ? *target : kvstore::TargetOf(engine));
}

std::unique_ptr<kvstore::Warming> ReplicaFlags::StartWarming(kvstore::Residence* residence,
                                                             std::function<void()> ready) const {
  if (residence == nullptr || warm.empty()) return nullptr;
  return std::make_unique<kvstore::Warming>(*residence, warm, std::move(ready));
}

}  // namespace carrel::tools
