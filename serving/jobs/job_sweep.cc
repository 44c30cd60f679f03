#include "serving/jobs/job_sweep.h"

#include <map>
#include <set>
#include <string>

#include "absl/strings/string_view.h"
#include "common/status.h"

namespace carrel::serving {
namespace {

// An end goes last: until then the job is known to have ended.
constexpr const char* kFolders[] = {"dead", "documents", "leases", "records", "results"};

}  // namespace

absl::StatusOr<SweptJobs> SweepJobs(const JobBoard& board, absl::Duration grace, bool dry_run) {
  kvstore::S3Client& client = board.bucket().client();
  // The queue first: what is put there later has a record that is young.
  std::set<std::string> waiting;
  RETURN_IF_ERROR(client.ForEach(board.Key("queue", ""), [&](const kvstore::ListedObject& object) {
    constexpr size_t kDigits = 64;
    if (object.key.size() > kDigits) {
      waiting.insert(object.key.substr(object.key.size() - kDigits));
    }
    return absl::OkStatus();
  }));
  std::map<std::string, std::map<std::string, absl::Time>> objects;  // by folder, then id
  for (const char* folder : kFolders) {
    const std::string prefix = board.Key(folder, "");
    RETURN_IF_ERROR(client.ForEach(prefix, [&](const kvstore::ListedObject& object) {
      objects[folder][object.key.substr(prefix.size())] = object.modified;
      return absl::OkStatus();
    }));
  }
  const absl::Time old = client.ServerNow() - grace;
  const std::map<std::string, absl::Time>& results = objects["results"];
  SweptJobs swept;
  for (const auto& [id, when] : results) {
    swept.ended += when <= old && !waiting.contains(id) ? 1 : 0;
  }
  for (const char* folder : kFolders) {
    for (const auto& [id, when] : objects[folder]) {
      const auto end = results.find(id);
      if (waiting.contains(id) || when > old) continue;
      if (end != results.end() && end->second > old) continue;
      if (end == results.end()) ++swept.leftovers;
      if (!dry_run) RETURN_IF_ERROR(client.Remove(board.Key(folder, id)));
    }
  }
  return swept;
}

}  // namespace carrel::serving
