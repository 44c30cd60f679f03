#include "serving/jobs/job_board.h"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/json.h"
#include "common/status.h"

namespace carrel::serving {
namespace {

constexpr size_t kIdDigits = 64, kTimeDigits = 13;
constexpr size_t kLeastDigits = 8;  // of an id that somebody types

// The id at the end of a queue's key; empty: it is no such key.
std::string IdOf(absl::string_view file) {
  if (file.size() != 2 + kTimeDigits + 1 + kIdDigits) return "";
  const std::string id(file.substr(file.size() - kIdDigits));
  return IsJobId(id) ? id : "";
}

absl::Status NoJob(absl::string_view what) {
  return absl::NotFoundError(absl::StrCat("there is no job ", what));
}

// An end goes last: until then the job is known to have ended.
constexpr const char* kFolders[] = {"dead", "documents", "leases", "records", "results"};

}  // namespace

JobBoard::JobBoard(const kvstore::Bucket& bucket, Clock clock)
    : bucket_(bucket),
      clock_(clock != nullptr ? std::move(clock)
                              : Clock([&bucket] { return bucket.client().ServerNow(); })) {}

std::string JobBoard::Key(absl::string_view folder, absl::string_view id) const {
  return absl::StrCat(bucket_.Folder("jobs"), folder, "/", id);
}

std::string JobBoard::QueueKey(const JobRecord& record) const {
  return Key("queue", absl::StrFormat("%d-%013d-%s", kHighestPriority - record.priority,
                                      absl::ToUnixMillis(record.submitted), record.id));
}

absl::StatusOr<JobRecord> JobBoard::ReadRecord(const std::string& id) {
  {
    absl::MutexLock lock(&mu_);
    const auto known = records_.find(id);
    if (known != records_.end()) return known->second;
  }
  const std::string key = Key("records", id), where = bucket_.client().UriOf(key);
  ASSIGN_OR_RETURN(const std::string bytes, bucket_.client().Read(key, kMostJobObject));
  ASSIGN_OR_RETURN(JobRecord record, JobRecord::Decode(bytes, where));
  if (record.id != id) {
    return absl::DataLossError(absl::StrCat(where, ": it is job ", record.id));
  }
  absl::MutexLock lock(&mu_);
  records_[id] = record;
  return record;
}

absl::StatusOr<JobBoard::KnownLease> JobBoard::ReadLease(const std::string& id) {
  const std::string key = LeaseKey(id);
  kvstore::ObjectInfo info;
  ASSIGN_OR_RETURN(const std::string bytes, bucket_.client().Read(key, kMostJobObject, &info));
  KnownLease known{.listed_etag = "", .etag = info.etag, .lease = {}};
  absl::StatusOr<JobLease> lease = JobLease::Decode(bytes, bucket_.client().UriOf(key));
  // What nobody can read holds nobody off.
  if (!lease.ok() && !absl::IsDataLoss(lease.status())) return lease.status();
  if (lease.ok()) known.lease = *std::move(lease);
  return known;
}

absl::StatusOr<OpenJob> JobBoard::ReadOpen(const std::string& id, const std::string& listed_etag) {
  OpenJob job;
  ASSIGN_OR_RETURN(job.status.record, ReadRecord(id));
  job.queue_key = QueueKey(job.status.record);
  if (listed_etag.empty()) return job;
  std::optional<KnownLease> known;
  {
    absl::MutexLock lock(&mu_);
    const auto found = leases_.find(id);
    if (found != leases_.end() && found->second.listed_etag == listed_etag) known = found->second;
  }
  if (!known.has_value()) {
    absl::StatusOr<KnownLease> read = ReadLease(id);
    if (absl::IsNotFound(read.status())) return job;  // gone meanwhile
    RETURN_IF_ERROR(read.status());
    known = *std::move(read);
    known->listed_etag = listed_etag;
    absl::MutexLock lock(&mu_);
    leases_[id] = *known;
  }
  job.status.lease = known->lease;
  job.lease_etag = known->etag;
  const bool held = !known->lease.worker.empty() && known->lease.until > Now();
  job.status.state = held ? JobState::kRunning : JobState::kQueued;
  return job;
}

absl::StatusOr<std::vector<OpenJob>> JobBoard::Open(std::vector<BadJob>* bad) {
  std::vector<std::pair<std::string, std::string>> queue;  // key, id
  const std::string folder = Key("queue", "");
  RETURN_IF_ERROR(
      bucket_.client().ForEach(folder, [&](const kvstore::ListedObject& object) -> absl::Status {
        queue.emplace_back(object.key, IdOf(object.key.substr(folder.size())));
        return absl::OkStatus();
      }));
  std::map<std::string, std::string> etags;
  const std::string leases = Key("leases", "");
  RETURN_IF_ERROR(
      bucket_.client().ForEach(leases, [&](const kvstore::ListedObject& object) -> absl::Status {
        etags[object.key.substr(leases.size())] = object.etag;
        return absl::OkStatus();
      }));
  std::vector<OpenJob> jobs;
  std::set<std::string> ids;
  for (const auto& [key, id] : queue) {
    absl::StatusOr<OpenJob> job = absl::DataLossError(
        absl::StrCat(bucket_.client().UriOf(key), ": this is no key of a job that waits"));
    if (!id.empty()) job = ReadOpen(id, etags.contains(id) ? etags[id] : "");
    if (job.ok() && job->queue_key != key) {
      job = absl::DataLossError(
          absl::StrCat(bucket_.client().UriOf(key), ": job ", id, " waits under another key"));
    }
    if (job.ok()) {
      ids.insert(id);
      jobs.push_back(*std::move(job));
      continue;
    }
    const absl::Status& error = job.status();
    const bool of_the_job = absl::IsNotFound(error) || absl::IsDataLoss(error) ||
                            absl::IsFailedPrecondition(error) || absl::IsResourceExhausted(error);
    if (!of_the_job) return error;
    if (bad != nullptr) bad->push_back({key, id, error});
  }
  absl::MutexLock lock(&mu_);
  const auto gone = [&](const auto& entry) { return !ids.contains(entry.first); };
  std::erase_if(records_, gone);
  std::erase_if(leases_, gone);
  return jobs;
}

absl::StatusOr<std::optional<JobEnd>> JobBoard::FindEnd(const std::string& id) {
  const std::string key = Key("results", id);
  const absl::StatusOr<std::string> bytes = bucket_.client().Read(key, kMostJobObject);
  if (absl::IsNotFound(bytes.status())) return std::optional<JobEnd>();
  RETURN_IF_ERROR(bytes.status());
  ASSIGN_OR_RETURN(JobEnd end, JobEnd::Decode(*bytes, bucket_.client().UriOf(key)));
  return std::optional<JobEnd>(std::move(end));
}

absl::StatusOr<JobStatus> JobBoard::Get(const std::string& id) {
  const absl::StatusOr<OpenJob> job = ReadOpen(id, "");
  if (absl::IsNotFound(job.status())) return NoJob(id);
  RETURN_IF_ERROR(job.status());
  JobStatus status = job->status;
  ASSIGN_OR_RETURN(const std::optional<JobEnd> end, FindEnd(id));
  if (end.has_value()) {
    status.state = end->state;
    status.end = *end;
    return status;
  }
  const absl::StatusOr<KnownLease> lease = ReadLease(id);
  if (absl::IsNotFound(lease.status())) return status;
  RETURN_IF_ERROR(lease.status());
  status.lease = lease->lease;
  const bool held = !status.lease.worker.empty() && status.lease.until > Now();
  status.state = held ? JobState::kRunning : JobState::kQueued;
  return status;
}

absl::StatusOr<std::vector<JobStatus>> JobBoard::Ended(std::vector<absl::Status>* unreadable) {
  std::vector<JobStatus> ended;
  const std::string folder = Key("results", "");
  RETURN_IF_ERROR(
      bucket_.client().ForEach(folder, [&](const kvstore::ListedObject& object) -> absl::Status {
        const std::string id = object.key.substr(folder.size());
        absl::StatusOr<JobStatus> status = Get(id);
        if (absl::IsNotFound(status.status())) return absl::OkStatus();  // swept meanwhile
        if (absl::IsUnavailable(status.status())) return status.status();
        if (!status.ok()) {
          unreadable->push_back(status.status());
        } else {
          ended.push_back(*std::move(status));
        }
        return absl::OkStatus();
      }));
  return ended;
}

absl::StatusOr<JobStatus> JobBoard::Find(const std::string& what) {
  if (IsJobId(what)) return Get(what);
  ASSIGN_OR_RETURN(const std::vector<OpenJob> open, Open(nullptr));
  std::vector<absl::Status> unreadable;
  ASSIGN_OR_RETURN(std::vector<JobStatus> all, Ended(&unreadable));
  for (const OpenJob& job : open) all.push_back(job.status);
  std::optional<JobStatus> found;
  for (const JobStatus& status : all) {
    const bool named = status.record.name == what;
    const bool begins = what.size() >= kLeastDigits && absl::StartsWith(status.record.id, what);
    if (!named && !begins) continue;
    if (begins && found.has_value() && found->record.id != status.record.id && !named) {
      return absl::InvalidArgumentError(
          absl::StrCat("several jobs begin with ", what, ": give more digits"));
    }
    if (!found.has_value() || found->record.submitted <= status.record.submitted) found = status;
  }
  if (!found.has_value()) return NoJob(absl::StrCat("\"", what, "\""));
  return Get(found->record.id);
}

absl::Status JobBoard::CheckName(const JobRecord& record) {
  const absl::StatusOr<kvstore::BoundName> bound = bucket_.ReadName(record.name);
  if (bound.ok()) {
    return absl::AlreadyExistsError(absl::StrCat("context \"", record.name, "\" is in ",
                                                 bucket_.client().UriOf(""),
                                                 " already: choose "
                                                 "another name, or remove it first"));
  }
  if (!absl::IsNotFound(bound.status())) return bound.status();
  ASSIGN_OR_RETURN(const std::vector<OpenJob> open, Open(nullptr));
  for (const OpenJob& job : open) {
    if (job.status.record.name != record.name || job.status.record.id == record.id) continue;
    const absl::StatusOr<std::optional<JobEnd>> end = FindEnd(job.status.record.id);
    if (end.ok() && end->has_value()) continue;
    return absl::AlreadyExistsError(absl::StrCat("context \"", record.name,
                                                 "\" is being made by job ", job.status.record.id,
                                                 " of another document: cancel that, or choose "
                                                 "another name"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<JobStatus>> JobBoard::SameJob(
    const JobRecord& record, const std::function<bool(const std::string&)>& sees,
    bool* next_attempt) {
  *next_attempt = false;
  const absl::StatusOr<JobStatus> there = Get(record.id);
  if (absl::IsNotFound(there.status())) return std::optional<JobStatus>();
  RETURN_IF_ERROR(there.status());
  const std::string& name = there->record.name;
  bool stands = !there->ended();
  if (there->state == JobState::kDone) {
    const absl::StatusOr<kvstore::BoundName> bound = bucket_.ReadName(name);
    if (!bound.ok() && !absl::IsNotFound(bound.status())) return bound.status();
    stands = bound.ok() && bound->content_id == there->end.content_id;
  }
  if (stands && name == record.name) return std::optional<JobStatus>(*there);
  if (stands && (sees == nullptr || sees(name))) {
    return absl::AlreadyExistsError(absl::StrCat(
        "the same document is ", there->ended() ? "context \"" : "on its way as context \"", name,
        "\" (job ", record.id, "): it is read once"));
  }
  *next_attempt = true;
  return std::optional<JobStatus>();
}

absl::Status JobBoard::Enqueue(const JobRecord& record, absl::string_view document) {
  kvstore::S3Client& client = bucket_.client();
  RETURN_IF_ERROR(client.Put(Key("documents", record.id), document).status());
  RETURN_IF_ERROR(
      client.Put(Key("records", record.id), record.Encode(), kvstore::Condition::Absent())
          .status());
  return client.Put(QueueKey(record), "").status();
}

absl::StatusOr<JobBoard::Submitted> JobBoard::Submit(
    JobRecord record, absl::string_view document,
    const std::function<bool(const std::string&)>& sees) {
  record.document_sha256 = Sha256Hex(document);
  record.document_bytes = static_cast<int64_t>(document.size());
  RETURN_IF_ERROR(record.Validate());
  for (record.attempt = 1; record.attempt <= kMostAttempts;) {
    record.id = JobIdOf(record);
    bool next = false;
    ASSIGN_OR_RETURN(const std::optional<JobStatus> same, SameJob(record, sees, &next));
    if (same.has_value()) {
      if (!same->ended()) {  // who submitted it may have ended before it waited
        RETURN_IF_ERROR(bucket_.client().Put(QueueKey(same->record), "").status());
      }
      return Submitted{*same, true};
    }
    if (next) {
      ++record.attempt;
      continue;
    }
    RETURN_IF_ERROR(CheckName(record));
    record.submitted = absl::FromUnixMillis(absl::ToUnixMillis(Now()));
    const absl::Status put = Enqueue(record, document);
    if (absl::IsAlreadyExists(put)) continue;  // another submits the same at this moment
    RETURN_IF_ERROR(put);
    return Submitted{.status = {.record = std::move(record)}};
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("the document was submitted ", kMostAttempts, " times already"));
}

absl::StatusOr<JobBoard::Bound> JobBoard::End(const JobRecord& record, const JobEnd& end) {
  const absl::Status put =
      bucket_.client()
          .Put(Key("results", record.id), end.Encode(), kvstore::Condition::Absent())
          .status();
  if (put.ok()) return Bound{end, true};
  if (!absl::IsAlreadyExists(put)) return put;
  ASSIGN_OR_RETURN(const std::optional<JobEnd> there, FindEnd(record.id));
  if (!there.has_value()) return put;  // swept at this moment
  return Bound{*there, false};
}

absl::Status JobBoard::CleanUp(const JobRecord& record, const JobEnd& end) {
  kvstore::S3Client& client = bucket_.client();
  if (end.state == JobState::kDead) {
    nlohmann::json job, why;
    ASSIGN_OR_RETURN(job, ParseJsonObject(record.Encode(), "a job"));
    ASSIGN_OR_RETURN(why, ParseJsonObject(end.Encode(), "an end"));
    RETURN_IF_ERROR(
        client.Put(Key("dead", record.id), DumpJson(nlohmann::json{{"job", job}, {"end", why}}))
            .status());
  }
  RETURN_IF_ERROR(client.Remove(QueueKey(record)));
  RETURN_IF_ERROR(client.Remove(LeaseKey(record.id)));
  // Of one that was given up it stays, for who looks why, until it is swept.
  return end.state == JobState::kDead ? absl::OkStatus()
                                      : client.Remove(Key("documents", record.id));
}

absl::StatusOr<JobStatus> JobBoard::Cancel(const std::string& id, const std::string& reason) {
  const absl::StatusOr<JobRecord> record = ReadRecord(id);
  if (absl::IsNotFound(record.status())) return NoJob(id);
  RETURN_IF_ERROR(record.status());
  ASSIGN_OR_RETURN(const Bound bound,
                   End(*record, {.state = JobState::kCancelled, .reason = reason, .ended = Now()}));
  RETURN_IF_ERROR(CleanUp(*record, bound.end));
  return JobStatus{.record = *record, .state = bound.end.state, .end = bound.end};
}

absl::Status JobBoard::RemoveLetter(const std::string& id) {
  RETURN_IF_ERROR(bucket_.client().Remove(Key("dead", id)));
  return bucket_.client().Remove(Key("documents", id));
}

absl::Status JobBoard::PutAway(const BadJob& bad) {
  if (bad.id.empty() || absl::IsFailedPrecondition(bad.error)) return absl::OkStatus();
  if (!absl::IsNotFound(bad.error)) {
    const JobEnd end{
        .state = JobState::kDead, .reason = std::string(bad.error.message()), .ended = Now()};
    JobRecord record;
    record.id = bad.id;
    RETURN_IF_ERROR(End(record, end).status());
    RETURN_IF_ERROR(bucket_.client().Put(Key("dead", bad.id), end.Encode()).status());
  }
  RETURN_IF_ERROR(bucket_.client().Remove(LeaseKey(bad.id)));
  return bucket_.client().Remove(bad.queue_key);
}

absl::StatusOr<std::string> JobBoard::ReadDocument(const JobRecord& record) {
  const std::string key = Key("documents", record.id);
  ASSIGN_OR_RETURN(std::string document,
                   bucket_.client().Read(key, std::max<int64_t>(record.document_bytes, 1)));
  if (Sha256Hex(document) != record.document_sha256) {
    return absl::DataLossError(
        absl::StrCat(bucket_.client().UriOf(key), ": it is not the document that was submitted"));
  }
  return document;
}

std::string FingerprintDigest(const std::vector<std::pair<std::string, std::string>>& fingerprint) {
  nlohmann::json fields = nlohmann::json::array();
  for (const auto& [name, value] : fingerprint) fields.push_back({name, value});
  return Sha256Hex(DumpJson(fields));
}

bool IsOf(const v1::Manifest& manifest, absl::string_view token_ids_sha256,
          const std::vector<std::pair<std::string, std::string>>& fingerprint) {
  std::map<std::string, std::string> fields;
  for (const auto& field : manifest.fingerprint().fields()) fields[field.name()] = field.value();
  return manifest.token_ids_sha256() == token_ids_sha256 &&
         std::all_of(fingerprint.begin(), fingerprint.end(),
                     [&](const auto& field) { return fields[field.first] == field.second; });
}

absl::StatusOr<std::optional<kvstore::BoundName>> FindSameContext(
    const kvstore::Bucket& bucket, const std::string& name, const std::string& token_ids_sha256,
    const std::vector<std::pair<std::string, std::string>>& fingerprint) {
  const absl::StatusOr<kvstore::BoundName> bound = bucket.ReadName(name);
  if (absl::IsNotFound(bound.status())) return std::optional<kvstore::BoundName>();
  RETURN_IF_ERROR(bound.status());
  const absl::StatusOr<kvstore::BucketManifest> there = bucket.ReadManifestOf(*bound);
  if (absl::IsNotFound(there.status())) return std::optional<kvstore::BoundName>();  // going
  RETURN_IF_ERROR(there.status());
  v1::Manifest manifest;
  if (manifest.ParseFromString(there->header.manifest) &&
      IsOf(manifest, token_ids_sha256, fingerprint)) {
    return std::optional<kvstore::BoundName>(*bound);
  }
  return absl::AlreadyExistsError(
      absl::StrCat(bucket.client().UriOf(bucket.NameKey(name)),
                   ": the name is bound to another context, with content id ", bound->content_id));
}

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
