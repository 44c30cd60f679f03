#include "serving/scheduler.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <iterator>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "common/status.h"
#include "common/steady_time.h"
#include "common/thrown.h"
#include "serving/schedule.h"

namespace carrel::serving {
namespace {

// An open decoder, and the conversation that it holds.
struct Pooled {
  std::string context, content_id;
  int64_t number = 0;  // in the order in which they were opened
  std::unique_ptr<Slot> slot;
  bool busy = false;   // with an answer, or in somebody's hands, who alone touches the slot
  bool first = false;  // nobody asked it yet, and no other decoder over the same was open
  // Of the conversation: whose, how long its prompt is (0: there is none), and since when it waits.
  std::string who;
  int64_t prompt_tokens = 0;
  absl::Time used = absl::InfinitePast();
};

// Belongs to the step thread, and while it is opened elsewhere to who opens it.
struct Request {
  explicit Request(AnswerJob given) : job(std::move(given)) {}

  AnswerJob job;
  Pooled* open = nullptr;
  bool begun = false;                // the slot has it
  std::optional<absl::Status> over;  // how it ended before it took part in a step
  absl::Time start;                  // when its turn came
};

class StepScheduler final : public Scheduler {
 public:
  StepScheduler(SchedulerConfig config, std::unique_ptr<Runner> runner)
      : config_(std::move(config)),
        runner_(std::move(runner)),
        prefixes_(config_.conversations),
        schedule_({.places = config_.max_answers,
                   .waiting = config_.max_waiting,
                   .waiting_of_turn = config_.max_waiting_of_turn,
                   .prompt_tokens = PromptTokensOfStep(config_)}),
        step_thread_([this] { Work(); }) {
    for (int64_t i = 0; i < config_.openers; ++i) openers_.emplace_back([this] { WorkBeside(); });
  }

  ~StepScheduler() override {
    {
      absl::MutexLock lock(&mu_);
      stopping_ = true;
      schedule_.Stop();
      changed_ = true;
    }
    step_thread_.join();
    for (std::thread& opener : openers_) opener.join();
  }

  absl::Status Submit(AnswerJob job) override {
    auto request = std::make_unique<Request>(std::move(job));
    absl::MutexLock lock(&mu_);
    const RequestId id = ++last_id_;
    RETURN_IF_ERROR(schedule_.Submit(id, request->job.turn, request->job.context));
    requests_.emplace(id, std::move(request));
    changed_ = true;
    return absl::OkStatus();
  }

  absl::StatusOr<OpenedContext> Open(const std::string& context, const std::string& content_id,
                                     int64_t count) override {
    std::string holds = content_id;
    for (;;) {
      {
        absl::MutexLock lock(&mu_);
        mu_.Await(absl::Condition(&prepared_));
        const Pooled* found = nullptr;
        int64_t open = 0;
        for (const Pooled& one : open_) {
          if (one.context != context || !absl::StartsWith(one.content_id, holds)) continue;
          found = &one;
          ++open;
        }
        if (open >= count) return found->slot->opened();
        if (found != nullptr) holds = found->content_id;
      }
      ASSIGN_OR_RETURN(Pooled* const opened, NewDecoder(context, holds));
      absl::MutexLock lock(&mu_);
      opened->busy = false;
    }
  }

  decoder::Statistics statistics() const override {
    absl::MutexLock lock(&mu_);
    std::map<int64_t, const Slot*> in_order;  // sums of fractions have an order
    for (const Pooled& open : open_) in_order.emplace(open.number, open.slot.get());
    decoder::Statistics sum;
    for (const auto& [number, slot] : in_order) {
      if (slot == in_order.begin()->second) {
        sum = slot->statistics();
      } else {
        decoder::AddStatistics(slot->statistics(), sum);
      }
    }
    return sum;
  }

  absl::Status Close(const std::string& context) override {
    std::list<Pooled> closed;
    {
      absl::MutexLock lock(&mu_);
      AwaitHandsOffLocked(context);
      if (schedule_.Reads(context)) {
        return absl::FailedPreconditionError(
            absl::StrCat("context \"", context, "\" is being read; try again later"));
      }
      TakeOutLocked([&](const Pooled& open) { return open.context == context; }, closed);
    }
    CloseAll(closed, /*park=*/false);
    prefixes_.Forget(context);
    return absl::OkStatus();
  }

  bool Reads(const std::string& context) const override {
    absl::MutexLock lock(&mu_);
    return schedule_.Reads(context);
  }

