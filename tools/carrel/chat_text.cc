#include "tools/carrel/chat_text.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "model/checkpoint.h"

namespace carrel::tools {

absl::StatusOr<Chat> LoadChat(const std::string& model_path, const model::Checkpoint& checkpoint) {
  if (checkpoint.tokenizer == nullptr) return Chat();
  absl::StatusOr<Chat> chat = serving::ChatTemplate::Load(model_path, checkpoint);
  return absl::IsNotFound(chat.status()) ? Chat() : std::move(chat);
}

absl::StatusOr<Chat> LoadChatUnlessRaw(bool raw, const std::string& model_path,
                                       const model::Checkpoint& checkpoint) {
  if (raw) return Chat();
  absl::StatusOr<Chat> chat = LoadChat(model_path, checkpoint);
  return chat.ok() ? std::move(chat) : OfferRaw(chat.status());
}

absl::Status OfferRaw(const absl::Status& of_template) {
  return absl::Status(
      of_template.code(),
      absl::StrCat(of_template.message(), "; with --raw texts are taken without a template"));
}

}  // namespace carrel::tools
