#include "serving/answerer.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <iterator>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/status.h"
#include "common/steady_time.h"
#include "common/thrown.h"
#include "decoder/generation.h"
#include "library/document_text.h"
#include "library/sources.h"
#include "model/tokenizer/tokenizer.h"
#include "serving/step_plan.h"

namespace carrel::serving {
namespace {

// An open decoder, and the sequence that it holds.
struct Open {
  std::string context, content_id;
  std::unique_ptr<library::OpenDecoder> decoder;
  bool busy = false;  // with an answer, which is the thread's alone
  // Of the sequence: whose, how long its prompt is (0: there is none), and since when it waits.
  std::string who;
  int64_t prompt_tokens = 0;
  absl::Time used = absl::InfinitePast();
};

// What was counted of rows so far, over all layers.
decoder::LayerStatistics RowsOf(const library::OpenDecoder& open) {
  decoder::LayerStatistics sum;
  for (const decoder::LayerStatistics& layer : open.decoder().statistics().layers) {
    sum.tokens += layer.tokens;
    sum.rows_attended += layer.rows_attended;
    sum.whole_tokens += layer.whole_tokens;
    sum.whole_rows += layer.whole_rows;
  }
  return sum;
}

decoder::LayerStatistics Since(const decoder::LayerStatistics& before,
                               decoder::LayerStatistics after) {
  after.tokens -= before.tokens;
  after.rows_attended -= before.rows_attended;
  after.whole_tokens -= before.whole_tokens;
  after.whole_rows -= before.whole_rows;
  return after;
}

// An answer on its way; stays where it is, for its callbacks.
struct Answering {
  explicit Answering(AnswerJob given) : job(std::move(given)) {}

  AnswerJob job;
  Open* open = nullptr;
  std::optional<model::StreamDecoder> stream;
  std::optional<decoder::Generation> generation;
  std::vector<TokenId> answer;
  AnswerJob::Done done;
  decoder::LayerStatistics before;
  absl::Time start = SteadyNow(), first = absl::InfiniteFuture();
  bool ended = false;  // by who listens, or with the server: what there is, is the answer

  bool with_sources() const { return job.sources > 0 && !job.context.empty(); }
};

class OneThread final : public Answerer {
 public:
  OneThread(AnswererConfig config, std::shared_ptr<library::LoadedModel> model,
            std::shared_ptr<library::StoreAccess> store)
      : config_(std::move(config)),
        model_(std::move(model)),
        store_(std::move(store)),
        plan_(PromptTokensOfStep(config_)),
        jobs_({.places = config_.max_answers,
               .waiting = config_.max_waiting,
               .of_one_turn = config_.max_waiting_of_turn,
               .what = "answers"}),
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
    job.id = ++last_id_;
    return jobs_.Push(std::move(job));
  }

  absl::Status Close(const std::string& context) override {
    std::list<Open> closed;  // destroyed without the lock
    absl::MutexLock lock(&mu_);
    if (ReadsLocked(context)) {
      return absl::FailedPreconditionError(
          absl::StrCat("context \"", context, "\" is being read; try again later"));
    }
    MoveIdle([&](const Open& open) { return open.context == context; }, closed);
    absl::MutexLock sequences(&sequences_mu_);
    sequences_.Forget(context);
    return absl::OkStatus();
  }

  bool Reads(const std::string& context) const override {
    absl::MutexLock lock(&mu_);
    return ReadsLocked(context);
  }

  Waiting conversations() const override {
    absl::MutexLock lock(&sequences_mu_);
    return {sequences_.in_memory(), sequences_.in_files()};
  }

  int64_t waiting() const override {
    absl::MutexLock lock(&mu_);
    return jobs_.size();
  }
  int64_t answering() const override {
    absl::MutexLock lock(&mu_);
    return static_cast<int64_t>(read_.size());
  }

