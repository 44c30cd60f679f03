// What:   messages of a chat as the text that a model was trained on, by its own Jinja template
//         (tokenizer_config.json, chat_template.jinja, or a GGUF file), rendered by Python's jinja2 in a
//         child process, so that it is what transformers gives, byte for byte; and its tokens, in which
//         control tokens are the template's alone: the same characters in a message are text.
// Source: transformers, apply_chat_template: its environment, filters and globals.
// Errors: InvalidArgument a template that jinja2 refuses, and messages that the template refuses (its own
//         words); FailedPrecondition no /usr/bin/python3 with jinja2; DeadlineExceeded a template that takes longer
//         than kPatience; NotFound a model without a template.
// Threads: any; one chat is rendered at a time. Cost: a process of some 20 MB; 0.2 ms and more per chat.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/ids.h"
#include "library/document_ends.h"
#include "model/tokenizer/seam.h"

namespace carrel::model {
class Tokenizer;
struct Checkpoint;
}  // namespace carrel::model

namespace carrel::http_api {

struct Message {
  std::string role;  // "system", "user", "assistant", or what else the template knows
  std::string content;
};

class ChatTemplate {
 public:
  static constexpr absl::Duration kPatience = absl::Seconds(5);

  // bos, eos: the texts of these tokens; empty: none.
  static absl::StatusOr<std::unique_ptr<ChatTemplate>> Create(const std::string& jinja,
                                                              const std::string& bos,
                                                              const std::string& eos);
  // Of a model's files.
  static absl::StatusOr<std::unique_ptr<ChatTemplate>> Load(const std::string& model_path,
                                                            const model::Checkpoint& checkpoint);
  virtual ~ChatTemplate() = default;

  // Up to where the assistant's answer begins.
  virtual absl::StatusOr<std::string> Render(const std::vector<Message>& messages) = 0;

  // The tokens of Render's text. A message's text is never a control token; InvalidArgument if the
  // template makes that impossible to tell.
  absl::StatusOr<std::vector<TokenId>> Encode(const std::vector<Message>& messages,
                                              const model::Tokenizer& tokenizer);

  // What stands before the text of a chat's first user: a document that is to be read inside that turn
  // begins with it. Empty: nothing, or none that can be told.
  absl::StatusOr<std::string> TurnHead();
  // As Encode, of a chat about a document. If it begins with TurnHead, or the end of that from a control
  // token on, the first user's turn is still open: what the chat says goes on in it behind an empty line, a
  // system message first. Otherwise the chat stands behind the document, without the token that documents
  // begin with. most_given_up: of the document's last tokens (model/tokenizer/seam.h).
  absl::StatusOr<model::Seam> EncodeBehind(const std::vector<Message>& messages,
                                           const model::Tokenizer& tokenizer,
                                           const library::DocumentEnds& document,
                                           int64_t most_given_up);

 private:
  // document: its first tokens.
  absl::StatusOr<bool> InTurn(const model::Tokenizer& tokenizer,
                              absl::Span<const TokenId> document);
  struct Marked;
  // Render's text, and what in it is text for certain: all messages, if one could be something else.
  absl::StatusOr<Marked> RenderFor(const std::vector<Message>& messages,
                                   const model::Tokenizer& tokenizer);
  absl::StatusOr<Marked> RenderMarked(const std::vector<Message>& messages);
};

}  // namespace carrel::http_api