  PrefixCache& prefixes() override { return prefixes_; }

  int64_t waiting() const override {
    absl::MutexLock lock(&mu_);
    return schedule_.waiting();
  }
  int64_t answering() const override {
    absl::MutexLock lock(&mu_);
    return schedule_.admitted();
  }

 private:
  static constexpr absl::Duration kSweepEvery = absl::Seconds(1);
  static constexpr int64_t kPromptTokens = 32;

  // Of several prompts together; where they are read one by one, each makes the others wait.
  static int64_t PromptTokensOfStep(const SchedulerConfig& config) {
    return config.decoders.device.device == model::Device::kCpu ? kPromptTokens : 0;
  }

  // --- The step thread.

  void Work() {
    // What is thrown elsewhere is nobody's in particular: the thread lives.
    CatchThrown("answers", [&] {
      runner_->Prepare();
      return absl::OkStatus();
    }).IgnoreError();
    {
      absl::MutexLock lock(&mu_);
      prepared_ = true;
    }
    for (bool goes_on = true; goes_on;) {
      CatchThrown("answers", [&] {
        while ((goes_on = Advance())) {
        }
        return absl::OkStatus();
      }).IgnoreError();
    }
  }

  // What is planned next. False: the scheduler ends, and nobody is left.
  bool Advance() {
    Plan plan;
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(&changed_));
      if (stopping_ && schedule_.empty()) return false;
      plan = schedule_.NextStep(
          [this](RequestId id) { return requests_.at(id)->open->slot->progress(); });
      changed_ = !plan.empty();
    }
    for (const RequestId id : plan.end) {
      const std::optional<absl::Status> over = RequestOf(id).over;
      Finish(id, over.value_or(Stopping()));
    }
    for (const RequestId id : plan.open) Open(id);
    if (!plan.step.empty()) Step(plan.step);
    return true;
  }

  Request& RequestOf(RequestId id) {
    absl::MutexLock lock(&mu_);
    return *requests_.at(id);
  }

  void Open(RequestId id) {
    Request& request = RequestOf(id);
    request.start = SteadyNow();
    const absl::StatusOr<bool> begun = CatchThrown("an answer", [&]() -> absl::StatusOr<bool> {
      if (!request.job.is_wanted()) return absl::CancelledError("nobody waits for the answer");
      return Begin(request, /*may_wait=*/false);
    });
    absl::MutexLock lock(&mu_);
    if (begun.ok() && !*begun && !stopping_) {
      to_open_.push_back(id);
    } else {
      OpenedLocked(id, request, begun.ok() && !*begun ? Stopping() : begun.status());
    }
  }

  // A token of answers that have read their prompts, and blocks of prompts, as the plan has it.
  void Step(const std::vector<RequestId>& ids) {
    std::vector<Slot*> slots;
    int64_t tokens = 0;
    for (const RequestId id : ids) {
      slots.push_back(RequestOf(id).open->slot.get());
      tokens += slots.back()->progress().tokens;
    }
    std::vector<absl::Status> statuses;
    const absl::Time start = SteadyNow();
    const absl::Status stepped = CatchThrown("a step of answers", [&] {
      statuses = runner_->Step(slots);
      return absl::OkStatus();
    });
    const absl::Duration took = SteadyNow() - start;
    if (!stepped.ok()) statuses.assign(ids.size(), stepped);
    {
      absl::MutexLock lock(&mu_);
      schedule_.Took(tokens, took);
    }
    for (size_t i = 0; i < ids.size(); ++i) {
      if (!statuses[i].ok() || slots[i]->done()) Finish(ids[i], statuses[i]);
    }
  }

  // Lets go of its decoder, and then tells how it ended: who hears of it may delete the context.
  void Finish(RequestId id, absl::Status status) {
    if (stopping_ && absl::IsCancelled(status)) status = Stopping();  // nobody wants it, as we go
    Request& request = RequestOf(id);
    absl::StatusOr<AnswerJob::Done> done =
        CatchThrown("an answer", [&]() -> absl::StatusOr<AnswerJob::Done> {
          if (!request.begun) return status;
          return request.open->slot->End(status);
        });
    if (request.open != nullptr) Release(request, done.status());
    std::unique_ptr<Request> ended;
    {
      absl::MutexLock lock(&mu_);
      schedule_.Ended(id);
      ended = std::move(requests_.extract(id).mapped());
      changed_ = true;
    }
    // It is over for this thread, whatever becomes of what its caller is told.
    CatchThrown("the end of an answer", [&] {
      ended->job.done(std::move(done));
      return absl::OkStatus();
    }).IgnoreError();
  }