 private:
  static constexpr absl::Duration kSweepEvery = absl::Seconds(1);
  static constexpr int64_t kPromptTokens = 32;

  bool ReadsLocked(const std::string& context) const ABSL_SHARED_LOCKS_REQUIRED(mu_) {
    const std::deque<AnswerJob>& waiting = jobs_.waiting();
    return std::find(read_.begin(), read_.end(), context) != read_.end() ||
           std::any_of(waiting.begin(), waiting.end(),
                       [&](const AnswerJob& job) { return job.context == context; });
  }

  void Work() {
    // What is thrown elsewhere is nobody's in particular: the thread lives.
    for (bool goes_on = true; goes_on;) {
      CatchThrown("answers", [&] {
        while ((goes_on = Admit())) Advance();
        return absl::OkStatus();
      }).IgnoreError();
    }
    while (!answering_.empty()) {
      answering_.front().ended = true;
      Finish(answering_.begin(), absl::CancelledError("the server is stopping"));
    }
    absl::MutexLock lock(&mu_);
    for (const AnswerJob& job : jobs_.TakeAll()) {
      job.done(absl::UnavailableError("the server is stopping"));
    }
  }

  // Begins an answer where there is room, and waits where there is nothing else to do. Beside others one between
  // steps, for opening a decoder takes as long as some tokens. False: it ends.
  bool Admit() {
    if (no_room_) return !stopping_;
    AnswerJob job;
    {
      absl::MutexLock lock(&mu_);
      const auto ready = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
        return stopping_ || jobs_.size() > 0;
      };
      if (SteadyNow() - swept_ > kSweepEvery) SweepLocked();
      while (answering_.empty() && !mu_.AwaitWithTimeout(absl::Condition(&ready), kSweepEvery)) {
        SweepLocked();
      }
      if (stopping_) return false;
      std::optional<AnswerJob> next = jobs_.Take();
      if (!next.has_value()) return true;
      job = *std::move(next);
      read_.push_back(job.context);
    }
    answering_.emplace_back(std::move(job));
    Answering& one = answering_.back();
    const absl::Status begun = CatchThrown("an answer", [&] { return Begin(one); });
    if (begun.ok()) return true;
    // What it lacks may be there when one of the others has ended.
    no_room_ = absl::IsResourceExhausted(begun) && one.open == nullptr && answering_.size() > 1;
    if (no_room_) {
      PutBack(one.job);
      answering_.pop_back();
    } else {
      Finish(std::prev(answering_.end()), begun);
    }
    return true;
  }

  void PutBack(AnswerJob& job) {
    absl::MutexLock lock(&mu_);
    read_.erase(std::find(read_.begin(), read_.end(), job.context));
    jobs_.PutBack(std::move(job));
  }

  // A token of answers that have read their prompts, and blocks of prompts, as the plan has it.
  void Advance() {
    if (answering_.empty()) return;
    std::vector<StepPlan::Waiting> waiting;
    std::vector<std::list<Answering>::iterator> all;
    for (auto one = answering_.begin(); one != answering_.end(); ++one) {
      waiting.push_back(
          {one->job.turn.get(), one->generation->next_tokens(), one->generation->reading_prompt()});
      all.push_back(one);
    }
    std::vector<std::list<Answering>::iterator> step;
    std::vector<decoder::Generation*> generations;
    int64_t tokens = 0;
    for (const size_t i : plan_.Next(waiting)) {
      answering_.splice(answering_.end(), answering_, all[i]);
      step.push_back(all[i]);
      generations.push_back(&*all[i]->generation);
      tokens += waiting[i].tokens;
    }
    std::vector<absl::Status> statuses;
    const absl::Time start = SteadyNow();
    const absl::Status stepped = CatchThrown("a step of answers", [&] {
      statuses = decoder::Generation::StepTogether(generations);
      return absl::OkStatus();
    });
    plan_.Took(tokens, SteadyNow() - start);
    if (!stepped.ok()) statuses.assign(step.size(), stepped);
    for (size_t i = 0; i < step.size(); ++i) TakeStep(step[i], statuses[i]);
  }

