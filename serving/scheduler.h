// What:   answers over the contexts of one store by one model. Many run at a time: each step takes a token of every
//         answer that has read its prompt, and blocks of prompts (runner.h). A step is batch-invariant, whoever joins
//         or leaves. The decoders used last stay open, and a conversation's next turn resumes behind its last one.
//         schedule.h decides what is done next.
// Turns:  waiting questions begin by turns (turn_queue.h): max_answers places, and a quarter more. Steps are shared by
//         turns too: step_plan.h.
// Errors: as runner.h; ResourceExhausted as many wait as may, in all or of one turn. An exception of a callback ends
//         its own job only. An exception of a step itself (memory) ends all jobs in it: how far each came is not known,
//         and a second reading could have other bits.
// Threads: any submits, and opens. The step thread takes steps and never waits for the disk. `openers` threads beside it open
//         contexts, take the first step behind a context that no decoder had open, and read and write files of
//         conversations; the answer joins a later step. Where a decoder is open and its conversation is in memory, the
//         step thread begins the question itself.
// Ownership: keeps model and store.
// Example: const auto scheduler = Scheduler::Create({.max_answers = 16}, model, store);
//          RETURN_IF_ERROR(scheduler->Submit(std::move(job)));   // job.done is told
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "serving/answer_job.h"
#include "serving/prefix_cache.h"
#include "serving/runner.h"

namespace carrel::serving {

struct SchedulerConfig {
  library::DecoderSpec decoders;            // as MakeDecoderRunner has them
  int64_t max_waiting = 1024;               // jobs; one more is refused
  int64_t max_waiting_of_turn = INT64_MAX;  // of these, of one turn
  int64_t max_answers = 16;                 // on their way at a time, each with a decoder; 1 ..
  int64_t max_open_contexts = 4;            // whose decoders are kept while they are idle; 1 ..
  int64_t openers = 1;                      // threads; 1 ..
  PrefixCacheConfig conversations;
};

class Scheduler {
 public:
  // store: null: there are no contexts.
  static std::unique_ptr<Scheduler> Create(SchedulerConfig config,
                                           std::shared_ptr<library::LoadedModel> model,
                                           std::shared_ptr<library::StoreAccess> store);
  static std::unique_ptr<Scheduler> Create(SchedulerConfig config, std::unique_ptr<Runner> runner);
  // Jobs that wait or open are done with Unavailable. What is being opened is waited for.
  virtual ~Scheduler() = default;
  virtual absl::Status Submit(AnswerJob job) = 0;
  // Opens the context on the calling thread, until so many decoders over it are open; a job of the content id that it
  // returns finds one. content_id: what it must hold, or the id's first digits; empty: whatever it holds.
  virtual absl::StatusOr<OpenedContext> Open(const std::string& context,
                                             const std::string& content_id, int64_t count) = 0;
  // Of all decoders that are open. While no answer is on its way.
  virtual decoder::Statistics statistics() const = 0;
  virtual int64_t waiting() const = 0;
  virtual int64_t answering() const = 0;  // on their way, those that open among them
  // What is known of prompts: documents are added by Documents; the conversations are those that wait for their next
  // turn, beside those that decoders hold.
  virtual PrefixCache& prefixes() = 0;
  // Lets go of the context, so that it can be deleted. FailedPrecondition: answers read it, open it, or wait to.
  virtual absl::Status Close(const std::string& context) = 0;
  // Whether answers read it, or wait to; else Close would let go of it.
  virtual bool Reads(const std::string& context) const = 0;
};

}  // namespace carrel::serving