  // The decoder keeps the sequence; whatever is wrong with one that failed, the next job begins anew.
  void Release(Request& request, const absl::Status& status) {
    std::list<Pooled> closed;
    {
      absl::MutexLock lock(&mu_);
      Pooled& open = *request.open;
      open.busy = false;
      open.who = request.job.who;
      open.used = SteadyNow();
      const size_t prompt = request.job.prompt.size();
      const bool goes_on = request.job.resume && open.slot->sequence_tokens().size() >= prompt;
      open.prompt_tokens = goes_on ? static_cast<int64_t>(prompt) : 0;
      // What is refused was not begun.
      if (status.ok() || absl::IsCancelled(status) || absl::IsInvalidArgument(status)) return;
      TakeOutLocked([&](const Pooled& other) { return &other == &open; }, closed);
    }
    CloseAll(closed, /*park=*/false);
  }

  // --- Threads that may wait.

  void WorkBeside() {
    for (;;) {
      RequestId id = 0;
      Request* request = nullptr;
      {
        absl::MutexLock lock(&mu_);
        const auto ready = [this]() ABSL_SHARED_LOCKS_REQUIRED(mu_) {
          return stopping_ || sweep_ || !to_open_.empty();
        };
        mu_.AwaitWithTimeout(absl::Condition(&ready), kSweepEvery);
        if (!to_open_.empty()) {
          id = to_open_.front();
          to_open_.pop_front();
          request = requests_.at(id).get();
        } else if (stopping_) {
          return;
        }
      }
      if (request != nullptr) {
        const absl::Status opened = CatchThrown("an answer", [&] {
          return stopping_ ? Stopping() : Begin(*request, /*may_wait=*/true).status();
        });
        absl::MutexLock lock(&mu_);
        OpenedLocked(id, *request, opened);
      }
      CatchThrown("conversations", [&] {
        Sweep();
        return absl::OkStatus();
      }).IgnoreError();
    }
  }

  // Sets aside what decoders that are idle for long hold, and writes out what is to be in files.
  void Sweep() {
    std::vector<Pooled*> idle;
    const absl::Time now = SteadyNow();
    {
      absl::MutexLock lock(&mu_);
      if (!sweep_ && now - swept_ < kSweepEvery) return;
      sweep_ = false;
      swept_ = now;
      idle.reserve(open_.size());
      for (Pooled& open : open_) {
        if (open.busy || open.prompt_tokens == 0 || now - open.used <= config_.conversations.idle) {
          continue;
        }
        in_hands_.insert(open.context);
        open.busy = true;
        idle.push_back(&open);
      }
    }
    {
      const absl::Cleanup over = [&] {
        absl::MutexLock lock(&mu_);
        for (Pooled* const open : idle) {
          open->busy = false;
          in_hands_.erase(in_hands_.find(open->context));
        }
      };
      for (Pooled* const open : idle) Park(*open);
    }
    prefixes_.Sweep(now);
  }

  // --- Any of these threads.

  static absl::Status Stopping() { return absl::UnavailableError("the server is stopping"); }

  void OpenedLocked(RequestId id, Request& request, const absl::Status& status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    changed_ = true;
    if (status.ok() && !request.open->slot->done()) return schedule_.Opened(id);
    // What it lacks may be there when one of the others has ended.
    const bool no_room = absl::IsResourceExhausted(status) && request.open == nullptr;
    if (no_room && schedule_.NoRoom(id)) return;
    request.over = status;
    if (!no_room) schedule_.OpenFailed(id);
  }

