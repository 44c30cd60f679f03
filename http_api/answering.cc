#include "http_api/answering.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "http_api/api_error.h"
#include "http_api/api_metrics.h"

namespace carrel::http_api {

Answering::Answering(CompletionHead head, const CompletionRequest& request,
                     std::shared_ptr<HttpReply> reply)
    : head_(std::move(head)),
      stream_(request.stream),
      stream_usage_(request.stream_usage),
      with_sources_(request.sources > 0),
      reply_(std::move(reply)),
      filter_(request.stop) {
  figures_.ignored = request.ignored;
}

void Answering::SetPrompt(const std::string& context, bool recognised, int64_t prompt_tokens) {
  figures_.context = context;
  figures_.recognised = recognised;
  prompt_tokens_ = prompt_tokens;
}

void Answering::SetSampling(const decoder::SamplingConfig& sampling,
                            std::vector<std::string> advised) {
  figures_.sampling = sampling;
  figures_.advised = std::move(advised);
}

void Answering::Waits(const Document& document) {
  if (!stream_ || absl::Now() - told_ < absl::Seconds(1)) return;
  told_ = absl::Now();
  Begin();
  reply_->Write(absl::StrFormat(": the document is read: %.0f%%\n\n", 100 * document.progress));
}

bool Answering::Push(const std::string& piece) {
  Show(filter_.Push(piece));
  return !filter_.stopped() && !reply_->gone();
}

void Answering::Done(const absl::StatusOr<AnswerJob::Done>& done) {
  if (!done.ok()) return Failed(done.status());
  Show(filter_.Finish());
  const std::string finish = done->at_max_tokens && !filter_.stopped() ? "length" : "stop";
  const Usage usage = {.prompt_tokens = done->context_tokens + prompt_tokens_,
                       .cached_tokens = done->context_tokens + done->resumed_tokens,
                       .completion_tokens = done->tokens};
  figures_.context_tokens = done->context_tokens;
  figures_.with_sources = with_sources_;
  figures_.sources = done->sources;
  figures_.rows_read = done->rows_read;
  figures_.prompt_ms = 1e3 * done->prompt_seconds;
  if (done->tokens > 1) {
    figures_.ms_per_token = 1e3 * done->generate_seconds / static_cast<double>(done->tokens - 1);
  }
  CountAnswer(reply_->gone() ? "left" : finish, usage, figures_);
  if (!stream_) {
    return reply_->Send(200, "application/json",
                        CompletionJson(head_, text_, finish, usage, figures_));
  }
  Begin();
  reply_->Write(FinishEvent(head_, finish, figures_));
  if (stream_usage_) reply_->Write(UsageEvent(head_, usage));
  reply_->Write(kDoneEvent);
  reply_->End();
}

void Answering::Failed(const absl::Status& status) {
  CountAnswer(reply_->gone() ? "left" : "failed", {}, {});
  if (!begun_) return SendError(*reply_, status);
  reply_->Write(ErrorEvent(status));
  reply_->End();
}

void Answering::Show(const std::string& text) {
  if (text.empty()) return;
  if (!stream_) {
    text_ += text;
    return;
  }
  Begin();
  reply_->Write(TextEvent(head_, text));
}

void Answering::Begin() {
  if (begun_) return;
  begun_ = true;
  reply_->Begin("text/event-stream; charset=utf-8");
  reply_->Write(FirstEvent(head_));
}

}  // namespace carrel::http_api
