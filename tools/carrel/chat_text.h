// What:   how commands put texts to a model that knows chats: a document inside the first user's turn, a
//         question as what the user says on; the same tokens as carrel api makes of them.
// Errors: as serving/chat_template.h.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "model/tokenizer/tokenizer.h"
#include "serving/chat_template.h"

namespace carrel::model {
struct Checkpoint;
}

namespace carrel::tools {

using Chat = std::unique_ptr<serving::ChatTemplate>;  // null: the model knows no chats

absl::StatusOr<Chat> LoadChat(const std::string& model_path, const model::Checkpoint& checkpoint);
// The same of a command that has --raw: errors say that it does without a template.
absl::StatusOr<Chat> LoadChatUnlessRaw(bool raw, const std::string& model_path,
                                       const model::Checkpoint& checkpoint);

// What a template refuses, in the words of such a command.
absl::Status OfferRaw(const absl::Status& of_template);

}  // namespace carrel::tools