  // Of several prompts together; where they are read one by one, each makes the others wait.
  static int64_t PromptTokensOfStep(const AnswererConfig& config) {
    return config.device.device == model::Device::kCpu ? kPromptTokens : 0;
  }

  void TakeStep(std::list<Answering>::iterator one, const absl::Status& status) {
    if (!status.ok() || one->generation->done()) Finish(one, status);
  }

  absl::Status Begin(Answering& one) {
    const AnswerJob& job = one.job;
    if (!job.wanted()) return absl::CancelledError("nobody waits for the answer");
    ASSIGN_OR_RETURN(one.open, DecoderOf(job));
    library::OpenDecoder& open = *one.open->decoder;
    if (one.with_sources()) RETURN_IF_ERROR(open.Document().status());
    one.stream.emplace(open.checkpoint().tokenizer.get());
    decoder::GenerateOptions options;
    options.max_tokens = job.max_tokens;
    options.give_up = job.give_up;
    options.history = job.history;
    options.sampling = job.sampling;
    options.trace = one.with_sources();
    options.wanted = [this, &one] { return !stopping_ && Wanted(one.job); };
    ASSIGN_OR_RETURN(options.resume, FindSequence(job, *one.open));
    options.on_token = [this, &one](TokenId id) -> absl::Status {
      one.answer.push_back(id);
      if (++one.done.tokens == 1) one.first = SteadyNow();
      ASSIGN_OR_RETURN(const std::string piece, one.stream->Push(id));
      return Show(one, piece);
    };
    one.before = RowsOf(open);
    ASSIGN_OR_RETURN(decoder::Generation generation,
                     decoder::Generation::Begin(open.decoder(), job.prompt, std::move(options)));
    one.generation.emplace(std::move(generation));
    return absl::OkStatus();
  }

  // In the middle of a step, which is others', too: what it throws is its own end.
  static bool Wanted(const AnswerJob& job) {
    const auto wanted =
        CatchThrown("an answer", [&]() -> absl::StatusOr<bool> { return job.wanted(); });
    return wanted.value_or(false);
  }

  absl::Status Show(Answering& one, const std::string& piece) {
    if (!stopping_ && one.job.on_text(piece)) return absl::OkStatus();
    one.ended = true;
    return absl::CancelledError("the answer was ended");
  }

  // Lets go of its decoder, and then tells how it ended: who hears of it may delete the context.
  void Finish(std::list<Answering>::iterator one, const absl::Status& status) {
    no_room_ = false;
    const absl::StatusOr<AnswerJob::Done> done =
        CatchThrown("an answer", [&] { return ResultOf(*one, status); });
    if (one->open != nullptr) Release(*one, done.status());
    {
      absl::MutexLock lock(&mu_);
      read_.erase(std::find(read_.begin(), read_.end(), one->job.context));
      jobs_.GiveBack(one->job.turn);
    }
    // It is over for this thread, whatever becomes of what its caller is told.
    CatchThrown("the end of an answer", [&] {
      one->job.done(done);
      return absl::OkStatus();
    }).IgnoreError();
    answering_.erase(one);
  }

