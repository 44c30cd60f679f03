// What:   what a scheduler needs of a model: decoders over contexts (slots), and steps of many of them together.
// Errors: Open: as library/open_decoder.h; ResourceExhausted: there is no room for one more. A step fails for each slot alone;
//         what it throws ends all that took it.
// Threads: Open: any. A slot: one at a time, and Step's are among its users.
// Ownership: the runner outlives its slots; a job outlives the answer that was begun for it.
// Cost:   Open and ReadDocument wait for the disk, and may take seconds; nothing else does.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "decoder/decoder.h"
#include "library/derived_weights.h"
#include "library/loaded_model.h"
#include "library/open_decoder.h"
#include "library/store_access.h"
#include "serving/answer_job.h"
#include "serving/schedule.h"

namespace carrel::decoder {
class Generation;
}

namespace carrel::serving {

// A context as a decoder has it open; the model alone has no tokens.
struct OpenedContext {
  std::string content_id;  // empty: of an old format
  int64_t tokens = 0;
  std::string method;                 // how rows are chosen here; empty where the store searches
  std::optional<decoder::Plan> plan;  // none: the way to attend was not planned
  std::optional<library::DerivedWeights> derived;  // none: the weights are the context's own
};

// A decoder over one context, and the sequence that it holds behind it. It gives one answer at a time.
class Slot {
 public:
  virtual ~Slot() = default;

  // These are called between answers, as decoder/runner/runner.h.
  virtual absl::Span<const TokenId> sequence_tokens() const = 0;
  virtual int64_t given_up() const = 0;
  virtual decoder::SavedSequence SaveSequence() const = 0;
  virtual absl::Status RestoreSequence(decoder::SavedSequence sequence) = 0;
  virtual OpenedContext opened() const { return {}; }
  // Over all answers so far.
  virtual decoder::Statistics statistics() const { return {}; }
  // Sources need the document's text, which is read once.
  virtual bool has_document() const = 0;
  virtual absl::Status ReadDocument() = 0;

  // Begins an answer; it goes on by Runner::Step. resume: the prompt goes on with the sequence that is held. begun: when
  // its turn came. stopping: once it is set, the answer is not wanted any more.
  virtual absl::Status Begin(const AnswerJob& job, bool resume, absl::Time begun,
                             const std::atomic<bool>& stopping) = 0;
  virtual Schedule::Progress progress() const = 0;
  virtual bool done() const = 0;
  // What a model's runner takes a step of; null: the slot is no model's.
  virtual decoder::Generation* generation() { return nullptr; }
  // Ends the answer that was begun, in whatever state it is. status: of its last step, or why there is
  // none; it is the answer's, unless who listens or a stop text ended it: then what there is, is the answer.
  virtual absl::StatusOr<AnswerJob::Done> End(const absl::Status& status) = 0;
};

class Runner {
 public:
  virtual ~Runner() = default;
  // Finds out what opening needs to know of the machine. Called once, before the first Open, while nothing else runs.
  virtual void Prepare() {}
  virtual absl::StatusOr<std::unique_ptr<Slot>> Open(const std::string& context,
                                                     const std::string& content_id) = 0;
  // Whether Step may be called for one slot while another thread calls it for others.
  virtual bool steps_beside() const { return false; }
  // Takes the next step of each slot, of which none is done, and gives each one's status.
  virtual std::vector<absl::Status> Step(absl::Span<Slot* const> slots) = 0;
};

// Of a loaded model and its store, which it keeps: slots are decoders (library/open_decoder.h), and a step is
// decoder::Generation's: steps are batch-invariant, whoever joins or leaves.
// decoders: how each is opened; its context is the caller's of Open, and so is config.content_id.
// store: null: there are no contexts.
std::unique_ptr<Runner> MakeDecoderRunner(library::DecoderSpec decoders,
                                          std::shared_ptr<library::LoadedModel> model,
                                          std::shared_ptr<library::StoreAccess> store);

}  // namespace carrel::serving
