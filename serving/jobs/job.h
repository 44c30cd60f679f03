// What:   a prefill job as a bucket holds it: what is to be read by which model under which name, how it stands
//         with somebody who works on it (a lease), and how it ended.
// Id:     SHA-256, in 64 hexadecimal digits, of the document, the model, the options and the attempt. Who asks for
//         the same again while the job is open asks for this job; who asks again after it ended asks for the next
//         attempt. Names, owners and priorities are no part of it.
// Errors: InvalidArgument of what a submitter says; DataLoss of an object that is not what we write, and
//         FailedPrecondition of one of a later version. Each names the object, the field and its bound.
// Threads: reentrant.
// Example:
//   JobRecord job{.name = "report", .model = "demo", .document_sha256 = Sha256Hex(text), .document_bytes = n};
//   job.id = JobIdOf(job);
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace carrel::serving {

inline constexpr int64_t kLowestPriority = 0, kHighestPriority = 9, kUsualPriority = 5;
// Of a document: a text, or token ids of 4 bytes each. One plain PUT.
inline constexpr int64_t kMostDocumentBytes = int64_t{1} << 30;
inline constexpr int64_t kMostAttempts = 1'000'000;
// Times that a lease on a job is taken before the job is given up.
inline constexpr int64_t kMostTries = 3;
// Of an object below jobs/ that is no document.
inline constexpr int64_t kMostJobObject = 64 << 10;

enum class DocumentForm : uint8_t { kText = 0, kTokens = 1 };

// What never changes of a job.
struct JobRecord {
  std::string id;
  std::string name;   // of the context to be
  std::string model;  // as workers call it
  std::string
      fingerprint;  // FingerprintDigest of the one model that may read it; empty: any of the name
  DocumentForm form = DocumentForm::kText;  // tokens need a fingerprint
  std::string document_sha256;
  int64_t document_bytes = 0;
  bool raw = false;           // a text: not inside a chat's first turn
  bool drop_missing = false;  // a text: bytes without a token are left out
  std::string index = "flat";
  int64_t priority = kUsualPriority;
  int64_t attempt = 1;
  std::string owner, tenant;   // of a key; empty: none
  int64_t expected_bytes = 0;  // of the context, for quotas; 0: not known
  absl::Time submitted;        // by the bucket's clock, to the millisecond

  std::string Encode() const;
  // where: the object's address.
  static absl::StatusOr<JobRecord> Decode(absl::string_view json, absl::string_view where);
  absl::Status Validate() const;
};

// Of all fields that it is a hash of, as above.
std::string JobIdOf(const JobRecord& record);
bool IsJobId(absl::string_view text);

// Somebody works on a job, or did.
struct JobLease {
  std::string worker;  // empty: nobody; it may be taken at `until`
  int64_t tries = 0;   // this one among them
  absl::Time until;    // by the bucket's clock
  double progress = 0;
  std::string where;   // of prefill, for people
  std::string reason;  // why the last try failed; empty: none did

  std::string Encode() const;
  static absl::StatusOr<JobLease> Decode(absl::string_view json, absl::string_view where);
};

enum class JobState : uint8_t { kQueued = 0, kRunning = 1, kDone = 2, kCancelled = 3, kDead = 4 };
const char* NameOf(JobState state);

// How a job ended: there is at most one for each.
struct JobEnd {
  JobState state = JobState::kDead;    // kDone, kCancelled or kDead
  std::string content_id, context_id;  // kDone
  int64_t bytes = 0, tokens = 0;       // kDone
  std::string reason;                  // kCancelled, kDead
  std::string worker;                  // empty: none
  int64_t tries = 0;
  absl::Time ended;

  std::string Encode() const;
  static absl::StatusOr<JobEnd> Decode(absl::string_view json, absl::string_view where);
};

// All of it, at one look.
struct JobStatus {
  JobRecord record;
  JobState state = JobState::kQueued;
  JobLease lease;  // kQueued, kRunning; tries = 0: nobody had it yet
  JobEnd end;      // the others

  bool ended() const { return state != JobState::kQueued && state != JobState::kRunning; }
  // Why it failed, or was not done at the last try; empty: nothing is known.
  const std::string& reason() const { return ended() ? end.reason : lease.reason; }
};

}  // namespace carrel::serving
