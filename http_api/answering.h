// What:   one answer on its way to its client, whole or as events, for as long as its caller may have it.
// Threads: any; one tells how it comes to be (the one that prefills its document, if that comes first, and then the
//         decoding one), another may end it (LookAgain).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "http_api/completion.h"
#include "http_api/http_server.h"
#include "kvstore/access/admission.h"
#include "serving/answer_job.h"
#include "serving/documents.h"

namespace carrel::http_api {

class Answering {
 public:
  // held: what is to be given back when the answer has ended: a session of the key's, the request's bytes.
  Answering(CompletionHead head, const CompletionRequest& request, std::shared_ptr<HttpReply> reply,
            std::shared_ptr<kvstore::Visit> visit, std::vector<std::shared_ptr<void>> held);

  // Once it is known; of which context the prompt is the rest, and whether the client named it. The audit log is
  // told, and again at the end.
  void SetPrompt(const std::string& context, bool recognised, int64_t prompt_tokens);
  void SetSampling(const serving::Sampling& sampling, std::vector<std::string> advised);
  void Ignore(const std::string& field);
  void NotKept(const std::string& why);

  bool Wanted();
  // Ends it if its caller's key has lost the right, or its context. False: it is over.
  bool LookAgain();

  // A document comes first: proxies and clients see that something goes on.
  void Waits(const serving::Document& document);
  // Its context comes first.
  void Fetches(const kvstore::ContextComes& comes);
  // Kept until the answer has ended, beside what was held from the start.
  void Hold(std::shared_ptr<void> held);
  bool Push(const std::string& piece);  // false: no more is wanted
  void Done(const absl::StatusOr<serving::AnswerJob::Done>& done);
  // Once it has begun, an error can only be an event; that the end is missing tells too.
  void Failed(const absl::Status& status);

 private:
  // A comment of the stream, at most one a second.
  void Comment(const std::string& text) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Begin() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Write(const std::string& piece) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void FailedLocked(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Over() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const CompletionHead head_;
  const bool stream_, stream_usage_, with_sources_;
  const std::shared_ptr<HttpReply> reply_;
  const std::shared_ptr<kvstore::Visit> visit_;
  absl::Mutex mu_;
  std::vector<std::shared_ptr<void>> held_ ABSL_GUARDED_BY(mu_);
  int64_t prompt_tokens_ ABSL_GUARDED_BY(mu_) = 0;
  Figures figures_ ABSL_GUARDED_BY(mu_);
  absl::Time told_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  int64_t written_ ABSL_GUARDED_BY(mu_) = 0;
  bool begun_ ABSL_GUARDED_BY(mu_) = false, over_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace carrel::http_api
