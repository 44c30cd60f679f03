// What:   messages of a chat as the text that a model was trained on, by its own Jinja template
//         (tokenizer_config.json, chat_template.jinja, or a GGUF file), rendered as transformers does, byte
//         for byte (chat_renderer.h); and its tokens, in which control tokens are the template's alone: the same
//         characters in a message are text.
// Source: transformers, apply_chat_template: its environment, filters, globals, continue_final_message.
// Roles:  system, user, assistant, and what the template names in quotes, letter by letter; `developer` is
//         `system` for a template that does not name it. No message is left out in silence.
// Errors: as chat_renderer.h; NotFound a model without a template; InvalidArgument a role, or a message that the
//         template leaves out, with its place ("messages[2]", also as param).
// Threads: any.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "library/document_ends.h"
#include "model/tokenizer/seam.h"
#include "serving/chat_renderer.h"

namespace carrel::model {
class Tokenizer;
struct Checkpoint;
}  // namespace carrel::model

namespace carrel::serving {

struct Message {
  std::string role;
  std::string content;
};

struct ChatOptions {
  std::string arguments = "{}";  // more variables of the template: a JSON object
  bool begin_answer = true;      // up to where the assistant's answer begins
  bool continue_last = false;    // up to where the last message's text ends
};

// For a model without a template: a text that it may go on with, and where its answer ends.
std::string PlainChat(const std::vector<Message>& messages);
inline constexpr char kPlainChatStop[] = "\n\nQuestion:";

class ChatTemplate {
 public:
  static absl::StatusOr<std::unique_ptr<ChatTemplate>> Create(ChatRendererConfig config);
  // Of a model's files.
  static absl::StatusOr<std::unique_ptr<ChatTemplate>> Load(const std::string& model_path,
                                                            const model::Checkpoint& checkpoint);

  // As the template writes it; with continue_last to the end of what it writes.
  absl::StatusOr<std::string> Render(const std::vector<Message>& messages,
                                     const ChatOptions& options = {});

  // Whether the template names it: what it does not name has no effect on it.
  bool Mentions(absl::string_view name) const;

  // The tokens of Render's text. A message's text is never a control token; InvalidArgument if the
  // template makes that impossible to tell.
  absl::StatusOr<std::vector<TokenId>> Encode(const std::vector<Message>& messages,
                                              const model::Tokenizer& tokenizer,
                                              const ChatOptions& options = {});

  // What stands before the text of a chat's first user: a document that is to be read inside that turn
  // begins with it. Empty: nothing, or none that can be told.
  absl::StatusOr<std::string> TurnHead();
  // As Encode, of a chat about a document. If it begins with TurnHead, or the end of that from a control
  // token on, the first user's turn is still open: what the chat says goes on in it behind an empty line,
  // system messages first. Otherwise the chat stands behind the document, without the token that documents
  // begin with. most_given_up: of the document's last tokens (model/tokenizer/seam.h).
  absl::StatusOr<model::Seam> EncodeBehind(const std::vector<Message>& messages,
                                           const model::Tokenizer& tokenizer,
                                           const library::DocumentEnds& document,
                                           int64_t most_given_up, const ChatOptions& options = {});

 private:
  struct Marked;
  static constexpr int kMostTries = 16;

  explicit ChatTemplate(ChatRendererConfig config);

  absl::StatusOr<std::vector<Message>> Known(const std::vector<Message>& messages) const;
  // first: the place of the first of these messages in its chat, for errors.
  absl::StatusOr<Marked> RenderMarked(const std::vector<Message>& messages,
                                      const ChatOptions& options, size_t first);
  absl::StatusOr<std::optional<size_t>> FindLeftOut(const std::vector<Message>& messages,
                                                    const ChatOptions& options,
                                                    const std::string& text,
                                                    absl::FunctionRef<bool(size_t)> seen);
  // Render's text, and what in it is text for certain: all messages, if one could be something else.
  absl::StatusOr<Marked> RenderKnown(const std::vector<Message>& messages,
                                     const model::Tokenizer& tokenizer, const ChatOptions& options);
  // document: its first tokens.
  absl::StatusOr<bool> InTurn(const model::Tokenizer& tokenizer,
                              absl::Span<const TokenId> document);

  const std::string jinja_;
  ChatRenderer renderer_;
};

}  // namespace carrel::serving
