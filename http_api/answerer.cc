#include "http_api/answerer.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <iterator>
#include <optional>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "common/status.h"
#include "library/document_text.h"
#include "library/sources.h"
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
        sequences_(config_.sequences),
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

  absl::Status Close(const std::string& context) override {
    std::list<Open> closed;  // destroyed without the lock
    absl::MutexLock lock(&mu_);
    const bool waited_for = std::any_of(
        jobs_.begin(), jobs_.end(), [&](const AnswerJob& job) { return job.context == context; });
    if (waited_for || reading_ == context) {
      return absl::FailedPreconditionError(
          absl::StrCat("context \"", context, "\" is being read; try again later"));
    }
    for (auto open = open_.begin(); open != open_.end();) {
      const auto next = std::next(open);
      if (open->context == context) closed.splice(closed.end(), open_, open);
      open = next;
    }
    absl::MutexLock sequences(&sequences_mu_);
    sequences_.Forget(context);
    return absl::OkStatus();
  }

  Waiting conversations() const override {
    absl::MutexLock lock(&sequences_mu_);
    return {sequences_.in_memory(), sequences_.in_files()};
  }

  int64_t waiting() const override {
    absl::MutexLock lock(&mu_);
    return static_cast<int64_t>(jobs_.size());
  }

 private:
  struct Open {
    std::string context, content_id;
    std::unique_ptr<library::OpenDecoder> decoder;
    // Of the sequence that it holds: whose, how long its prompt is (0: there is none), and since when.
    std::string who;
    int64_t prompt_tokens = 0;
    absl::Time used = absl::InfinitePast();
  };
  static constexpr absl::Duration kSweepEvery = absl::Seconds(1);

  void Work() {
    for (;;) {
      AnswerJob job;
      {
        absl::MutexLock lock(&mu_);
        const auto ready = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
          return stopping_ || !jobs_.empty();
        };
        while (!mu_.AwaitWithTimeout(absl::Condition(&ready), kSweepEvery)) SweepLocked();
        if (stopping_) break;
        job = std::move(jobs_.front());
        jobs_.pop_front();
        reading_ = job.context;
      }
      job.done(job.wanted() ? Answer(job) : absl::CancelledError("nobody waits for the answer"));
      absl::MutexLock lock(&mu_);
      reading_.reset();
    }
    absl::MutexLock lock(&mu_);
    for (const AnswerJob& job : jobs_) job.done(absl::UnavailableError("the server is stopping"));
    jobs_.clear();
  }

  // What is in use here, nobody else closes.
  absl::StatusOr<Open*> DecoderOf(const AnswerJob& job) {
    if (Open* const open = FindOpen(job); open != nullptr) return open;
    library::DecoderSpec spec = {.context = job.context,
                                 .folder = config_.folder,
                                 .derived_weights = config_.derived_weights,
                                 .config = config_.retrieval,
                                 .device = config_.device};
    spec.config.content_id = job.content_id;
    ASSIGN_OR_RETURN(std::unique_ptr<library::OpenDecoder> decoder,
                     library::OpenDecoder::Create(std::move(spec), model_, store_));
    absl::MutexLock lock(&mu_);
    Open& open = open_.emplace_front();
    open.context = job.context;
    open.content_id = job.content_id;
    open.decoder = std::move(decoder);
    return &open;
  }

  Open* FindOpen(const AnswerJob& job) {
    std::list<Open> closed;
    const auto kept = absl::MakeCleanup([&] {
      for (Open& open : closed) Keep(open);
    });
    absl::MutexLock lock(&mu_);
    for (auto open = open_.begin(); open != open_.end(); ++open) {
      if (open->context != job.context || open->content_id != job.content_id) continue;
      open_.splice(open_.begin(), open_, open);
      return &open_.front();
    }
    for (auto open = open_.begin(); open != open_.end();) {  // of what the context was before
      const auto next = std::next(open);
      if (open->context == job.context) closed.splice(closed.end(), open_, open);
      open = next;
    }
    while (static_cast<int64_t>(open_.size()) >= config_.max_open_contexts) {
      closed.splice(closed.end(), open_, std::prev(open_.end()));
    }
    return nullptr;
  }

  // Sets the decoder's sequence aside.
  void Keep(Open& open) {
    if (open.prompt_tokens == 0) return;
    Conversation conversation;
    conversation.owner = {open.context, open.content_id, open.who};
    conversation.sequence = open.decoder->decoder().SaveSequence();
    conversation.prompt_tokens = std::exchange(open.prompt_tokens, 0);
    absl::MutexLock lock(&sequences_mu_);
    sequences_.Put(std::move(conversation), open.used);
  }

  void SweepLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const absl::Time now = absl::Now();
    for (Open& open : open_) {
      if (now - open.used > config_.sequences.idle) Keep(open);
    }
    absl::MutexLock lock(&sequences_mu_);
    sequences_.Sweep(now);
  }

  // Whether the job goes on with a sequence, which the decoder then holds.
  absl::StatusOr<bool> FindSequence(const AnswerJob& job, Open& open) {
    decoder::Decoder& decoder = open.decoder->decoder();
    if (open.who == job.who && GoesOn(job.prompt, decoder.sequence_tokens(), open.prompt_tokens)) {
      return true;
    }
    Keep(open);
    std::optional<Conversation> found;
    {
      absl::MutexLock lock(&sequences_mu_);
      found = sequences_.Take({job.context, job.content_id, job.who}, job.prompt);
    }
    if (!found.has_value()) return false;
    RETURN_IF_ERROR(decoder.RestoreSequence(std::move(found->sequence)));
    return true;
  }

  static absl::Status AddSources(const AnswerJob& job, library::OpenDecoder& open,
                                 const std::vector<TokenId>& answer, AnswerJob::Done& done) {
    ASSIGN_OR_RETURN(const std::vector<library::Source> sources, open.Sources(answer, job.sources));
    ASSIGN_OR_RETURN(const library::DocumentText* const document, open.Document());
    for (const library::Source& source : sources) {
      done.sources.push_back({.first_token = source.tokens.begin,
                              .end_token = source.tokens.end,
                              .begin = source.begin,
                              .end = source.end,
                              .share = source.share,
                              .text = document->TextOf(source.tokens)});
    }
    return absl::OkStatus();
  }

  void CloseFirst() {
    std::list<Open> closed;
    absl::MutexLock lock(&mu_);
    closed.splice(closed.end(), open_, open_.begin());
  }

  // Rows of the context that were read so far, and times that a token looked for them.
  struct Rows {
    int64_t rows = 0, looks = 0;
  };
  static Rows RowsOf(const decoder::Decoder& decoder, int32_t kv_heads) {
    Rows sum;
    for (const decoder::LayerStatistics& layer : decoder.statistics().layers) {
      sum.rows += layer.rows_attended;
      sum.looks += layer.tokens * kv_heads;
    }
    return sum;
  }

  absl::StatusOr<AnswerJob::Done> Answer(const AnswerJob& job) {
    ASSIGN_OR_RETURN(Open* const at, DecoderOf(job));
    library::OpenDecoder* const open = at->decoder.get();
    const bool with_sources = job.sources > 0 && !job.context.empty();
    if (with_sources) RETURN_IF_ERROR(open->Document().status());
    model::StreamDecoder stream(open->checkpoint().tokenizer.get());
    AnswerJob::Done done;
    bool ended = false;
    const absl::Time start = absl::Now();
    absl::Time first = absl::InfiniteFuture();
    const auto show = [&](const std::string& piece) -> absl::Status {
      if (!stopping_ && job.on_text(piece)) return absl::OkStatus();
      ended = true;
      return absl::CancelledError("the answer was ended");
    };
    decoder::GenerateOptions options;
    options.max_tokens = job.max_tokens;
    options.sampling = job.sampling;
    options.trace = with_sources;
    options.wanted = [&] { return !stopping_ && job.wanted(); };
    ASSIGN_OR_RETURN(options.resume, FindSequence(job, *at));
    std::vector<TokenId> answer;
    options.on_token = [&](TokenId id) -> absl::Status {
      answer.push_back(id);
      if (++done.tokens == 1) first = absl::Now();
      ASSIGN_OR_RETURN(const std::string piece, stream.Push(id));
      return show(piece);
    };
    const int32_t kv_heads = open->checkpoint().config.shape.kv_heads;
    const Rows before = RowsOf(open->decoder(), kv_heads);
    const absl::StatusOr<decoder::GenerateResult> result =
        open->decoder().Generate(job.prompt, options);
    at->who = job.who;
    at->used = absl::Now();
    at->prompt_tokens = open->decoder().sequence_tokens().size() >= job.prompt.size()
                            ? static_cast<int64_t>(job.prompt.size())
                            : 0;
    const absl::Status status = open->Confirm(ended ? absl::OkStatus() : result.status());
    if (absl::IsCancelled(status)) return status;
    if (!status.ok()) {
      CloseFirst();  // whatever is wrong with it, the next job begins anew
      return status;
    }
    done.resumed_tokens = open->decoder().resumed_tokens();
    done.context_tokens = open->decoder().context_tokens();
    const Rows after = RowsOf(open->decoder(), kv_heads);
    if (after.looks > before.looks) {
      done.rows_read = static_cast<double>(after.rows - before.rows) /
                       static_cast<double>(after.looks - before.looks);
    }
    first = std::min(first, absl::Now());
    done.prompt_seconds = absl::ToDoubleSeconds(first - start);
    done.generate_seconds = absl::ToDoubleSeconds(absl::Now() - first);
    if (with_sources && job.wanted()) RETURN_IF_ERROR(AddSources(job, *open, answer, done));
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
  mutable absl::Mutex mu_;
  std::list<Open> open_ ABSL_GUARDED_BY(mu_);                // the one used last is first
  std::optional<std::string> reading_ ABSL_GUARDED_BY(mu_);  // whose decoder is the thread's alone
  std::deque<AnswerJob> jobs_ ABSL_GUARDED_BY(mu_);
  mutable absl::Mutex sequences_mu_;  // after mu_
  Sequences sequences_ ABSL_GUARDED_BY(sequences_mu_);
  std::atomic<bool> stopping_{false};  // set under mu_, for who waits
  std::thread thread_;
};

}  // namespace

std::unique_ptr<Answerer> Answerer::Create(AnswererConfig config,
                                           std::shared_ptr<library::LoadedModel> model,
                                           std::shared_ptr<library::StoreAccess> store) {
  return std::make_unique<OneThread>(std::move(config), std::move(model), std::move(store));
}

}  // namespace carrel::http_api