  absl::StatusOr<AnswerJob::Done> ResultOf(Answering& one, const absl::Status& given) {
    if (!one.generation.has_value()) return given;
    library::OpenDecoder& open = *one.open->decoder;
    RETURN_IF_ERROR(open.Confirm(one.ended ? absl::OkStatus() : given));
    AnswerJob::Done& done = one.done;
    done.resumed_tokens = open.decoder().resumed_tokens();
    done.context_tokens = open.decoder().context_tokens() - one.job.give_up;
    if (const auto& plan = open.decoder().plan(); plan.has_value())
      done.plan = decoder::WayName(plan->taken().way);
    done.rows_read =
        RowsPerToken(Since(one.before, RowsOf(open))) / open.checkpoint().config.shape.kv_heads;
    const absl::Time first = std::min(one.first, SteadyNow());
    done.prompt_seconds = absl::ToDoubleSeconds(first - one.start);
    done.generate_seconds = absl::ToDoubleSeconds(SteadyNow() - first);
    if (one.with_sources() && one.job.wanted()) RETURN_IF_ERROR(AddSources(one));
    if (!one.ended) {
      ASSIGN_OR_RETURN(const std::string rest, one.stream->Finish());
      Show(one, rest).IgnoreError();
      done.at_max_tokens = one.generation->TakeResult().stop != decoder::StopReason::kEos;
    }
    return done;
  }

  // The decoder keeps the sequence; whatever is wrong with one that failed, the next job begins anew.
  void Release(Answering& one, const absl::Status& status) {
    std::list<Open> closed;
    const size_t prompt = one.job.prompt.size();
    one.generation.reset();
    absl::MutexLock lock(&mu_);
    Open& open = *one.open;
    open.busy = false;
    open.who = one.job.who;
    open.used = SteadyNow();
    open.prompt_tokens = open.decoder->decoder().sequence_tokens().size() >= prompt
                             ? static_cast<int64_t>(prompt)
                             : 0;
    if (status.ok() || absl::IsCancelled(status)) return;
    MoveIdle([&](const Open& other) { return &other == &open; }, closed);
  }

  absl::StatusOr<Open*> DecoderOf(const AnswerJob& job) {
    if (Open* const open = FindOpen(job); open != nullptr) return open;
    library::DecoderSpec spec = {.context = job.context,
                                 .folder = config_.folder,
                                 .derived_weights = config_.derived_weights,
                                 .config = config_.retrieval,
                                 .device = config_.device,
                                 .planned = config_.planned && !job.context.empty(),
                                 .way = config_.way,
                                 .turn_head = config_.turn_head};
    spec.config.content_id = job.content_id;
    absl::StatusOr<std::unique_ptr<library::OpenDecoder>> decoder =
        library::OpenDecoder::Create(spec, model_, store_);
    while (absl::IsResourceExhausted(decoder.status()) && CloseIdlest()) {
      decoder = library::OpenDecoder::Create(spec, model_, store_);
    }
    RETURN_IF_ERROR(decoder.status());
    absl::MutexLock lock(&mu_);
    Open& open = open_.emplace_front();
    open.context = job.context;
    open.content_id = job.content_id;
    open.decoder = *std::move(decoder);
    open.busy = true;
    return &open;
  }

  // An idle decoder over the context, best one whose sequence the prompt goes on with; else room is made.
  Open* FindOpen(const AnswerJob& job) {
    std::list<Open> closed;
    const auto kept = absl::MakeCleanup([&] {
      for (Open& open : closed) Keep(open);
    });
    absl::MutexLock lock(&mu_);
    auto found = open_.end();
    for (auto open = open_.begin(); open != open_.end(); ++open) {
      if (open->busy || open->context != job.context || open->content_id != job.content_id)
        continue;
      found = open;  // the one that was used longest ago
      if (GoesOnWith(job, *open)) break;
    }
    if (found != open_.end()) {
      open_.splice(open_.begin(), open_, found);
      found->busy = true;
      return &*found;
    }
    // Of what the context was before.
    MoveIdle(
        [&](const Open& open) {
          return open.context == job.context && open.content_id != job.content_id;
        },
        closed);
    std::set<std::string> kept_open = {job.context};  // those used last
    for (const Open& open : open_) {
      if (static_cast<int64_t>(kept_open.size()) < config_.max_open_contexts) {
        kept_open.insert(open.context);
      }
    }
    MoveIdle([&](const Open& open) { return kept_open.count(open.context) == 0; }, closed);
    return nullptr;
  }

