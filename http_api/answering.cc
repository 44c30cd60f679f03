#include "http_api/answering.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/steady_time.h"
#include "http_api/api_error.h"
#include "http_api/api_metrics.h"

namespace carrel::http_api {

Answering::Answering(CompletionHead head, const CompletionRequest& request,
                     std::shared_ptr<HttpReply> reply, std::shared_ptr<kvstore::Visit> visit,
                     std::vector<std::shared_ptr<void>> held)
    : head_(std::move(head)),
      stream_(request.stream),
      stream_usage_(request.stream_usage),
      with_sources_(request.sources > 0),
      reply_(std::move(reply)),
      visit_(std::move(visit)),
      held_(std::move(held)) {
  figures_.ignored = request.ignored;
}

void Answering::SetPrompt(const std::string& context, bool recognised, int64_t prompt_tokens) {
  visit_->Log("open", absl::OkStatus(), {.name = context});
  absl::MutexLock lock(&mu_);
  figures_.context = context;
  figures_.recognised = recognised;
  prompt_tokens_ = prompt_tokens;
}

void Answering::SetSampling(const serving::Sampling& sampling, std::vector<std::string> advised) {
  absl::MutexLock lock(&mu_);
  figures_.sampling = sampling;
  figures_.advised = std::move(advised);
}

void Answering::Ignore(const std::string& field) {
  absl::MutexLock lock(&mu_);
  figures_.ignored.push_back(field);
}

void Answering::NotKept(const std::string& why) {
  absl::MutexLock lock(&mu_);
  figures_.not_kept = why;
}

bool Answering::Wanted() {
  if (reply_->gone()) return false;
  absl::MutexLock lock(&mu_);
  return !over_;
}

bool Answering::LookAgain() {
  {
    absl::MutexLock lock(&mu_);
    if (over_ || reply_->gone()) return false;
  }
  const absl::Status still = visit_->StillAllowed();
  if (still.ok()) return true;
  Failed(still);
  return false;
}

void Answering::Waits(const serving::Document& document) {
  absl::MutexLock lock(&mu_);
  Comment(absl::StrFormat("the document is read: %.0f%%", 100 * document.progress));
}

void Answering::Fetches(const kvstore::ContextComes& comes) {
  absl::MutexLock lock(&mu_);
  if (comes.waits_for_room) return Comment("the context waits for room");
  if (comes.of == 0) return Comment("the context waits to be fetched");
  Comment(absl::StrFormat("the context is fetched: %d of %d bytes", comes.bytes, comes.of));
}

void Answering::Hold(std::shared_ptr<void> held) {
  absl::MutexLock lock(&mu_);
  if (!over_) held_.push_back(std::move(held));
}

void Answering::Comment(const std::string& text) {
  if (over_ || !stream_ || SteadyNow() - told_ < absl::Milliseconds(900)) return;
  told_ = SteadyNow();
  Begin();
  Write(absl::StrCat(": ", text, "\n\n"));
}

bool Answering::Push(const std::string& piece) {
  absl::MutexLock lock(&mu_);
  if (over_) return false;
  if (stream_ && !piece.empty()) {
    Begin();
    Write(TextEvent(head_, piece));
  }
  return !reply_->gone();
}

// What a client hears whose answer was cut short though it waits for it.
absl::Status Answering::Stopping() { return absl::UnavailableError("the server is stopping"); }

void Answering::Done(const absl::StatusOr<serving::AnswerJob::Done>& done) {
  absl::MutexLock lock(&mu_);
  if (over_) return;
  // Nobody wants it: the client has left, or hears that the server stops.
  if (absl::IsCancelled(done.status())) return FailedLocked(Stopping());
  if (!done.ok()) return FailedLocked(done.status());
  const std::string finish = done->at_max_tokens ? "length" : "stop";
  const Usage usage = {.prompt_tokens = done->context_tokens + prompt_tokens_,
                       .cached_tokens = done->context_tokens + done->resumed_tokens,
                       .completion_tokens = std::ssize(done->result.ids)};
  figures_.context_tokens = done->context_tokens;
  figures_.with_sources = with_sources_;
  figures_.sources = done->sources;
  figures_.rows_read = done->rows_read;
  figures_.plan = done->plan;
  figures_.prompt_ms = 1e3 * done->prompt_seconds;
  figures_.ms_per_token = done->ms_per_token();
  CountAnswer(reply_->gone() ? "left" : finish, usage, figures_);
  if (done->left) return EndWith(Stopping());  // likewise, in the middle of it
  if (!stream_) {
    const std::string body = CompletionJson(head_, done->text, finish, usage, figures_);
    written_ = static_cast<int64_t>(body.size());
    visit_->Log("close", absl::OkStatus(), {.bytes = written_, .name = figures_.context});
    reply_->Send(200, "application/json", body);
    return Over();
  }
  Begin();
  Write(FinishEvent(head_, finish, figures_));
  if (stream_usage_) Write(UsageEvent(head_, usage));
  Write(kDoneEvent);
  visit_->Log("close", absl::OkStatus(), {.bytes = written_, .name = figures_.context});
  reply_->End();
  Over();
}

void Answering::Failed(const absl::Status& status) {
  absl::MutexLock lock(&mu_);
  if (!over_) FailedLocked(status);
}

void Answering::FailedLocked(const absl::Status& status) {
  CountAnswer(reply_->gone() ? "left" : "failed", {}, {});
  EndWith(status);
}

void Answering::EndWith(const absl::Status& status) {
  visit_->Log("close", status, {.bytes = written_, .name = figures_.context});
  if (!begun_) {
    SendError(*reply_, status);
  } else {
    Write(ErrorEvent(status));
    reply_->End();
  }
  Over();
}

void Answering::Over() {
  over_ = true;
  visit_->SpendBytes(written_);
  held_.clear();
}

void Answering::Write(const std::string& piece) {
  written_ += static_cast<int64_t>(piece.size());
  reply_->Write(piece);
}

void Answering::Begin() {
  if (begun_) return;
  begun_ = true;
  reply_->Begin("text/event-stream; charset=utf-8");
  if (const std::string first = FirstEvent(head_); !first.empty()) Write(first);
}

}  // namespace carrel::http_api
