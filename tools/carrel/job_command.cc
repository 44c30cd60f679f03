// carrel job submit | status | list | cancel
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/progress.h"
#include "common/shown.h"
#include "common/status.h"
#include "kvstore/format/context_name.h"
#include "serving/jobs/job_board.h"
#include "tools/carrel/commands.h"
#include "tools/carrel/given_files.h"
#include "tools/carrel/job_flags.h"
#include "tools/carrel/json_report.h"
#include "tools/carrel/retrieval_flags.h"

namespace carrel::tools {
namespace {

constexpr absl::Duration kLookEvery = absl::Seconds(1);
// A person waits for an answer.
constexpr kvstore::RetryPolicy kPatience = {.attempts = 8,
                                            .first = absl::Milliseconds(100),
                                            .most = absl::Seconds(2),
                                            .deadline = absl::Seconds(20)};

struct SubmitFlags {
  JobFlags jobs;
  serving::JobRecord record;
  std::string input, missing_bytes = "refuse";
  bool wait = false, quiet = false, json = false;
};

struct LookFlags {
  JobFlags jobs;
  std::string what;
  bool all = false, wait = false, quiet = false, json = false;
};

// Until the job has ended. Error: it has no context.
absl::StatusOr<serving::JobStatus> WaitFor(serving::JobBoard& board, const std::string& id,
                                           bool quiet) {
  Progress progress(quiet ? Progress::Mode::kQuiet : Progress::ModeFor(stderr));
  for (;;) {
    ASSIGN_OR_RETURN(const serving::JobStatus status, board.Get(id));
    if (status.ended()) return status;
    const bool running = status.state == serving::JobState::kRunning;
    progress.Update(status.lease.progress,
                    running ? absl::StrCat(status.record.name, ": ", Shown(status.lease.where))
                            : absl::StrCat(status.record.name, ": waits for a worker"));
    absl::SleepFor(kLookEvery);
  }
}

absl::Status ErrorOf(const serving::JobStatus& status) {
  const std::string job =
      absl::StrCat("job ", status.record.id, " of \"", status.record.name, "\"");
  if (status.state == serving::JobState::kDead) {
    return absl::AbortedError(
        absl::StrCat(job, " was given up after ", status.end.tries, " tries: ", status.reason()));
  }
  if (status.state == serving::JobState::kCancelled) {
    return absl::CancelledError(absl::StrCat(job, " was cancelled: ", status.reason()));
  }
  return absl::OkStatus();
}

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

// A line of a list.
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

// All that is known, a few lines.
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

void Print(const serving::JobStatus& status, bool json) {
  (void)Report(json, JsonOfJob(status), DescribeJob(status) + "\n");
}

absl::Status RunSubmit(SubmitFlags& flags) {
  RETURN_IF_ERROR(flags.jobs.Validate());
  RETURN_IF_ERROR(kvstore::ValidateContextName(flags.record.name));
  if (flags.missing_bytes != "refuse" && flags.missing_bytes != "drop") {
    return absl::InvalidArgumentError(
        absl::StrCat("missing-bytes=", Shown(flags.missing_bytes), " is none of refuse, drop"));
  }
  flags.record.drop_missing = flags.missing_bytes == "drop";
  ASSIGN_OR_RETURN(const std::string text,
                   ReadDocumentFile(flags.input, "carrel job submit --input -"));
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Bucket> bucket, flags.jobs.Open(kPatience));
  ASSIGN_OR_RETURN(const std::unique_ptr<serving::Doorbell> doorbell,
                   flags.jobs.Doorbell(/*listen=*/false));
  serving::JobBoard board(*bucket);
  ASSIGN_OR_RETURN(const serving::JobBoard::Submitted submitted, board.Submit(flags.record, text));
  if (const absl::Status rung = doorbell->Ring(); !rung.ok()) {
    absl::FPrintF(stderr, "carrel: workers find the job when they look next: %s\n", rung.message());
  }
  if (!flags.wait) {
    Print(submitted.status, flags.json);
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const serving::JobStatus ended,
                   WaitFor(board, submitted.status.record.id, flags.quiet));
  Print(ended, flags.json);
  return ErrorOf(ended);
}

absl::StatusOr<std::unique_ptr<kvstore::Bucket>> OpenBucket(const LookFlags& flags) {
  RETURN_IF_ERROR(flags.jobs.Validate());
  return flags.jobs.Open(kPatience);
}

absl::Status RunStatus(const LookFlags& flags) {
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Bucket> bucket, OpenBucket(flags));
  serving::JobBoard board(*bucket);
  ASSIGN_OR_RETURN(serving::JobStatus status, board.Find(flags.what));
  if (flags.wait) {
    ASSIGN_OR_RETURN(status, WaitFor(board, status.record.id, flags.quiet));
  }
  Print(status, flags.json);
  return flags.wait ? ErrorOf(status) : absl::OkStatus();
}