  // The decoder that waits for the longest makes room. False: none waits.
  bool CloseIdlest() {
    std::list<Open> closed;
    {
      absl::MutexLock lock(&mu_);
      const auto idlest =
          std::find_if(open_.rbegin(), open_.rend(), [](const Open& open) { return !open.busy; });
      if (idlest == open_.rend()) return false;
      closed.splice(closed.end(), open_, std::prev(idlest.base()));
    }
    Keep(closed.front());
    return true;
  }

  template <class Which>
  void MoveIdle(Which which, std::list<Open>& to) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    for (auto open = open_.begin(); open != open_.end();) {
      const auto next = std::next(open);
      if (!open->busy && which(*open)) to.splice(to.end(), open_, open);
      open = next;
    }
  }

  // Sets the decoder's sequence aside.
  void Keep(Open& open) {
    if (open.prompt_tokens == 0) return;
    Conversation conversation;
    conversation.sequence = open.decoder->decoder().SaveSequence();
    conversation.owner = {open.context, open.content_id, open.who, conversation.sequence.given_up};
    conversation.prompt_tokens = std::exchange(open.prompt_tokens, 0);
    absl::MutexLock lock(&sequences_mu_);
    sequences_.Put(std::move(conversation), open.used);
  }

  void SweepLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    swept_ = SteadyNow();
    for (Open& open : open_) {
      if (!open.busy && swept_ - open.used > config_.sequences.idle) Keep(open);
    }
    absl::MutexLock lock(&sequences_mu_);
    sequences_.Sweep(swept_);
  }

  static bool GoesOnWith(const AnswerJob& job, const Open& open) {
    const decoder::Decoder& decoder = open.decoder->decoder();
    return open.who == job.who && decoder.given_up() == job.give_up &&
           GoesOn(job.prompt, decoder.sequence_tokens(), open.prompt_tokens);
  }

  // Whether the job goes on with a sequence, which the decoder then holds.
  absl::StatusOr<bool> FindSequence(const AnswerJob& job, Open& open) {
    decoder::Decoder& decoder = open.decoder->decoder();
    if (GoesOnWith(job, open)) return true;
    Keep(open);
    std::optional<Conversation> found;
    {
      absl::MutexLock lock(&sequences_mu_);
      found = sequences_.Take({job.context, job.content_id, job.who, job.give_up}, job.prompt);
    }
    if (!found.has_value()) return false;
    RETURN_IF_ERROR(decoder.RestoreSequence(std::move(found->sequence)));
    return true;
  }

  static absl::Status AddSources(Answering& one) {
    library::OpenDecoder& open = *one.open->decoder;
    ASSIGN_OR_RETURN(const std::vector<library::Source> sources,
                     open.Sources(one.answer, one.job.sources));
    ASSIGN_OR_RETURN(const library::DocumentText* const document, open.Document());
    for (const library::Source& source : sources) {
      one.done.sources.push_back({.first_token = source.tokens.begin,
                                  .end_token = source.tokens.end,
                                  .begin = source.begin,
                                  .end = source.end,
                                  .share = source.share,
                                  .text = document->TextOf(source.tokens)});
    }
    return absl::OkStatus();
  }

  const AnswererConfig config_;
  const std::shared_ptr<library::LoadedModel> model_;
  const std::shared_ptr<library::StoreAccess> store_;
  std::list<Answering> answering_;  // the thread's; who went on longest ago is first
  StepPlan plan_;                   // the thread's
  bool no_room_ = false;            // the thread's: for one more, until one of these ends
  mutable absl::Mutex mu_;
  std::list<Open> open_ ABSL_GUARDED_BY(mu_);           // the one used last is first
  std::vector<std::string> read_ ABSL_GUARDED_BY(mu_);  // contexts of answers on their way
  TurnQueue<AnswerJob> jobs_ ABSL_GUARDED_BY(mu_);      // that wait
  int64_t last_id_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Time swept_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
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

}  // namespace carrel::serving
