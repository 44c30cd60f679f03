// What:   one thread that decodes, and what waits for it: answers over contexts of one store by one model.
//         Many are on their way at a time: a token of each that has read its prompt, and blocks of
//         prompts, together (decoder/generation.h): each has the bits that it has alone, whoever joins or
//         leaves. The decoders used last stay open, and a conversation's next turn goes on behind the last
//         one.
// Turns:  who waits is begun by turns (turn_queue.h): of max_answers places, and a quarter more. Steps are shared among
//         turns too: serving/step_plan.h.
// Errors: as library/open_decoder.h; ResourceExhausted as many wait as may, in all or of one turn. What a callback
//         throws is its job's end, and no other's. What a step itself throws (memory) ends all that took it: how far
//         each came is not known, and what it would read again could have other bits.
// Threads: any submits; a job's callbacks are called on the decoding thread.
// Ownership: keeps model and store.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/ids.h"
#include "decoder/config.h"
#include "decoder/sampler.h"
#include "library/loaded_model.h"
#include "library/open_decoder.h"
#include "library/store_access.h"
#include "serving/sequences.h"
#include "serving/turn_queue.h"

namespace carrel::serving {

struct AnswererConfig {
  decoder::RetrievalConfig retrieval;
  decoder::DeviceConfig device;
  bool derived_weights = false;  // as library/open_decoder.h
  std::string folder;            // of an embedded store, for zones in this host's memory
  bool planned = false;          // likewise, with `way`
  std::optional<decoder::Way> way;
  std::string turn_head;                    // as library/open_decoder.h
  int64_t max_waiting = 1024;               // jobs; one more is refused
  int64_t max_waiting_of_turn = INT64_MAX;  // of these, of one turn
  int64_t max_answers = 16;                 // on their way at a time, each with a decoder; 1 ..
  int64_t max_open_contexts = 4;            // whose decoders are kept while they are idle; 1 ..
  SequencesConfig sequences;
};

// A passage that an answer rests on.
struct AnswerSource {
  int64_t first_token = 0, end_token = 0;  // of the document
  int64_t begin = 0, end = 0;              // bytes of the document's text
  double share = 0;                        // of what all passages weigh
  std::string text;
};

struct AnswerJob {
  int64_t id = 0;          // of the order in which they came; the answerer gives it
  std::string context;     // empty: the model alone
  std::string content_id;  // what the context holds now; a decoder over another is not used
  std::string who;         // whose conversations this may go on with
  Turn turn;               // whose turn it takes (kvstore::Principal::turn); null: nobody's own
  int64_t sources = 0;     // passages that are wanted, at most
  std::vector<TokenId> prompt;
  int64_t give_up = 0;  // of the context's last tokens, which the prompt says in another way
  std::vector<TokenId>
      history;  // as decoder::GenerateOptions: of a prompt whose front is the context
  int64_t max_tokens = 0;
  decoder::SamplingConfig sampling;
  std::function<bool()>
      wanted;  // asked before it is begun, and in each layer; false: done is Cancelled
  // Each piece of text as soon as it is certain; false ends the answer, which is no error.
  std::function<bool(const std::string&)> on_text;
  struct Done {
    bool at_max_tokens = false;
    int64_t context_tokens = 0;  // without those given up
    int64_t resumed_tokens = 0;  // of the prompt: known from the conversation's last turn
    int64_t tokens = 0;          // of the answer
    std::vector<AnswerSource> sources;
    double rows_read =
        0;  // of the context, mean over tokens, layers and KV heads; prompts that took all left out
    double prompt_seconds = 0, generate_seconds = 0;
    std::string
        plan;  // how the context was attended to (decoder::WayName); empty: nobody planned it
  };
  std::function<void(absl::StatusOr<Done>)> done;
};

class Answerer {
 public:
  // store: null: there are no contexts.
  static std::unique_ptr<Answerer> Create(AnswererConfig config,
                                          std::shared_ptr<library::LoadedModel> model,
                                          std::shared_ptr<library::StoreAccess> store);
  virtual ~Answerer() = default;  // jobs that wait are done with Unavailable
  virtual absl::Status Submit(AnswerJob job) = 0;
  virtual int64_t waiting() const = 0;
  virtual int64_t answering() const = 0;  // on their way
  // Conversations that wait for their next turn, beside those that decoders hold.
  struct Waiting {
    int64_t in_memory = 0, in_files = 0;
  };
  virtual Waiting conversations() const = 0;
  // Lets go of the context, so that it can be deleted. FailedPrecondition: answers read it, or wait to.
  virtual absl::Status Close(const std::string& context) = 0;
  // Whether answers read it, or wait to; else Close would let go of it.
  virtual bool Reads(const std::string& context) const = 0;
};

}  // namespace carrel::serving
