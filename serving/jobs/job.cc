#include "serving/jobs/job.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "common/checksum.h"
#include "common/json.h"
#include "common/shown.h"
#include "common/status.h"
#include "kvstore/format/context_name.h"

namespace carrel::serving {
namespace {

constexpr int64_t kVersion = 1;
constexpr size_t kLongestText = 2000;  // of a reason
constexpr size_t kLongestName = 128;   // of a model, a key, a worker
constexpr int64_t kMostBytes = int64_t{1} << 50;
constexpr int64_t kLastTime = int64_t{4102444800000};  // the year 2100, in milliseconds

const char* const kIndexes[] = {"flat", "int8", "code", "auto"};

bool IsHex(absl::string_view text, size_t digits) {
  return text.size() == digits && std::all_of(text.begin(), text.end(), [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
         });
}

// One object's fields, the first that is wrong kept as the error.
class Reader {
 public:
  Reader(const nlohmann::json& object) : fields_("", object) {}

  std::string Text(const char* name, size_t most, bool needed) {
    const absl::StatusOr<std::string> value =
        needed ? fields_.String(name) : fields_.StringOr(name, "");
    status_.Update(value.status());
    if (value.ok() && value->size() > most) {
      status_.Update(absl::InvalidArgumentError(absl::StrCat(name, "=\"", Shown(*value, 40),
                                                             "\" has ", value->size(),
                                                             " bytes, must be at most ", most)));
      return "";
    }
    return value.ok() ? *value : "";
  }
  std::string Hex(const char* name, size_t digits, bool needed) {
    std::string value = Text(name, kLongestText, needed);
    if (!(value.empty() && !needed) && !IsHex(value, digits)) {
      status_.Update(absl::InvalidArgumentError(absl::StrCat(
          name, "=\"", Shown(value, 80), "\" must be ", digits, " digits of 0-9 a-f")));
    }
    return value;
  }
  int64_t Int(const char* name, int64_t least, int64_t most) {
    const absl::StatusOr<int64_t> value = fields_.Int(name, least, most);
    status_.Update(value.status());
    return value.ok() ? *value : least;
  }
  double Share(const char* name) {
    const absl::StatusOr<double> value = fields_.NumberOr(name, 0, 0, 1);
    status_.Update(value.status());
    return value.ok() ? *value : 0;
  }
  bool Bool(const char* name) {
    const absl::StatusOr<bool> value = fields_.BoolOr(name, false);
    status_.Update(value.status());
    return value.ok() && *value;
  }
  absl::Time Time(const char* name) { return absl::FromUnixMillis(Int(name, 0, kLastTime)); }
  void Update(const absl::Status& status) { status_.Update(status); }
  const absl::Status& status() const { return status_; }

