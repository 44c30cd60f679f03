#include "tools/carrel/bucket_contexts.h"

#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/json.h"
#include "common/progress.h"
#include "common/status.h"
#include "kvstore/remote/sweep.h"
#include "kvstore/remote/verify.h"

namespace carrel::tools {

absl::Status ListInBucket(const BucketFlags& flags, const std::string& uri, bool json) {
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Bucket> bucket, flags.Open(uri));
  std::vector<absl::Status> unreadable;
  ASSIGN_OR_RETURN(const std::vector<kvstore::BoundName> names, bucket->ListNames(&unreadable));
  nlohmann::json contexts = nlohmann::json::array(), damaged = nlohmann::json::array();
  for (const absl::Status& status : unreadable) damaged.push_back(status.message());
  if (!json) std::printf("%-24s %10s %10s  %s\n", "NAME", "TOKENS", "SIZE", "CONTENT ID");
  for (const kvstore::BoundName& name : names) {
    if (json) {
      contexts.push_back({{"name", name.name},
                          {"content_id", name.content_id},
                          {"context_id", name.context_id},
                          {"tokens", name.tokens},
                          {"files", name.files},
                          {"bytes", name.bytes}});
      continue;
    }
    std::printf("%-24s %10lld %10s  %s\n", name.name.c_str(), static_cast<long long>(name.tokens),
                FormatBytes(name.bytes).c_str(), name.content_id.substr(0, 12).c_str());
  }
  if (json) {
    std::printf("%s\n",
                DumpJson(nlohmann::json{{"contexts", contexts}, {"unreadable", damaged}}).c_str());
  }
  for (const absl::Status& status : unreadable) {
    std::fprintf(stderr, "cannot be read: %s\n", std::string(status.message()).c_str());
  }
  return absl::OkStatus();
}

absl::Status RemoveInBucket(const BucketFlags& flags, const std::string& uri,
                            const std::string& name, bool json) {
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Bucket> bucket, flags.Open(uri));
  ASSIGN_OR_RETURN(const kvstore::Removed removed, kvstore::RemoveContext(*bucket, name));
  if (json) {
    std::printf("%s\n", DumpJson(nlohmann::json{{"removed", name},
                                                {"content_id", removed.content_id},
                                                {"files_stay", removed.files_stay}})
                            .c_str());
  } else {
    std::printf("removed %s%s\n", name.c_str(),
                removed.files_stay ? "; somebody pushes it: its files stay until carrel gc" : "");
  }
  return absl::OkStatus();
}

absl::Status VerifyInBucket(const BucketFlags& flags, const std::string& uri,
                            const std::string& name, bool deep, bool json) {
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Bucket> bucket, flags.Open(uri));
  std::vector<std::string> names;
  int64_t damaged = 0;
  nlohmann::json contexts = nlohmann::json::array(), unreadable = nlohmann::json::array();
  if (name.empty()) {
    std::vector<absl::Status> cannot;
    ASSIGN_OR_RETURN(const std::vector<kvstore::BoundName> all, bucket->ListNames(&cannot));
    for (const kvstore::BoundName& bound : all) names.push_back(bound.name);
    for (const absl::Status& status : cannot) {
      ++damaged;
      unreadable.push_back(status.message());
      if (!json) std::printf("cannot be read: %s\n", std::string(status.message()).c_str());
    }
  } else {
    names.push_back(name);
  }
  Progress progress(json ? Progress::Mode::kQuiet : Progress::ModeFor(stderr));
  for (const std::string& each : names) {
    absl::StatusOr<kvstore::Verified> verified = kvstore::VerifyInBucket(
        *bucket, each, deep, [&](double share) { progress.Update(share, each); });
    progress.Clear();
    if (name.empty() && absl::IsNotFound(verified.status())) continue;  // removed meanwhile
    RETURN_IF_ERROR(verified.status());
    damaged += verified->errors.empty() ? 0 : 1;
    if (json) {
      contexts.push_back({{"name", each},
                          {"content_id", verified->content_id},
                          {"files", verified->files},
                          {"bytes", verified->bytes_read},
                          {"errors", verified->errors}});
      continue;
    }
    std::printf("%-24s %s  %lld files, %s read\n", each.c_str(),
                verified->errors.empty() ? "right  " : "DAMAGED",
                static_cast<long long>(verified->files), FormatBytes(verified->bytes_read).c_str());
    for (const std::string& error : verified->errors) std::printf("  %s\n", error.c_str());
  }
  if (json) {
    std::printf("%s\n", DumpJson(nlohmann::json{{"deep", deep},
                                                {"contexts", contexts},
                                                {"unreadable", unreadable},
                                                {"damaged", damaged}})
                            .c_str());
  }
  if (damaged == 0) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("verify: ", damaged, " contexts are damaged"));
}

}  // namespace carrel::tools
