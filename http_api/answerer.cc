#include "http_api/answerer.h"

#include <deque>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/status.h"
#include "model/tokenizer/tokenizer.h"

namespace carrel::http_api {
namespace {

class OneThread final : public Answerer {
 public:
  OneThread(AnswererConfig config, std::shared_ptr<library::LoadedModel> model,
            std::shared_ptr<library::StoreAccess> store)
      : config_(std::move(config)),
        model_(std::move(model)),
        store_(std::move(store)),
        thread_([this] { Work(); }) {}

  ~OneThread() override {
    {
      absl::MutexLock lock(&mu_);
      stopping_ = true;
    }
    thread_.join();
  }

  absl::Status Submit(AnswerJob job) override {
    absl::MutexLock lock(&mu_);
    if (static_cast<int64_t>(jobs_.size()) >= config_.max_waiting) {
      return absl::ResourceExhaustedError(
          absl::StrCat(jobs_.size(), " answers wait already; ask again later"));
    }
    jobs_.push_back(std::move(job));
    return absl::OkStatus();
  }

  int64_t waiting() const override {
    absl::MutexLock lock(&mu_);
    return static_cast<int64_t>(jobs_.size());
  }

 private:
  struct Open {
    std::string context, content_id;
    std::unique_ptr<library::OpenDecoder> decoder;
  };

  void Work() {
    for (;;) {
      AnswerJob job;
      {
        absl::MutexLock lock(&mu_);
        const auto ready = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
          return stopping_ || !jobs_.empty();
        };
        mu_.Await(absl::Condition(&ready));
        if (stopping_) break;
        job = std::move(jobs_.front());
        jobs_.pop_front();
      }
      job.done(job.wanted() ? Answer(job) : absl::CancelledError("nobody waits for the answer"));
    }
    absl::MutexLock lock(&mu_);
    for (const AnswerJob& job : jobs_) job.done(absl::UnavailableError("the server is stopping"));
    jobs_.clear();
  }

  absl::StatusOr<library::OpenDecoder*> DecoderOf(const AnswerJob& job) {
    for (auto open = open_.begin(); open != open_.end(); ++open) {
      if (open->context != job.context || open->content_id != job.content_id) continue;
      open_.splice(open_.begin(), open_, open);
      return open_.front().decoder.get();
    }
    open_.remove_if([&](const Open& open) { return open.context == job.context; });
    while (static_cast<int64_t>(open_.size()) >= config_.max_open_contexts) open_.pop_back();
    library::DecoderSpec spec = {.context = job.context,
                                 .folder = config_.folder,
                                 .config = config_.retrieval,
                                 .device = config_.device};
    spec.config.content_id = job.content_id;
    ASSIGN_OR_RETURN(std::unique_ptr<library::OpenDecoder> decoder,
                     library::OpenDecoder::Create(std::move(spec), model_, store_));
    open_.push_front({job.context, job.content_id, std::move(decoder)});
    return open_.front().decoder.get();
  }

  absl::StatusOr<AnswerJob::Done> Answer(const AnswerJob& job) {
    ASSIGN_OR_RETURN(library::OpenDecoder* const open, DecoderOf(job));
    model::StreamDecoder stream(open->checkpoint().tokenizer.get());
    AnswerJob::Done done;
    bool ended = false;
    const auto show = [&](const std::string& piece) -> absl::Status {
      if (job.on_text(piece)) return absl::OkStatus();
      ended = true;
      return absl::CancelledError("the answer was ended");
    };
    decoder::GenerateOptions options;
    options.max_tokens = job.max_tokens;
    options.sampling = job.sampling;
    options.on_token = [&](TokenId id) -> absl::Status {
      ++done.tokens;
      ASSIGN_OR_RETURN(const std::string piece, stream.Push(id));
      return show(piece);
    };
    const absl::StatusOr<decoder::GenerateResult> result =
        open->decoder().Generate(job.prompt, options);
    const absl::Status status = open->Confirm(ended ? absl::OkStatus() : result.status());
    if (!status.ok()) {
      open_.pop_front();  // whatever is wrong with it, the next job begins anew
      return status;
    }
    done.context_tokens = open->decoder().context_tokens();
    if (!ended) {
      ASSIGN_OR_RETURN(const std::string rest, stream.Finish());
      show(rest).IgnoreError();
      done.at_max_tokens = result->stop != decoder::StopReason::kEos;
    }
    return done;
  }

  const AnswererConfig config_;
  const std::shared_ptr<library::LoadedModel> model_;
  const std::shared_ptr<library::StoreAccess> store_;
  std::list<Open> open_;  // of the thread; the one used last is first
  mutable absl::Mutex mu_;
  std::deque<AnswerJob> jobs_ ABSL_GUARDED_BY(mu_);
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Answerer> Answerer::Create(AnswererConfig config,
                                           std::shared_ptr<library::LoadedModel> model,
                                           std::shared_ptr<library::StoreAccess> store) {
  return std::make_unique<OneThread>(std::move(config), std::move(model), std::move(store));
}

}  // namespace carrel::http_api