 private:
  const JsonFields fields_;
  absl::Status status_;
};

absl::Status Damaged(absl::string_view where, const absl::Status& status) {
  return absl::DataLossError(absl::StrCat(where, ": ", status.message()));
}

// The object, if it is of our version.
absl::StatusOr<nlohmann::json> ObjectOf(absl::string_view json, absl::string_view where) {
  constexpr JsonBounds kBounds{4, kMostJobObject, 100, true};
  absl::StatusOr<nlohmann::json> object = ParseJsonObject(json, "it", kBounds);
  if (!object.ok()) return Damaged(where, object.status());
  const int64_t version = JsonInt(JsonAt(*object, {"version"}), 0);
  if (version < 1) return Damaged(where, absl::DataLossError("it says no version"));
  if (version > kVersion) {
    return absl::FailedPreconditionError(absl::StrCat(where, ": it has version ", version,
                                                      ", this program reads version ", kVersion));
  }
  return object;
}

int64_t Millis(absl::Time time) {
  return std::clamp<int64_t>(absl::ToUnixMillis(time), 0, kLastTime);
}

}  // namespace

const char* NameOf(JobState state) {
  static constexpr const char* kNames[] = {"queued", "running", "done", "cancelled", "dead"};
  return kNames[static_cast<size_t>(state)];
}

bool IsJobId(absl::string_view text) { return IsHex(text, 64); }

std::string JobIdOf(const JobRecord& record) {
  const bool tokens = record.form == DocumentForm::kTokens;
  return Sha256Hex(DumpJson(nlohmann::json{
      "carrel job", kVersion, tokens ? "tokens" : "text", record.document_sha256,
      record.fingerprint.empty() ? record.model : record.fingerprint, record.fingerprint.empty(),
      record.raw, record.drop_missing, record.index, record.attempt}));
}

absl::Status JobRecord::Validate() const {
  RETURN_IF_ERROR(kvstore::ValidateContextName(name));
  const auto refuse = [](absl::string_view what) { return absl::InvalidArgumentError(what); };
  if (model.empty() || model.size() > kLongestName) {
    return refuse(
        absl::StrCat("model=\"", Shown(model, 40), "\" must have 1 to ", kLongestName, " bytes"));
  }
  if (std::find(std::begin(kIndexes), std::end(kIndexes), index) == std::end(kIndexes)) {
    return refuse(
        absl::StrCat("index=\"", Shown(index, 40), "\" must be flat, int8, code or auto"));
  }
  if (form == DocumentForm::kTokens && fingerprint.empty()) {
    return refuse("tokens are those of one model: the job needs its fingerprint");
  }
  if (form == DocumentForm::kTokens && (raw || drop_missing || document_bytes % 4 != 0)) {
    return refuse("raw and drop_missing are of a text, and tokens have 4 bytes each");
  }
  if (document_bytes < 1 || document_bytes > kMostDocumentBytes) {
    return refuse(absl::StrCat("the document has ", document_bytes, " bytes, must be 1 to ",
                               kMostDocumentBytes));
  }
  if (priority < kLowestPriority || priority > kHighestPriority) {
    return refuse(absl::StrCat("priority=", priority, " must be ", kLowestPriority, " to ",
                               kHighestPriority));
  }
  return absl::OkStatus();
}

std::string JobRecord::Encode() const {
  return DumpJson(nlohmann::json{{"version", kVersion},
                                 {"id", id},
                                 {"name", name},
                                 {"model", model},
                                 {"fingerprint", fingerprint},
                                 {"form", form == DocumentForm::kTokens ? "tokens" : "text"},
                                 {"document_sha256", document_sha256},
                                 {"document_bytes", document_bytes},
                                 {"raw", raw},
                                 {"drop_missing", drop_missing},
                                 {"index", index},
                                 {"priority", priority},
                                 {"attempt", attempt},
                                 {"owner", owner},
                                 {"tenant", tenant},
                                 {"expected_bytes", expected_bytes},
                                 {"submitted_unix_ms", Millis(submitted)}});
}

absl::StatusOr<JobRecord> JobRecord::Decode(absl::string_view json, absl::string_view where) {
  ASSIGN_OR_RETURN(const nlohmann::json object, ObjectOf(json, where));
  Reader read(object);
  JobRecord job;
  job.id = read.Hex("id", 64, true);
  job.name = read.Text("name", kLongestName, true);
  job.model = read.Text("model", kLongestName, true);
  job.fingerprint = read.Hex("fingerprint", 64, false);
  const std::string form = read.Text("form", kLongestName, true);
  job.form = form == "tokens" ? DocumentForm::kTokens : DocumentForm::kText;
  if (form != "tokens" && form != "text") {
    read.Update(absl::InvalidArgumentError(
        absl::StrCat("form=\"", Shown(form, 40), "\" must be text or tokens")));
  }
  job.document_sha256 = read.Hex("document_sha256", 64, true);
  job.document_bytes = read.Int("document_bytes", 1, kMostDocumentBytes);
  job.raw = read.Bool("raw");
  job.drop_missing = read.Bool("drop_missing");
  job.index = read.Text("index", kLongestName, true);
  job.priority = read.Int("priority", kLowestPriority, kHighestPriority);
  job.attempt = read.Int("attempt", 1, kMostAttempts);
  job.owner = read.Text("owner", kLongestText, false);
  job.tenant = read.Text("tenant", kLongestText, false);
  job.expected_bytes = read.Int("expected_bytes", 0, kMostBytes);
  job.submitted = read.Time("submitted_unix_ms");
  if (!read.status().ok()) return Damaged(where, read.status());
  if (const absl::Status valid = job.Validate(); !valid.ok()) return Damaged(where, valid);
  if (const std::string id = JobIdOf(job); id != job.id) {
    return Damaged(where, absl::DataLossError(absl::StrCat("its fields are those of job ", id,
                                                           ", it says it is ", job.id)));
  }
  return job;
}

std::string JobLease::Encode() const {
  return DumpJson(nlohmann::json{{"version", kVersion},
                                 {"worker", Shown(worker, kLongestName / 2)},
                                 {"tries", tries},
                                 {"until_unix_ms", Millis(until)},
                                 {"progress", progress},
                                 {"where", Shown(where, kLongestName / 2)},
                                 {"reason", Shown(reason, kLongestText / 2)}});
}

absl::StatusOr<JobLease> JobLease::Decode(absl::string_view json, absl::string_view where) {
  ASSIGN_OR_RETURN(const nlohmann::json object, ObjectOf(json, where));
  Reader read(object);
  JobLease lease;
  lease.worker = read.Text("worker", kLongestText, false);
  lease.tries = read.Int("tries", 0, kMostAttempts);
  lease.until = read.Time("until_unix_ms");
  lease.progress = read.Share("progress");
  lease.where = read.Text("where", kLongestText, false);
  lease.reason = read.Text("reason", kLongestText * 2, false);
  if (!read.status().ok()) return Damaged(where, read.status());
  return lease;
}

std::string JobEnd::Encode() const {
  return DumpJson(nlohmann::json{{"version", kVersion},
                                 {"state", NameOf(state)},
                                 {"content_id", content_id},
                                 {"context_id", context_id},
                                 {"bytes", bytes},
                                 {"tokens", tokens},
                                 {"reason", Shown(reason, kLongestText / 2)},
                                 {"worker", Shown(worker, kLongestName / 2)},
                                 {"tries", tries},
                                 {"ended_unix_ms", Millis(ended)}});
}

absl::StatusOr<JobEnd> JobEnd::Decode(absl::string_view json, absl::string_view where) {
  ASSIGN_OR_RETURN(const nlohmann::json object, ObjectOf(json, where));
  Reader read(object);
  JobEnd end;
  const std::string state = read.Text("state", kLongestName, true);
  bool known = false;
  for (const JobState one : {JobState::kDone, JobState::kCancelled, JobState::kDead}) {
    if (state != NameOf(one)) continue;
    end.state = one;
    known = true;
  }
  if (!known) {
    read.Update(absl::InvalidArgumentError(
        absl::StrCat("state=\"", Shown(state, 40), "\" must be done, cancelled or dead")));
  }
  const bool done = end.state == JobState::kDone;
  end.content_id = read.Hex("content_id", 64, done);
  end.context_id = read.Hex("context_id", 32, done);
  end.bytes = read.Int("bytes", 0, kMostBytes);
  end.tokens = read.Int("tokens", 0, kMostBytes);
  end.reason = read.Text("reason", kLongestText * 2, false);
  end.worker = read.Text("worker", kLongestText, false);
  end.tries = read.Int("tries", 0, kMostAttempts);
  end.ended = read.Time("ended_unix_ms");
  if (!read.status().ok()) return Damaged(where, read.status());
  return end;
}

}  // namespace carrel::serving