  // Gives it a decoder, and the conversation that it goes on with. False: it did not begin, as that would wait for the
  // disk, or for a context to be opened; what it has is kept. The first answer behind a context takes its first step
  // here: rows are verified and keys are packed when they are first searched, which takes longer than opening.
  absl::StatusOr<bool> Begin(Request& request, bool may_wait) {
    const AnswerJob& job = request.job;
    if (request.open == nullptr) request.open = IdleOf(job, may_wait);
    if (request.open == nullptr) {
      if (!may_wait) return false;
      ASSIGN_OR_RETURN(request.open, NewDecoder(job.context, job.content_id));
    }
    Pooled& open = *request.open;
    const bool first = open.first && runner_->steps_beside();
    if (first && !may_wait) return false;
    if (job.with_sources() && !open.slot->has_document()) {
      if (!may_wait) return false;
      RETURN_IF_ERROR(open.slot->ReadDocument());
    }
    bool resume = job.resume && GoesOnWith(job, open);
    if (!resume && job.resume) {
      const SequenceOwner owner = {job.context, job.content_id, job.who, job.give_up};
      PrefixCache::Taken found = prefixes_.TakeFromMemory(owner, job.prompt);
      if (found.in_file) {
        if (!may_wait) return false;
        found.conversation = prefixes_.Take(owner, job.prompt);
      }
      resume = found.conversation.has_value();
      if (resume) {
        RETURN_IF_ERROR(open.slot->RestoreSequence(std::move(found.conversation->sequence)));
      }
    }
    request.begun = true;
    RETURN_IF_ERROR(open.slot->Begin(job, resume, request.start, stopping_));
    open.first = false;
    if (first) {
      Slot* const slot = open.slot.get();
      RETURN_IF_ERROR(runner_->Step({&slot, 1}).front());
    }
    return true;
  }

  // An idle decoder over the context; another's conversation in it is set aside at once. Null: there is none.
  Pooled* IdleOf(const AnswerJob& job, bool may_wait) {
    Pooled* idle = nullptr;
    {
      absl::MutexLock lock(&mu_);
      if (may_wait) AwaitHandsOffLocked(job.context);
      if (in_hands_.contains(job.context)) return nullptr;
      idle = IdleLocked(job);
      if (idle == nullptr || idle->prompt_tokens == 0 || GoesOnWith(job, *idle)) return idle;
      in_hands_.insert(job.context);
    }
    const absl::Cleanup over = [&] {
      absl::MutexLock lock(&mu_);
      in_hands_.erase(in_hands_.find(job.context));
    };
    Park(*idle);
    return idle;
  }

  // Room is made for it.
  absl::StatusOr<Pooled*> NewDecoder(const std::string& context, const std::string& content_id) {
    std::list<Pooled> closed;
    {
      absl::MutexLock lock(&mu_);
      TakeOutUnneededLocked(context, content_id, closed);
    }
    CloseAll(closed, /*park=*/true);
    absl::StatusOr<std::unique_ptr<Slot>> slot = runner_->Open(context, content_id);
    while (absl::IsResourceExhausted(slot.status()) && CloseIdlest(context)) {
      slot = runner_->Open(context, content_id);
    }
    RETURN_IF_ERROR(slot.status());
    const std::string holds = (*slot)->opened().content_id;
    absl::MutexLock lock(&mu_);
    Pooled open = {.context = context, .content_id = holds.empty() ? content_id : holds};
    open.number = ++opened_;
    open.slot = *std::move(slot);
    open.busy = true;
    open.first =
        !context.empty() && std::none_of(open_.begin(), open_.end(), [&](const Pooled& other) {
          return other.context == open.context && other.content_id == open.content_id;
        });
    return &open_.emplace_front(std::move(open));
  }

  // The best one whose conversation the prompt goes on with, else the one that was used longest ago; null: none is idle.
  Pooled* IdleLocked(const AnswerJob& job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    auto found = open_.end();
    for (auto open = open_.begin(); open != open_.end(); ++open) {
      if (open->busy || open->context != job.context || open->content_id != job.content_id)
        continue;
      found = open;
      if (GoesOnWith(job, *open)) break;
    }
    if (found == open_.end()) return nullptr;
    open_.splice(open_.begin(), open_, found);
    found->busy = true;
    return &*found;
  }

