// What:   /v1/completions and /v1/chat/completions: a request becomes a job, and the job's answer a reply. A prompt
//         that names no context, but begins with the document of one, is answered from it; one whose document is
//         worth a context may have it kept.
// Waits:  while a document is prefilled, 503 gives its progress and when to retry; or the request waits for as long as
//         its "wait" says.
//         A context from elsewhere is always waited for: a stream shows the progress in comments.
// Kept:   a kept document belongs to the key that sent it (kvstore/access/kept_name.h); name, right and quota are checked
//         first. If it cannot be kept, the answer (carrel.not_kept) and the log say why.
// Errors: as completion.h, chat_template.h and scheduler.h; InvalidArgument with the code context_length_exceeded.
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
#include "library/document_ends.h"
#include "library/loaded_model.h"
#include "library/store_access.h"
#include "model/tokenizer/seam.h"
#include "serving/chat_template.h"
#include "serving/documents.h"
#include "serving/scheduler.h"
#include "serving/still_allowed.h"
#include "serving/turn_pool.h"

namespace carrel::http_api {

class CompletionsApi {
 public:
  struct Parts {
    const library::LoadedModel* model;
    library::StoreAccess* store;  // null: there are no contexts
    serving::ChatTemplate* chat;  // null: chat_missing says why
    absl::Status chat_missing;
    serving::Scheduler* scheduler;
    serving::Documents* documents;  // null likewise
    std::string model_name;
    int64_t keep = 0, keep_tokens = 0;  // as DocumentsConfig
    bool beyond_trained = false;        // positions may exceed what the model was trained for
    int64_t most_given_up = 0;          // of a long context (decoder::MostGivenUp)
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
  struct Found {
    std::string content_id;
    int64_t tokens = 0;
  };

  absl::Status CheckModel(const std::string& model) const;
  absl::StatusOr<Found> FindContext(const std::string& name, kvstore::Principal* who) const;
  absl::Status Wait(const Asked& asked, const serving::Document& now);
  absl::Status Answer(const Asked& asked, const Found& found);
  void BringAndAnswer(const Asked& asked, const Found& found);
  absl::StatusOr<model::Seam> TokensOf(bool chat, const CompletionRequest& request,
                                       const std::string& content_id);
  absl::Status CheckLength(const Asked& asked, int64_t document, int64_t prompt) const;
  void SetSampling(const Asked& asked, serving::AnswerJob& job) const;
  size_t DocumentTokens(const Asked& asked, const std::vector<TokenId>& prompt);
  absl::Status AnswerFromKept(const Asked& asked, const serving::AnswerJob& job, size_t keep);
  void Submit(serving::AnswerJob job, Answering& answering);
  std::string NewId(bool chat);

  const Parts parts_;
  const uint32_t started_;
  std::atomic<uint32_t> answers_{0};
  library::DocumentEndsCache ends_;
};

}  // namespace carrel::http_api
