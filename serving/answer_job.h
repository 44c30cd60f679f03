// What:   a question on its way to its answer: what is asked, its owner, and its callbacks.
// Text:   an answer's text ends before the first of its stop texts. Without a tokenizer it is ids, each with a space.
// Threads: a job's callbacks are called one at a time, on threads of the scheduler; they must not wait for long.
// Example: AnswerJob job;
//          job.context = "novel";
//          job.prompt = tokens;
//          job.max_tokens = 64;
//          job.on_text = [](const std::string& piece) { std::cout << piece; return true; };
//          job.done = [](absl::StatusOr<AnswerJob::Done> done) { ... };
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/ids.h"
#include "decoder/decoder.h"
#include "serving/turn_queue.h"

namespace carrel::serving {

using Sampling = decoder::SamplingConfig;

// A passage that an answer rests on.
struct AnswerSource {
  int64_t first_token = 0, end_token = 0;  // of the document
  int64_t begin = 0, end = 0;              // bytes of the document's text
  double share = 0;                        // of what all passages weigh
  std::string text;
};

struct AnswerJob {
  std::string context;     // empty: the model alone
  std::string content_id;  // what the context holds now; a decoder over another is not used
  std::string who;         // whose conversations this may go on with
  Turn turn;               // whose turn it takes (kvstore::Principal::turn); null: nobody's own
  int64_t sources = 0;     // passages that are wanted, at most
  std::vector<TokenId> prompt;
  int64_t give_up = 0;  // of the context's last tokens, which the prompt says in another way
  std::vector<TokenId>
      history;  // as decoder::GenerateOptions: of a prompt whose front is the context
  // Goes on with the conversation that it is the next turn of; false: begins behind the document whatever was asked.
  bool resume = true;
  int64_t max_tokens = 0;
  Sampling sampling;
  std::vector<std::string> stop;
  bool keep_logits = false, ignore_eos = false;  // as decoder::GenerateOptions
  // Asked before it is opened, and in each layer; false: done is Cancelled. Null: it is wanted.
  std::function<bool()> wanted;
  // Each piece of text as soon as it is certain, empty ones too; false ends the answer, which is no error. Null: nobody
  // listens.
  std::function<bool(const std::string&)> on_text;
  struct Done {
    std::string text;
    decoder::GenerateResult
        result;  // of what a caller or a stop text ended, what there was; kEos: either
    bool at_max_tokens = false;  // or where the model's length ends
    bool left = false;           // on_text ended it
    int64_t context_tokens = 0;  // without those given up
    int64_t resumed_tokens = 0;  // of the prompt: known from the conversation's last turn
    std::vector<AnswerSource> sources;
    double sources_seconds = 0;  // that finding them took
    // Of the context, in the mean over tokens, layers and KV heads; prompts that took all are left out.
    double rows_read = 0;
    double prompt_seconds = 0, generate_seconds = 0;  // from when its turn came; of the rest
    std::string
        plan;  // how the context was attended to (decoder::WayName); empty: it was not planned

    double ms_per_token() const {  // of those behind the first; 0: there are none
      const auto others = static_cast<double>(result.ids.size()) - 1;
      return others > 0 ? 1e3 * generate_seconds / others : 0;
    }
  };
  std::function<void(absl::StatusOr<Done>)> done;

  bool with_sources() const { return sources > 0 && !context.empty(); }
  bool is_wanted() const { return wanted == nullptr || wanted(); }
};

}  // namespace carrel::serving