absl::Status RunCancel(const LookFlags& flags) {
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Bucket> bucket, OpenBucket(flags));
  serving::JobBoard board(*bucket);
  ASSIGN_OR_RETURN(const serving::JobStatus found, board.Find(flags.what));
  ASSIGN_OR_RETURN(const serving::JobStatus status,
                   board.Cancel(found.record.id, "cancelled by carrel job cancel"));
  Print(status, flags.json);
  if (status.state == serving::JobState::kCancelled) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "job ", status.record.id, " is ", serving::NameOf(status.state), " already",
      status.state == serving::JobState::kDone ? ": carrel rm removes its context" : ""));
}

absl::Status RunList(const LookFlags& flags) {
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Bucket> bucket, OpenBucket(flags));
  serving::JobBoard board(*bucket);
  std::vector<serving::BadJob> bad;
  std::vector<absl::Status> unreadable;
  std::vector<serving::JobStatus> jobs;
  ASSIGN_OR_RETURN(const std::vector<serving::OpenJob> open, board.Open(&bad));
  for (const serving::OpenJob& job : open) jobs.push_back(job.status);
  if (flags.all) {
    ASSIGN_OR_RETURN(std::vector<serving::JobStatus> ended, board.Ended(&unreadable));
    std::sort(ended.begin(), ended.end(),
              [](const auto& a, const auto& b) { return a.end.ended > b.end.ended; });
    jobs.insert(jobs.end(), ended.begin(), ended.end());
  }
  for (const serving::BadJob& one : bad) unreadable.push_back(one.error);
  if (flags.json) {
    nlohmann::json list = nlohmann::json::array(), damaged = nlohmann::json::array();
    for (const serving::JobStatus& job : jobs) list.push_back(JsonOfJob(job));
    for (const absl::Status& status : unreadable) damaged.push_back(status.message());
    PrintJson({{"jobs", list}, {"unreadable", damaged}});
    return absl::OkStatus();
  }
  for (const serving::JobStatus& job : jobs) absl::PrintF("%s\n", LineOfJob(job));
  TellUnreadable(unreadable);
  return absl::OkStatus();
}

void DeclareSubmit(CLI::App& job, Run& chosen) {
  auto flags = std::make_shared<SubmitFlags>();
  CLI::App& command = *job.add_subcommand("submit", "Leave a document for a worker to prefill");
  flags->jobs.Declare(command);
  command.add_option("--input", flags->input, "text file; -: standard input")->required();
  command.add_option("--name", flags->record.name, "name of the new context")->required();
  command
      .add_option("--model", flags->record.model,
                  "the model that reads it, as workers call it: its file's or folder's name")
      ->required();
  command.add_option("--index", flags->record.index, "flat | int8 | code | auto")
      ->check(CLI::IsMember({"flat", "int8", "code", "auto"}));
  command.add_flag("--raw", flags->record.raw,
                   "the text as it is, not inside the first turn of the model's chat template");
  DeclareMissingBytes(command, flags->missing_bytes);
  command
      .add_option("--priority", flags->record.priority,
                  "0 to 9: jobs of a higher one are taken first, of one the oldest")
      ->check(CLI::Range(serving::kLowestPriority, serving::kHighestPriority));
  command.add_flag("--wait", flags->wait, "until it has ended; exit code 1 if it has no context");
  command.add_flag("--quiet", flags->quiet, "no progress");
  command.add_flag("--json", flags->json, "one JSON object");
  command.callback([flags, &chosen] { chosen = [flags] { return RunSubmit(*flags); }; });
}

std::shared_ptr<LookFlags> DeclareLook(CLI::App& command) {
  auto flags = std::make_shared<LookFlags>();
  flags->jobs.remote.clear();
  command.add_option("--remote", flags->jobs.remote, "s3://BUCKET/PREFIX: where jobs are");
  flags->jobs.bucket.Declare(command);
  command.add_flag("--json", flags->json, "one JSON object");
  return flags;
}

}  // namespace

void AddJob(CLI::App& app, Run& chosen) {
  CLI::App& job = *app.add_subcommand("job", "Documents that wait in a bucket for carrel worker");
  job.require_subcommand(1);
  DeclareSubmit(job, chosen);
  constexpr char kWhat[] = "a job's id, the first 8 digits of it, or a context's name";
  CLI::App& status = *job.add_subcommand("status", "How a job stands, or how it ended");
  const auto looked = DeclareLook(status);
  status.add_option("job", looked->what, kWhat)->required();
  status.add_flag("--wait", looked->wait, "until it has ended; exit code 1 if it has no context");
  status.add_flag("--quiet", looked->quiet, "no progress");
  status.callback([looked, &chosen] { chosen = [looked] { return RunStatus(*looked); }; });
  CLI::App& list = *job.add_subcommand("list", "Jobs in the order in which they are taken");
  const auto listed = DeclareLook(list);
  list.add_flag("--all", listed->all, "also those that ended, the last one first");
  list.callback([listed, &chosen] { chosen = [listed] { return RunList(*listed); }; });
  CLI::App& cancel = *job.add_subcommand("cancel", "End a job that has not ended");
  const auto cancelled = DeclareLook(cancel);
  cancel.add_option("job", cancelled->what, kWhat)->required();
  cancel.callback([cancelled, &chosen] { chosen = [cancelled] { return RunCancel(*cancelled); }; });
}

}  // namespace carrel::tools
