// What:    many questions at once, and chats, over the contexts of a store: answers take their steps together, each with
//          the tokens that it has alone, and what a conversation's last turn left is not read again.
// Errors:  of each question alone: as reader.h; NotFound no such context; InvalidArgument a chat that the model's template
//          refuses; Cancelled on_text said so. Start: InvalidArgument an option, as reader.h.
// Ownership: keeps model and store.
// Cost:    conversations that wait for their next turn: 64 of them, in up to 512 MB, then in files of /var/tmp that have no
//          name. Two threads.
// Threads: any, at the same time. on_text is called on a thread of the engine, and delays the other answers.
// Example: const auto engine = carrel::Engine::Start(*model, *store);             // examples/06_many.cc
//          const auto replies = (*engine)->AskMany({{{.context = "novel", .prompt = "Who is Ada?"}, ...}});
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "carrel/export.h"
#include "carrel/model.h"
#include "carrel/reader.h"
#include "carrel/status.h"
#include "carrel/store.h"

namespace carrel {
inline namespace api {

struct Message {
  std::string role;  // "user", "assistant", "system", or what the model's template names
  std::string content;
};

struct Question {
  std::string context;     // empty: the model alone
  std::string content_id;  // what it must hold, or the id's first 12 digits or more; empty: any
  // What follows the document; one of these. A chat is written by the model's template, or plainly where it has none;
  // its next turn repeats the messages and the answer.
  std::vector<Message> messages;
  std::string prompt;
  std::vector<Token> tokens;
  GenerateOptions options;
  std::vector<std::string> stop;  // the answer ends before the first of these texts
  int64_t sources = 0;            // passages of the document to find, at most
};

// A passage that an answer rests on.
struct Source {
  std::string text;
  double share = 0;                        // of what all passages weigh
  int64_t begin = 0, end = 0;              // bytes of the document's text
  int64_t first_token = 0, end_token = 0;  // of the document
};

// A stop text ends an answer as the model does: kEos.
struct Reply : Answer {
  int64_t context_tokens = 0;
  int64_t prompt_tokens = 0;  // behind them
  int64_t known_tokens = 0;   // of these, that the conversation's last turn had left
  std::vector<Source> sources;
};

struct EngineOptions {
  ReaderOptions reading;      // how contexts are read; content_id is a question's
  int64_t answers = 16;       // on their way at a time, 1 to 1024; others wait
  int64_t open_contexts = 4;  // that stay open while nobody asks, 1 to 1024
};

class CARREL_API Engine {
 public:
  static Result<std::unique_ptr<Engine>> Start(std::shared_ptr<Model> model,
                                               std::shared_ptr<Store> store,
                                               const EngineOptions& options = {});
  virtual ~Engine() = default;  // waits for no answer: those on their way are Unavailable

  // Waits for the answer. A question that goes on with a conversation is answered from where that was.
  virtual Result<Reply> Ask(const Question& question) = 0;
  // Waits for all, in the questions' order.
  virtual std::vector<Result<Reply>> AskMany(std::span<const Question> questions) = 0;
};

}  // namespace api
}  // namespace carrel
