// What:   /v1/completions and /v1/chat/completions: a request becomes a job, and the job's answer a reply. A prompt
//         that names no context, but begins with the document of one, is answered from it; one whose document is
//         worth a context may have it kept.
// Waits:  while a document is prefilled, 503 gives its progress and when to retry; or the request waits for as long as
//         its "wait" says.
//         A context from elsewhere is always waited for: a stream shows the progress in comments.
// Kept:   a kept document belongs to the key that sent it (kvstore/access/kept_name.h); name, right and quota are checked
//         first. If it cannot be kept, the answer (carrel.not_kept) and the log say why.
// Errors: as completion.h, and serving/engine.h; InvalidArgument with the code context_length_exceeded.
// Threads: any; a call blocks for as long as template and tokenizer take.
// Ownership: keeps what Parts points to, which outlives this and the answers on their way; this outlives those.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "http_api/answering.h"
#include "http_api/brings.h"
#include "http_api/completion.h"
#include "http_api/http_server.h"
#include "kvstore/access/admission.h"
#include "serving/engine.h"
#include "serving/still_allowed.h"
#include "serving/turn_pool.h"

namespace carrel::http_api {

class CompletionsApi {
 public:
  struct Parts {
    serving::Engine* engine;
    std::string model_name;
    int64_t keep = 0, keep_tokens = 0;  // as DocumentsConfig
    serving::RunLater later;
    serving::StillAllowed* still_allowed;
    Brings* brings;  // null: there are no contexts
  };
  explicit CompletionsApi(Parts parts);

  // Of a visit that may make this call. Not OK: the caller answers.
  absl::Status Handle(bool chat, const HttpRequest& http,
                      const std::shared_ptr<kvstore::Visit>& visit,
                      const std::shared_ptr<HttpReply>& reply);

 private:
  struct Asked;
  absl::Status CheckModel(const std::string& model) const;
  absl::StatusOr<serving::OpenedContext> FindContext(const std::string& name,
                                                     kvstore::Principal* who) const;
  absl::Status Wait(const Asked& asked, const serving::Document& now);
  absl::Status Answer(const Asked& asked, const serving::OpenedContext& found);
  // On a thread that may block.
  void AnswerLater(const Asked& asked, const serving::OpenedContext& found);
  void BringAndAnswer(const Asked& asked, const serving::OpenedContext& found);
  absl::Status CheckLength(const Asked& asked, int64_t document, int64_t prompt) const;
  void SetSampling(const Asked& asked, serving::AnswerJob& job) const;
  size_t DocumentTokens(const Asked& asked, const std::vector<TokenId>& prompt);
  absl::Status AnswerFromKept(const Asked& asked, const serving::AnswerJob& job, size_t keep);
  void Submit(serving::AnswerJob job, Answering& answering);
  std::string NewId(bool chat);

  const Parts parts_;
  const uint32_t started_;
  std::atomic<uint32_t> answers_{0};
};

}  // namespace carrel::http_api