  // Of what the context was before, and of more contexts than are kept open.
  void TakeOutUnneededLocked(const std::string& context, const std::string& content_id,
                             std::list<Pooled>& closed) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    TakeOutLocked(
        [&](const Pooled& open) {
          return open.context == context && open.content_id != content_id;
        },
        closed);
    std::set<std::string> kept_open = {context};  // those used last
    for (const Pooled& open : open_) {
      if (static_cast<int64_t>(kept_open.size()) < config_.max_open_contexts) {
        kept_open.insert(open.context);
      }
    }
    TakeOutLocked([&](const Pooled& open) { return kept_open.count(open.context) == 0; }, closed);
  }

  // The decoder that waits for the longest makes room, but for those over the context. False: none waits.
  bool CloseIdlest(const std::string& but_of) {
    std::list<Pooled> closed;
    {
      absl::MutexLock lock(&mu_);
      const auto idlest = std::find_if(open_.rbegin(), open_.rend(), [&](const Pooled& open) {
        return !open.busy && open.context != but_of;
      });
      if (idlest == open_.rend()) return false;
      TakeOutLocked([&](const Pooled& open) { return &open == &*idlest; }, closed);
    }
    CloseAll(closed, /*park=*/true);
    return true;
  }

  // Idle decoders, which nobody finds any more; CloseAll is to follow.
  template <class Which>
  void TakeOutLocked(Which which, std::list<Pooled>& to) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    for (auto open = open_.begin(); open != open_.end();) {
      const auto next = std::next(open);
      if (!open->busy && which(*open)) {
        in_hands_.insert(open->context);
        to.splice(to.end(), open_, open);
      }
      open = next;
    }
  }

  // park: what they hold is set aside first.
  void CloseAll(std::list<Pooled>& closed, bool park) {
    const absl::Cleanup over = [&] {
      for (Pooled& open : closed) open.slot = nullptr;
      absl::MutexLock lock(&mu_);
      for (const Pooled& open : closed) in_hands_.erase(in_hands_.find(open.context));
    };
    if (!park) return;
    for (Pooled& open : closed) Park(open);
  }

  // Sets the decoder's conversation aside, in memory.
  void Park(Pooled& open) {
    if (open.prompt_tokens == 0) return;
    Conversation conversation;
    conversation.sequence = open.slot->SaveSequence();
    conversation.owner = {open.context, open.content_id, open.who, conversation.sequence.given_up};
    conversation.prompt_tokens = std::exchange(open.prompt_tokens, 0);
    if (!prefixes_.Put(std::move(conversation), open.used)) return;
    absl::MutexLock lock(&mu_);
    sweep_ = true;
  }

  // Until nobody closes a decoder of the context, or takes a conversation out of one: what it was about is found then.
  void AwaitHandsOffLocked(const std::string& context) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    const auto off = [&]() ABSL_SHARED_LOCKS_REQUIRED(mu_) { return !in_hands_.contains(context); };
    mu_.Await(absl::Condition(&off));
  }

  static bool GoesOnWith(const AnswerJob& job, const Pooled& open) {
    return open.who == job.who && open.slot->given_up() == job.give_up &&
           GoesOn(job.prompt, open.slot->sequence_tokens(), open.prompt_tokens);
  }

  const SchedulerConfig config_;
  const std::unique_ptr<Runner> runner_;
  PrefixCache prefixes_;
  std::atomic<bool> stopping_{false};  // set under mu_
  mutable absl::Mutex mu_;
  Schedule schedule_ ABSL_GUARDED_BY(mu_);
  std::map<RequestId, std::unique_ptr<Request>> requests_ ABSL_GUARDED_BY(mu_);
  RequestId last_id_ ABSL_GUARDED_BY(mu_) = 0;
  bool prepared_ ABSL_GUARDED_BY(mu_) = false;          // the runner is
  bool changed_ ABSL_GUARDED_BY(mu_) = false;           // there may be something to plan
  std::deque<RequestId> to_open_ ABSL_GUARDED_BY(mu_);  // by a thread that may wait
  std::list<Pooled> open_ ABSL_GUARDED_BY(mu_);         // the one used last is first
  int64_t opened_ ABSL_GUARDED_BY(mu_) = 0;             // decoders, so far
  // Contexts of decoders that are being closed, or whose conversation is being set aside; once for each.
  std::multiset<std::string> in_hands_ ABSL_GUARDED_BY(mu_);
  bool sweep_ ABSL_GUARDED_BY(mu_) = false;  // at once: too much is in memory
  absl::Time swept_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  std::thread step_thread_;
  std::vector<std::thread> openers_;
};

}  // namespace

std::unique_ptr<Scheduler> Scheduler::Create(SchedulerConfig config,
                                             std::unique_ptr<Runner> runner) {
  return std::make_unique<StepScheduler>(std::move(config), std::move(runner));
}

std::unique_ptr<Scheduler> Scheduler::Create(SchedulerConfig config,
                                             std::shared_ptr<library::LoadedModel> model,
                                             std::shared_ptr<library::StoreAccess> store) {
  auto runner = MakeDecoderRunner(config.decoders, std::move(model), std::move(store));
  return Create(std::move(config), std::move(runner));
}

}  // namespace carrel::serving
