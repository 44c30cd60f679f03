// The scheduler over a runner without a model: slots that count tokens, and contexts that open when the test says so.
#include "serving/scheduler.h"

#include <algorithm>
#include <map>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "common/test_folders.h"
#include "common/test_util.h"

namespace carrel::serving {
namespace {

using absl::StatusCode;
using testing::ElementsAre;

// What the slots of a runner share with its test.
struct World {
  absl::Mutex mu;
  // How opening a context ends, the first time first; none: well.
  std::map<std::string, std::vector<absl::Status>> opening ABSL_GUARDED_BY(mu);
  std::set<std::string> held ABSL_GUARDED_BY(mu);  // contexts that do not open yet
  int open ABSL_GUARDED_BY(mu) = 0;                // slots
  std::vector<std::string> opened ABSL_GUARDED_BY(mu);
  std::set<std::thread::id> openers ABSL_GUARDED_BY(mu), steppers ABSL_GUARDED_BY(mu);
  size_t widest_step ABSL_GUARDED_BY(mu) = 0;
  bool step_throws ABSL_GUARDED_BY(mu) = false;
  bool steps_beside = false;
  std::string held_step ABSL_GUARDED_BY(mu);  // the context whose answers' steps do not end yet

  void Hold(const std::string& context) {
    absl::MutexLock lock(&mu);
    held.insert(context);
  }
  void LetGo(const std::string& context) {
    absl::MutexLock lock(&mu);
    held.erase(context);
  }
  void FailOnce(const std::string& context, const absl::Status& status) {
    absl::MutexLock lock(&mu);
    opening[context].push_back(status);
  }
  int slots() {
    absl::MutexLock lock(&mu);
    return open;
  }
  std::vector<std::string> contexts() {
    absl::MutexLock lock(&mu);
    return opened;
  }
};

// Reads two tokens of its prompt in a step, and then gives a token "x" in each.
class FakeSlot final : public Slot {
 public:
  FakeSlot(World* world, std::string context) : world_(world), context_(std::move(context)) {
    absl::MutexLock lock(&world_->mu);
    ++world_->open;
  }
  ~FakeSlot() override {
    absl::MutexLock lock(&world_->mu);
    --world_->open;
  }

  absl::Span<const TokenId> sequence_tokens() const override { return sequence_; }
  int64_t given_up() const override { return given_up_; }
  decoder::SavedSequence SaveSequence() const override {
    return {given_up_, sequence_, std::vector<float>(sequence_.size() * 10, 1)};
  }
  absl::Status RestoreSequence(decoder::SavedSequence sequence) override {
    if (sequence.rows != std::vector<float>(sequence.tokens.size() * 10, 1)) {
      return absl::DataLossError("other rows");
    }
    given_up_ = sequence.given_up;
    sequence_ = std::move(sequence.tokens);
    return absl::OkStatus();
  }
  bool has_document() const override { return document_; }
  absl::Status ReadDocument() override {
    absl::MutexLock lock(&world_->mu);
    world_->openers.insert(std::this_thread::get_id());
    document_ = true;
    return absl::OkStatus();
  }

  absl::Status Begin(const AnswerJob& job, bool resume, absl::Time,
                     const std::atomic<bool>& stopping) override {
    job_ = &job;
    stopping_ = &stopping;
    done_ = AnswerJob::Done();
    finished_ = ended_ = false;
    given_up_ = job.give_up;
    size_t same = 0;
    if (resume) {
      const size_t most = std::min(sequence_.size(), job.prompt.size() - 1);
      while (same < most && sequence_[same] == job.prompt[same]) ++same;
    }
    sequence_.resize(same);
    done_.resumed_tokens = static_cast<int64_t>(same);
    return absl::OkStatus();
  }
  Schedule::Progress progress() const override {
    const bool prompt = sequence_.size() < job_->prompt.size();
    return {prompt ? 2 : 1, prompt};
  }
  bool done() const override { return finished_; }
  absl::StatusOr<AnswerJob::Done> End(const absl::Status& status) override {
    if (!ended_ && !status.ok()) return status;
    done_.at_max_tokens = !ended_;
    return done_;
  }

