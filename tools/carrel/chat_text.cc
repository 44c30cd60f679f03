#include "tools/carrel/chat_text.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status.h"
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
  if (chat.ok()) return chat;
  return absl::Status(
      chat.status().code(),
      absl::StrCat(chat.status().message(), "; with --raw texts are taken without a template"));
}

std::string TurnHeadOf(const Chat& chat) {
  return chat == nullptr ? "" : chat->TurnHead().value_or("");
}

std::string TurnHeadOf(const std::string& model_path, const model::Checkpoint& checkpoint) {
  const absl::StatusOr<Chat> chat = LoadChat(model_path, checkpoint);
  return chat.ok() ? TurnHeadOf(*chat) : "";
}

}  // namespace carrel::tools
