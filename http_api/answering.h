// What:   one answer on its way to its client, whole or as events.
// Threads: one at a time: the one that prefills its document, if that comes first, and then the decoding one.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "http_api/answerer.h"
#include "http_api/completion.h"
#include "http_api/documents.h"
#include "http_api/http_server.h"

namespace carrel::http_api {

class Answering {
 public:
  Answering(CompletionHead head, const CompletionRequest& request,
            std::shared_ptr<HttpReply> reply);

  // Once it is known; of which context the prompt is the rest, and whether the client named it.
  void SetPrompt(const std::string& context, bool recognised, int64_t prompt_tokens);
  void SetSampling(const decoder::SamplingConfig& sampling, std::vector<std::string> advised);
  void Ignore(const std::string& field) { figures_.ignored.push_back(field); }
  void NotKept(const std::string& why) { figures_.not_kept = why; }

  bool Wanted() const { return !reply_->gone(); }

  // A document comes first: proxies and clients see that something goes on.
  void Waits(const Document& document);
  bool Push(const std::string& piece);  // false: nobody wants more
  void Done(const absl::StatusOr<AnswerJob::Done>& done);
  // Once it has begun, an error can only be an event; that the end is missing tells too.
  void Failed(const absl::Status& status);

 private:
  void Show(const std::string& text);
  void Begin();

  const CompletionHead head_;
  const bool stream_, stream_usage_, with_sources_;
  const std::shared_ptr<HttpReply> reply_;
  int64_t prompt_tokens_ = 0;
  Figures figures_;
  StopFilter filter_;
  absl::Time told_ = absl::InfinitePast();
  std::string text_;
  bool begun_ = false;
};

}  // namespace carrel::http_api