  absl::Status Step() {
    {
      absl::MutexLock lock(&world_->mu);
      const auto free = [&]() ABSL_SHARED_LOCKS_REQUIRED(world_->mu) {
        return context_.empty() || world_->held_step != context_;
      };
      world_->mu.Await(absl::Condition(&free));
    }
    if (*stopping_ || !job_->wanted()) return absl::CancelledError("nobody wants it");
    const std::vector<TokenId>& prompt = job_->prompt;
    for (int i = 0; i < 2 && sequence_.size() < prompt.size(); ++i) {
      sequence_.push_back(prompt[sequence_.size()]);
    }
    if (sequence_.size() < prompt.size()) return absl::OkStatus();
    if (!done_.result.ids.empty()) sequence_.push_back(7);
    done_.result.ids.push_back(7);
    if (!job_->on_text("x")) {
      ended_ = true;
      return absl::CancelledError("it was ended");
    }
    finished_ = std::ssize(done_.result.ids) >= job_->max_tokens;
    return absl::OkStatus();
  }

 private:
  World* const world_;
  const std::string context_;
  const AnswerJob* job_ = nullptr;
  const std::atomic<bool>* stopping_ = nullptr;
  AnswerJob::Done done_;
  std::vector<TokenId> sequence_;
  int64_t given_up_ = 0;
  bool finished_ = false, ended_ = false, document_ = false;
};

class FakeRunner final : public Runner {
 public:
  explicit FakeRunner(World* world) : world_(world) {}

  absl::StatusOr<std::unique_ptr<Slot>> Open(const std::string& context,
                                             const std::string&) override {
    {
      absl::MutexLock lock(&world_->mu);
      world_->openers.insert(std::this_thread::get_id());
      world_->opened.push_back(context);
      const auto free = [&]() ABSL_SHARED_LOCKS_REQUIRED(world_->mu) {
        return !world_->held.contains(context);
      };
      world_->mu.Await(absl::Condition(&free));
      std::vector<absl::Status>& ends = world_->opening[context];
      if (!ends.empty()) {
        const absl::Status end = ends.front();
        ends.erase(ends.begin());
        if (!end.ok()) return end;
      }
    }
    return std::make_unique<FakeSlot>(world_, context);
  }

  bool steps_beside() const override { return world_->steps_beside; }

  std::vector<absl::Status> Step(absl::Span<Slot* const> slots) override {
    {
      absl::MutexLock lock(&world_->mu);
      world_->steppers.insert(std::this_thread::get_id());
      world_->widest_step = std::max(world_->widest_step, slots.size());
      if (std::exchange(world_->step_throws, false)) throw std::runtime_error("planted");
    }
    std::vector<absl::Status> statuses;
    for (Slot* const slot : slots) statuses.push_back(static_cast<FakeSlot*>(slot)->Step());
    return statuses;
  }

 private:
  World* const world_;
};

// A question whose answer the test waits for.
struct Asked {
  std::atomic<bool> wanted{true};
  std::atomic<int64_t> pieces{0};
  absl::Notification over;
  absl::StatusOr<AnswerJob::Done> done = absl::UnknownError("");

  const absl::StatusOr<AnswerJob::Done>& Wait() {
    over.WaitForNotification();
    return done;
  }
};

constexpr int64_t kEndless = int64_t{1} << 60;  // tokens

class SchedulerTest : public testing::Test {
 protected:
  void Start(SchedulerConfig config = {}) {
    config.conversations.folder = testing::TempDir();
    scheduler_ = Scheduler::Create(config, std::make_unique<FakeRunner>(&world_));
  }

  AnswerJob Job(const std::string& context, std::vector<TokenId> prompt, Asked& asked,
                int64_t max_tokens = 3) {
    AnswerJob job;
    job.context = context;
    job.prompt = std::move(prompt);
    job.max_tokens = max_tokens;
    job.wanted = [&asked] { return asked.wanted.load(); };
    job.on_text = [&asked](const std::string&) {
      ++asked.pieces;
      return true;
    };
    job.done = [&asked](const absl::StatusOr<AnswerJob::Done>& done) {
      asked.done = done;
      asked.over.Notify();
    };
    return job;
  }
  void Ask(const std::string& context, std::vector<TokenId> prompt, Asked& asked,
           int64_t max_tokens = 3) {
    CARREL_ASSERT_OK(scheduler_->Submit(Job(context, std::move(prompt), asked, max_tokens)));
  }
  // How many tokens of the prompt were known.
  int64_t Resumed(const std::string& context, std::vector<TokenId> prompt,
                  const std::string& who = "") {
    Asked asked;
    AnswerJob job = Job(context, std::move(prompt), asked);
    job.who = who;
    const absl::Status submitted = scheduler_->Submit(std::move(job));
    if (!submitted.ok()) return -1;
    const auto& done = asked.Wait();
    EXPECT_TRUE(done.ok()) << done.status();
    return done.ok() ? done->resumed_tokens : -1;
  }
  template <class What>
  static bool Until(What what) {
    for (int i = 0; i < 5000; ++i) {
      if (what()) return true;
      absl::SleepFor(absl::Milliseconds(2));
    }
    return false;
  }
  void UntilItOpens(const std::string& context) {
    ASSERT_TRUE(Until([&] {
      const std::vector<std::string> opened = world_.contexts();
      return std::find(opened.begin(), opened.end(), context) != opened.end();
    }));
  }

