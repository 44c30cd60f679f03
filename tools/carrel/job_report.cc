#include "tools/carrel/job_report.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/json.h"
#include "common/progress.h"
#include "common/shown.h"

namespace carrel::tools {

nlohmann::json JsonOfJob(const serving::JobStatus& status) {
  const serving::JobRecord& record = status.record;
  nlohmann::json json = {{"id", record.id},
                         {"name", record.name},
                         {"model", record.model},
                         {"index", record.index},
                         {"state", serving::NameOf(status.state)},
                         {"priority", record.priority},
                         {"attempt", record.attempt},
                         {"owner", record.owner},
                         {"document_bytes", record.document_bytes},
                         {"submitted_unix_s", absl::ToUnixSeconds(record.submitted)},
                         {"reason", status.reason()}};
  if (status.ended()) {
    json["ended_unix_s"] = absl::ToUnixSeconds(status.end.ended);
    json["tries"] = status.end.tries;
    json["worker"] = status.end.worker;
  } else {
    json["tries"] = status.lease.tries;
    json["worker"] = status.lease.worker;
    json["progress"] = status.lease.progress;
    json["where"] = status.lease.where;
  }
  if (status.state == serving::JobState::kDone) {
    json["content_id"] = status.end.content_id;
    json["bytes"] = status.end.bytes;
    json["tokens"] = status.end.tokens;
  }
  return json;
}

std::string LineOfJob(const serving::JobStatus& status) {
  std::string what = Shown(status.reason(), 60);
  if (status.state == serving::JobState::kRunning) {
    what = absl::StrFormat("%.0f%% %s", 100 * status.lease.progress, Shown(status.lease.where, 60));
  } else if (status.state == serving::JobState::kDone) {
    what = absl::StrCat(status.end.tokens, " tokens, ", FormatBytes(status.end.bytes));
  }
  return absl::StrFormat("%s  %-9s %d  %-24s %-16s %s", status.record.id.substr(0, 12),
                         serving::NameOf(status.state), status.record.priority, status.record.name,
                         Shown(status.record.model, 40), what);
}

std::string DescribeJob(const serving::JobStatus& status) {
  const serving::JobRecord& record = status.record;
  const auto date = [](absl::Time time) {
    return absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", time, absl::UTCTimeZone());
  };
  std::string text = absl::StrCat(
      record.name, ": ", serving::NameOf(status.state), "\njob ", record.id, ", attempt ",
      record.attempt, "\nmodel ", Shown(record.model), ", index ", record.index, ", document of ",
      FormatBytes(record.document_bytes), ", priority ", record.priority,
      record.owner.empty() ? "" : absl::StrCat(", of ", Shown(record.owner)), "\nsubmitted ",
      date(record.submitted));
  if (status.state == serving::JobState::kRunning) {
    absl::StrAppend(&text, absl::StrFormat("\nat %.0f%% (%s), try %d, worker %s",
                                           100 * status.lease.progress, Shown(status.lease.where),
                                           status.lease.tries, Shown(status.lease.worker)));
  } else if (!status.ended() && status.lease.tries > 0) {
    absl::StrAppend(&text, "\n", status.lease.tries, " of ", serving::kMostTries,
                    " tries ended without a context");
  }
  if (status.ended()) absl::StrAppend(&text, "\nended ", date(status.end.ended));
  if (status.state == serving::JobState::kDone) {
    absl::StrAppend(&text, "\n", status.end.tokens, " tokens, ", FormatBytes(status.end.bytes),
                    ", content id ", status.end.content_id);
  }
  if (!status.reason().empty()) absl::StrAppend(&text, "\n", Shown(status.reason(), 1000));
  return text;
}

}  // namespace carrel::tools
