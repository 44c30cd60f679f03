// What:   a question on its way to its answer: what is asked, its owner, and its callbacks.
// Threads: a job's callbacks are called one at a time, on threads of the scheduler; they must not wait for long.
// Example: AnswerJob job;
//          job.context = "novel";
//          job.prompt = tokens;
//          job.max_tokens = 64;
//          job.wanted = [] { return true; };
//          job.on_text = [](const std::string& piece) { std::cout << piece; return true; };
//          job.done = [](const absl::StatusOr<AnswerJob::Done>& done) { ... };
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/ids.h"
#include "decoder/sampler.h"
#include "serving/turn_queue.h"

namespace carrel::serving {

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
  int64_t max_tokens = 0;
  decoder::SamplingConfig sampling;
  // Asked before it is opened, and in each layer; false: done is Cancelled.
  std::function<bool()> wanted;
  // Each piece of text as soon as it is certain; false ends the answer, which is no error.
  std::function<bool(const std::string&)> on_text;
  struct Done {
    bool at_max_tokens = false;
    int64_t context_tokens = 0;  // without those given up
    int64_t resumed_tokens = 0;  // of the prompt: known from the conversation's last turn
    int64_t tokens = 0;          // of the answer
    std::vector<AnswerSource> sources;
    // Of the context, in the mean over tokens, layers and KV heads; prompts that took all are left out.
    double rows_read = 0;
    double prompt_seconds = 0, generate_seconds = 0;
    std::string
        plan;  // how the context was attended to (decoder::WayName); empty: it was not planned
  };
  std::function<void(absl::StatusOr<Done>)> done;

  bool with_sources() const { return sources > 0 && !context.empty(); }
};

}  // namespace carrel::serving
