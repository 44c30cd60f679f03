// What:   who answers in a chat: a model and a store of this process, or a running `carrel api`. Either gets
//         the whole conversation each time; what of it was read before is not read again.
// Errors: as serving/engine.h and http_api/api_client.h; Cancelled when `wanted` says so. Whatever a server
//         answers, it is an answer or an error.
// Threads: one.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "serving/engine.h"
#include "tools/carrel/retrieval_flags.h"

namespace CLI {
class App;
}

namespace carrel::tools {

struct ChatAnswer {
  std::string text;  // as the next turn is to repeat it
  bool cut_off = false;
  int64_t prompt_tokens = 0, cached_tokens = 0, tokens = 0;
  double prompt_ms = 0, ms_per_token = 0;
  std::vector<serving::AnswerSource> sources;
  std::string
      sampling;  // of a carrel api, if it draws tokens as the model advises: how, for people
};

struct ChatSettings {
  std::string context;  // empty: none
  int64_t max_tokens = 1024;
  SamplingFlags sampling;
  int64_t sources = 0;
};

// on_text: each piece as soon as it is certain. wanted: asked several times a second.
struct ChatListener {
  std::function<void(const std::string&)> on_text;
  std::function<bool()> wanted;
};

class ChatPartner {
 public:
  virtual ~ChatPartner() = default;
  virtual std::string name() const = 0;
  virtual bool knows_chats() const = 0;  // whether the model has a chat template
  // How tokens are drawn, where that is as the model advises, and known before the first answer; else empty.
  virtual std::string sampling(const SamplingFlags& flags) const = 0;
  // Of a model without chats the next question, if it goes on to ask one itself, is not part of the answer.
  absl::StatusOr<ChatAnswer> Answer(const std::vector<serving::Message>& messages,
                                    const ChatSettings& settings, const ChatListener& listener);
  // What follows the context's document, as it is, control tokens too; no chat.
  absl::StatusOr<ChatAnswer> Complete(const std::string& prompt, const ChatSettings& settings,
                                      const ChatListener& listener) {
    return Ask({.text = prompt}, {}, settings, listener);
  }

 private:
  virtual absl::StatusOr<ChatAnswer> Ask(const serving::Prompt& prompt,
                                         const std::vector<std::string>& stop,
                                         const ChatSettings& settings,
                                         const ChatListener& listener) = 0;
};

absl::StatusOr<std::unique_ptr<ChatPartner>> MakeLocalPartner(const RetrievalFlags& flags);
// Asks what model it is at once.
absl::StatusOr<std::unique_ptr<ChatPartner>> MakeApiPartner(const std::string& url,
                                                            const std::string& key_file);

// Of a command with --api: InvalidArgument names a flag that is given and that a running carrel api does
// not take from its clients (model, store, how rows are retrieved).
absl::Status CheckApiFlags(const CLI::App& command);

}  // namespace carrel::tools