  World world_;
  std::unique_ptr<Scheduler> scheduler_;
};

TEST_F(SchedulerTest, Open_OpensAsManyAsAreAskedFor_WhichQuestionsFind) {
  Start({.max_open_contexts = 1});
  for (const int64_t count : {2, 1, 2}) {
    CARREL_EXPECT_OK(scheduler_->Open("novel", "", count).status());
    EXPECT_EQ(world_.slots(), 2);
  }
  CARREL_EXPECT_OK(scheduler_->Open("novel", "", 3).status());
  Asked asked;
  Ask("novel", {1, 2, 3}, asked);
  CARREL_EXPECT_OK(asked.Wait().status());
  EXPECT_EQ(world_.slots(), 3) << "the question opened none";
  CARREL_EXPECT_OK(scheduler_->Open("other", "", 1).status());
  EXPECT_EQ(world_.slots(), 1) << "one context stays open";
  world_.FailOnce("third", absl::NotFoundError("no context"));
  EXPECT_EQ(scheduler_->Open("third", "", 1).status().code(), StatusCode::kNotFound);
}

// Else two would make room for one another for ever.
TEST_F(SchedulerTest, Open_OfMoreThanThereIsRoomFor_ClosesOthersAndFails) {
  Start({.max_open_contexts = 2});
  CARREL_EXPECT_OK(scheduler_->Open("other", "", 1).status());
  CARREL_EXPECT_OK(scheduler_->Open("novel", "", 1).status());
  world_.FailOnce("novel", absl::ResourceExhaustedError("the GPU is full"));
  CARREL_EXPECT_OK(scheduler_->Open("novel", "", 2).status());
  EXPECT_EQ(world_.slots(), 2) << "the other one made room";
  world_.FailOnce("novel", absl::ResourceExhaustedError("the GPU is full"));
  EXPECT_THAT(scheduler_->Open("novel", "", 3), StatusIs(StatusCode::kResourceExhausted, "full"));
  EXPECT_EQ(world_.slots(), 2);
}

TEST_F(SchedulerTest, AQuestionThatBeginsAnew_LeavesNothingToGoOnWith) {
  Start();
  Asked anew;
  AnswerJob job = Job("novel", {1, 2, 3}, anew);
  job.resume = false;
  CARREL_ASSERT_OK(scheduler_->Submit(std::move(job)));
  CARREL_EXPECT_OK(anew.Wait().status());
  EXPECT_EQ(Resumed("novel", {1, 2, 3, 7, 7, 4}), 0);
  EXPECT_GT(Resumed("novel", {1, 2, 3, 7, 7, 4, 7, 7, 5}), 0);
}

TEST_F(SchedulerTest, AQuestion_HasItsAnswer) {
  Start();
  Asked asked;
  Ask("novel", {1, 2, 3}, asked, 5);
  const auto& done = asked.Wait();
  CARREL_ASSERT_OK(done);
  EXPECT_THAT(done->result.ids, testing::SizeIs(5));
  EXPECT_EQ(asked.pieces, 5);
  EXPECT_TRUE(done->at_max_tokens);
  ASSERT_TRUE(Until([&] { return scheduler_->answering() == 0; }));
  EXPECT_FALSE(scheduler_->Reads("novel"));
}

TEST_F(SchedulerTest, ManyQuestions_GoOnTogether_EachWithADecoderOfItsOwn) {
  Start({.max_answers = 8});
  Asked asked[20];
  for (Asked& one : asked) Ask("novel", {1, 2, 3}, one, kEndless);
  EXPECT_TRUE(Until([&] {
    absl::MutexLock lock(&world_.mu);
    return world_.widest_step == 8;
  }));
  EXPECT_EQ(scheduler_->waiting(), 12);
  for (Asked& one : asked) one.wanted = false;
  for (Asked& one : asked) one.Wait();
  EXPECT_EQ(world_.slots(), 8);
}

TEST_F(SchedulerTest, WhileAContextOpens_OthersGoOnAndEnd) {
  Start();
  world_.Hold("slow");
  Asked running, slow, next;
  Ask("novel", {1, 2, 3}, running, kEndless);
  Ask("slow", {1, 2, 3}, slow);
  UntilItOpens("slow");
  const int64_t before = running.pieces;
  EXPECT_TRUE(Until([&] { return running.pieces > before + 100; })) << "steps go on";
  running.wanted = false;
  EXPECT_THAT(running.Wait(), StatusIs(StatusCode::kCancelled, ""));
  // Nor is a question over a decoder that is open behind it.
  Ask("novel", {4, 5}, next);
  CARREL_EXPECT_OK(next.Wait());
  EXPECT_FALSE(slow.over.HasBeenNotified());
  EXPECT_EQ(scheduler_->answering(), 1);
  world_.LetGo("slow");
  CARREL_EXPECT_OK(slow.Wait());
  absl::MutexLock lock(&world_.mu);
  for (const std::thread::id id : world_.openers) EXPECT_FALSE(world_.steppers.contains(id));
}

// What is searched for the first time is verified and packed then, which takes longer than opening.
TEST_F(SchedulerTest, TheFirstStepBehindAContext_IsTakenBesideTheOthers) {
  world_.steps_beside = true;
  Start();
  Asked running, first, second;
  Ask("", {1, 2, 3}, running, kEndless);
  ASSERT_TRUE(Until([&] { return running.pieces > 0; }));
  {
    absl::MutexLock lock(&world_.mu);
    world_.held_step = "cold";
  }
  Ask("cold", {1, 2, 3}, first);
  UntilItOpens("cold");
  const int64_t before = running.pieces;
  EXPECT_TRUE(Until([&] { return running.pieces > before + 100; })) << "steps go on";
  {
    absl::MutexLock lock(&world_.mu);
    world_.held_step = "";
  }
  CARREL_EXPECT_OK(first.Wait());
  EXPECT_THAT(first.done->result.ids, testing::SizeIs(3));
  Ask("cold", {4}, second);
  CARREL_EXPECT_OK(second.Wait());
  running.wanted = false;
  running.Wait();
}

TEST_F(SchedulerTest, AnAnswerOfOneToken_EndsWithItsFirstStep) {
  world_.steps_beside = true;
  Start();
  for (const char* context : {"a", "b"}) {
    Asked asked;
    Ask(context, {1}, asked, 1);
    CARREL_ASSERT_OK(asked.Wait());
    EXPECT_THAT(asked.done->result.ids, testing::SizeIs(1));
    EXPECT_TRUE(asked.done->at_max_tokens);
  }
  EXPECT_EQ(scheduler_->answering(), 0);
}

TEST_F(SchedulerTest, SeveralOpeners_OpenBesideOneAnother) {
  Start({.openers = 2});
  world_.Hold("slow");
  Asked slow, other;
  Ask("slow", {1}, slow);
  UntilItOpens("slow");
  Ask("other", {1}, other);
  CARREL_EXPECT_OK(other.Wait());
  EXPECT_FALSE(slow.over.HasBeenNotified());
  world_.LetGo("slow");
  CARREL_EXPECT_OK(slow.Wait());
}

TEST_F(SchedulerTest, SourcesOfADocument_AreReadBesideTheSteps) {
  Start();
  for (int i = 0; i < 2; ++i) {
    Asked asked;
    AnswerJob job = Job("novel", {1, 2}, asked);
    job.sources = 3;
    CARREL_ASSERT_OK(scheduler_->Submit(std::move(job)));
    CARREL_EXPECT_OK(asked.Wait());
  }
  absl::MutexLock lock(&world_.mu);
  for (const std::thread::id id : world_.openers) EXPECT_FALSE(world_.steppers.contains(id));
}

TEST_F(SchedulerTest, NobodyWantsItAnyMoreWhileItOpens_ItEnds_AndTheDecoderStays) {
  Start();
  world_.Hold("slow");
  Asked left, next;
  Ask("slow", {1, 2, 3}, left);
  UntilItOpens("slow");
  left.wanted = false;
  EXPECT_FALSE(left.over.HasBeenNotified());
  world_.LetGo("slow");
  EXPECT_THAT(left.Wait(), StatusIs(StatusCode::kCancelled, ""));
  EXPECT_EQ(left.pieces, 0);
  Ask("slow", {4}, next);
  CARREL_EXPECT_OK(next.Wait());
  EXPECT_THAT(world_.contexts(), ElementsAre("slow"));
}

TEST_F(SchedulerTest, NobodyWantsItWhenItsTurnComes_NothingIsOpened) {
  Start();
  Asked left;
  left.wanted = false;
  Ask("novel", {1}, left);
  EXPECT_THAT(left.Wait(), StatusIs(StatusCode::kCancelled, "nobody waits"));
  EXPECT_THAT(world_.contexts(), ElementsAre());
}

TEST_F(SchedulerTest, WhileItOpens_AContextIsReadAndCannotBeClosed) {
  Start();
  world_.Hold("novel");
  Asked asked;
  Ask("novel", {1}, asked);
  UntilItOpens("novel");
  EXPECT_TRUE(scheduler_->Reads("novel"));
  EXPECT_THAT(scheduler_->Close("novel"),
              StatusIs(StatusCode::kFailedPrecondition, "is being read"));
  world_.LetGo("novel");
  CARREL_EXPECT_OK(asked.Wait());
  ASSERT_TRUE(Until([&] { return !scheduler_->Reads("novel"); }));
  EXPECT_EQ(world_.slots(), 1);
  CARREL_EXPECT_OK(scheduler_->Close("novel"));
  EXPECT_EQ(world_.slots(), 0) << "nothing of it is open";
}

TEST_F(SchedulerTest, AClosedContext_IsForgottenWithItsConversations) {
  Start();
  EXPECT_EQ(Resumed("novel", {1, 2, 3}), 0);
  EXPECT_EQ(Resumed("novel", {1, 2, 3, 7, 7, 8}), 5);
  EXPECT_EQ(Resumed("novel", {9}), 0);  // the conversation is set aside
  EXPECT_EQ(scheduler_->prefixes().in_memory(), 1);
  CARREL_EXPECT_OK(scheduler_->Close("novel"));
  EXPECT_EQ(scheduler_->prefixes().in_memory(), 0);
  EXPECT_EQ(Resumed("novel", {1, 2, 3, 7, 7, 8, 7, 7, 9}), 0);
}

TEST_F(SchedulerTest, ItEndsWhileAContextOpens_EverybodyIsTold) {
  Start({.max_answers = 1});
  world_.Hold("slow");
  Asked slow, waiting;
  Ask("slow", {1}, slow);
  UntilItOpens("slow");
  Ask("slow", {1}, waiting);
  std::thread ends([&] { scheduler_.reset(); });
  EXPECT_THAT(waiting.Wait(), StatusIs(StatusCode::kUnavailable, "stopping"));
  EXPECT_FALSE(slow.over.HasBeenNotified()) << "it is in the opener's hands";
  world_.LetGo("slow");
  slow.Wait();
  ends.join();
  EXPECT_EQ(slow.pieces, 0);
  EXPECT_EQ(world_.slots(), 0);
}

TEST_F(SchedulerTest, ItEndsWhileSeveralWaitToBeOpened_EverybodyIsTold) {
  Start();
  world_.Hold("a");
  Asked running, asked[3];
  Ask("", {1}, running, kEndless);
  ASSERT_TRUE(Until([&] { return running.pieces > 0; }));
  Ask("a", {1}, asked[0]);
  UntilItOpens("a");
  Ask("b", {1}, asked[1]);
  Ask("c", {1}, asked[2]);
  ASSERT_TRUE(Until([&] { return scheduler_->waiting() == 0; }));
  std::thread ends([&] { scheduler_.reset(); });
  running.Wait();  // it is stopping
  world_.LetGo("a");
  ends.join();
  for (Asked& one : asked) EXPECT_TRUE(one.over.HasBeenNotified());
  EXPECT_THAT(asked[1].done, StatusIs(StatusCode::kUnavailable, "stopping"));
  EXPECT_THAT(asked[2].done, StatusIs(StatusCode::kUnavailable, "stopping"));
}

// Half an answer must not look like a whole one.
TEST_F(SchedulerTest, ItEndsInTheMiddleOfAnAnswer_WhichFails) {
  Start();
  Asked asked;
  Ask("", {1}, asked, kEndless);
  ASSERT_TRUE(Until([&] { return asked.pieces > 3; }));
  scheduler_.reset();
  EXPECT_THAT(asked.Wait(), StatusIs(StatusCode::kUnavailable, "stopping"));
}

TEST_F(SchedulerTest, AContextThatIsGone_FailsAlone) {
  Start();
  world_.FailOnce("gone", absl::NotFoundError("no context \"gone\""));
  Asked gone, there;
  Ask("there", {1}, there, 200);
  Ask("gone", {1}, gone);
  EXPECT_THAT(gone.Wait(), StatusIs(StatusCode::kNotFound, "no context"));
  CARREL_EXPECT_OK(there.Wait());
  ASSERT_TRUE(Until([&] { return scheduler_->answering() == 0; }));
  EXPECT_FALSE(scheduler_->Reads("gone"));
}

TEST_F(SchedulerTest, WithoutRoom_ItWaitsUntilOneEnds) {
  Start();
  Asked running, waits;
  Ask("a", {1}, running, kEndless);
  ASSERT_TRUE(Until([&] { return running.pieces > 0; }));
  world_.FailOnce("b", absl::ResourceExhaustedError("the GPU is full"));
  Ask("b", {1}, waits);
  UntilItOpens("b");
  ASSERT_TRUE(Until([&] { return scheduler_->waiting() == 1; })) << "put back";
  EXPECT_TRUE(scheduler_->Reads("b"));
  running.wanted = false;
  running.Wait();
  CARREL_EXPECT_OK(waits.Wait());
}

TEST_F(SchedulerTest, WithoutRoomAlone_ItIsToldSo) {
  Start();
  Asked asked;
  world_.FailOnce("a", absl::ResourceExhaustedError("the GPU is full"));
  Ask("a", {1}, asked);
  EXPECT_THAT(asked.Wait(), StatusIs(StatusCode::kResourceExhausted, "full"));
}

TEST_F(SchedulerTest, WithoutRoom_IdleDecodersAreClosed_AndTheirConversationsGoOn) {
  Start();
  EXPECT_EQ(Resumed("a", {1, 2, 3}), 0);
  ASSERT_TRUE(Until([&] { return scheduler_->answering() == 0; }));
  world_.FailOnce("b", absl::ResourceExhaustedError("the GPU is full"));
  EXPECT_EQ(Resumed("b", {1}), 0);
  EXPECT_EQ(world_.slots(), 1);
  EXPECT_EQ(scheduler_->prefixes().in_memory(), 1);
  EXPECT_EQ(Resumed("a", {1, 2, 3, 7, 7, 4}), 5);
}

TEST_F(SchedulerTest, OfMoreContextsThanStayOpen_TheOneUsedLongestAgoIsClosed) {
  Start({.max_open_contexts = 2});
  for (const char* context : {"a", "b", "a", "c"}) Resumed(context, {1});
  EXPECT_EQ(world_.slots(), 2);
  Resumed("a", {2});
  EXPECT_THAT(world_.contexts(), ElementsAre("a", "b", "c"));
  Resumed("b", {2});
  EXPECT_THAT(world_.contexts(), ElementsAre("a", "b", "c", "b"));
}

// Decision 069: a conversation's own next turn, and nothing else.
TEST_F(SchedulerTest, OnlyAConversationsOwnTurnIsResumed) {
  Start();
  EXPECT_EQ(Resumed("novel", {1, 2, 3}, "me"), 0);
  EXPECT_EQ(Resumed("novel", {1, 2, 3}, "me"), 0) << "the same question again";
  EXPECT_EQ(Resumed("novel", {1, 2, 4}, "me"), 0) << "a common beginning";
  EXPECT_EQ(Resumed("novel", {1, 2, 4, 5}, "you"), 0) << "another key";
  EXPECT_EQ(Resumed("other", {1, 2, 4, 5}, "me"), 0) << "another document";
  EXPECT_EQ(Resumed("novel", {1, 2, 4, 7, 7, 5}, "me"), 5);
}

TEST_F(SchedulerTest, AConversation_GoesOnWhoeverCameBetween) {
  Start({.max_answers = 1});
  EXPECT_EQ(Resumed("novel", {1, 2, 3}), 0);
  for (TokenId other = 10; other < 14; ++other) EXPECT_EQ(Resumed("novel", {other}), 0);
  EXPECT_EQ(scheduler_->prefixes().in_memory(), 4);
  EXPECT_EQ(Resumed("novel", {1, 2, 3, 7, 7, 8}), 5);
  EXPECT_THAT(world_.contexts(), ElementsAre("novel"));
}

// Whatever is opened, closed, parked and written at the same time: a next turn finds its past, for its bits rest on it.
TEST_F(SchedulerTest, ManyConversations_EachTurnFindsItsPast) {
  for (const int64_t memory_bytes : {int64_t{0}, int64_t{1} << 20}) {
    world_.steps_beside = memory_bytes == 0;
    Start({.max_answers = 3,
           .max_open_contexts = 2,
           .openers = 2,
           .conversations = {.memory_bytes = memory_bytes, .idle = absl::ZeroDuration()}});
    std::vector<std::thread> users;
    for (TokenId user = 0; user < 6; ++user) {
      users.emplace_back([&, user] {
        const std::string context(1, static_cast<char>('a' + user % 3));
        std::vector<TokenId> prompt = {user, 1, 2};
        int64_t known = 0;
        for (TokenId turn = 0; turn < 40; ++turn) {
          Asked asked;
          AnswerJob job = Job(context, prompt, asked);
          job.who = std::string(1, static_cast<char>('u' + user));
          job.sources = turn % 7 == 3 ? 1 : 0;
          CARREL_ASSERT_OK(scheduler_->Submit(std::move(job)));
          CARREL_ASSERT_OK(asked.Wait());
          ASSERT_EQ(asked.done->resumed_tokens, known) << "user " << user << ", turn " << turn;
          known = static_cast<int64_t>(prompt.size()) + 2;
          prompt.insert(prompt.end(), {7, 7, 100 + turn});
        }
      });
    }
    for (std::thread& user : users) user.join();
    scheduler_.reset();
  }
}

TEST_F(SchedulerTest, AConversationInAFile_GoesOn_ReadBesideTheSteps) {
  Start({.conversations = {.memory_bytes = 0}});
  EXPECT_EQ(Resumed("novel", {1, 2, 3}), 0);
  EXPECT_EQ(Resumed("novel", {9}), 0);
  ASSERT_TRUE(Until([&] { return scheduler_->prefixes().in_files() == 1; }));
  EXPECT_EQ(Resumed("novel", {1, 2, 3, 7, 7, 8}), 5);
}

TEST_F(SchedulerTest, AnIdleConversation_IsWrittenToAFile) {
  Start({.conversations = {.idle = absl::ZeroDuration()}});
  EXPECT_EQ(Resumed("novel", {1, 2, 3}), 0);
  ASSERT_TRUE(Until([&] { return scheduler_->prefixes().in_files() == 1; }));
  EXPECT_EQ(Resumed("novel", {1, 2, 3, 7, 7, 8}), 5);
  EXPECT_THAT(world_.contexts(), ElementsAre("novel"));
}

TEST_F(SchedulerTest, AContextOfOtherContent_IsOpenedAnew) {
  Start();
  for (const char* content : {"1", "1", "2"}) {
    Asked asked;
    AnswerJob job = Job("novel", {1}, asked);
    job.content_id = content;
    CARREL_ASSERT_OK(scheduler_->Submit(std::move(job)));
    CARREL_EXPECT_OK(asked.Wait());
    ASSERT_TRUE(Until([&] { return scheduler_->answering() == 0; }));
  }
  EXPECT_THAT(world_.contexts(), ElementsAre("novel", "novel"));
  EXPECT_EQ(world_.slots(), 1) << "what it was before is closed";
}

TEST_F(SchedulerTest, AStepThatThrows_EndsThoseThatTookIt_AndTheSchedulerLives) {
  Start();
  Asked thrown, next;
  Ask("novel", {1}, thrown, kEndless);
  ASSERT_TRUE(Until([&] { return thrown.pieces > 0; }));
  {
    absl::MutexLock lock(&world_.mu);
    world_.step_throws = true;
  }
  EXPECT_THAT(thrown.Wait(), StatusIs(StatusCode::kInternal, "planted"));
  EXPECT_TRUE(Until([&] { return world_.slots() == 0; })) << "whatever is wrong with its decoder";
  Ask("novel", {1}, next);
  CARREL_EXPECT_OK(next.Wait());
}

}  // namespace
}  // namespace carrel::serving
