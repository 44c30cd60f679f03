#include "serving/chat_template.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/file.h"
#include "common/json.h"
#include "common/shown.h"
#include "common/status.h"
#include "model/checkpoint.h"
#include "model/tokenizer/tokenizer.h"
#include "serving/status_details.h"

namespace carrel::serving {
namespace {

using nlohmann::json;

// Where a message begins and ends in a text that is thrown away; not in any text that people write. Its place in
// the chat stands behind them, as a character of the same plane.
constexpr char kBegin[] = "\xf3\xb0\x80\x8a\xf3\xb0\x82\x93",
               kEnd[] = "\xf3\xb0\x80\x8b\xf3\xb0\x82\x94";

// U+F1000 and on.
std::string PlaceMark(size_t place) {
  const auto code = static_cast<uint32_t>(0xf1000 + place);
  std::string mark = "\xf3";
  for (const int shift : {12, 6, 0}) mark += static_cast<char>(0x80 | ((code >> shift) & 0x3f));
  return mark;
}
constexpr size_t kPlaceBytes = 4;

// Which of the messages it is of; nothing: of none.
std::optional<size_t> PlaceOf(absl::string_view mark, size_t messages) {
  if (mark.size() != kPlaceBytes || mark[0] != '\xf3') return std::nullopt;
  uint32_t code = 3;
  for (const char c : mark.substr(1)) {
    if ((static_cast<unsigned char>(c) & 0xc0) != 0x80) return std::nullopt;
    code = code << 6 | (static_cast<unsigned char>(c) & 0x3f);
  }
  if (code < 0xf1000 || code - 0xf1000 >= messages) return std::nullopt;
  return code - 0xf1000;
}

// Of tokenizer_config.json: a text, or a list of {"name", "template"} of which "default" counts.
absl::StatusOr<std::string> TemplateOf(const json& found, const std::string& path) {
  if (found.is_string()) return found.get<std::string>();
  if (!found.is_array()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": chat_template=", ShownJson(found), ": must be a text or a list"));
  }
  for (const json& named : found) {
    if (JsonText(JsonAt(named, {"name"})) != "default") continue;
    const json* const text = JsonAt(named, {"template"});
    if (text == nullptr || !text->is_string()) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": chat_template's \"default\" has no template that is a text"));
    }
    return text->get<std::string>();
  }
  return std::string();
}

// Of a folder of Hugging Face's, or as the GGUF file has it; empty: none.
absl::StatusOr<std::string> FindTemplate(const std::string& model_path,
                                         const model::Checkpoint& checkpoint) {
  if (!checkpoint.tokenizer->chat_template().empty()) return checkpoint.tokenizer->chat_template();
  if (!std::filesystem::is_directory(model_path)) return std::string();
  if (const std::string path = model_path + "/chat_template.jinja"; std::filesystem::exists(path)) {
    return ReadFile(path);
  }
  const std::string path = model_path + "/tokenizer_config.json";
  if (!std::filesystem::exists(path)) return std::string();
  ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  const absl::StatusOr<json> config = ParseJsonObject(text, path);
  if (!config.ok()) return std::string();  // who reads the tokenizer says what is wrong with it
  const JsonFields fields(path, *config);
  const json* const found = fields.Find("chat_template");
  return found == nullptr ? std::string() : TemplateOf(*found, path);
}

// How many bytes of text a prompt of this model can be, and some more: tokenizers may shorten texts.
absl::StatusOr<int64_t> MaxBytes(const model::Checkpoint& checkpoint) {
  constexpr int64_t kSlack = 4, kLeast = int64_t{1} << 20, kMost = int64_t{64} << 20;
  size_t longest = 1;
  for (TokenId id = 0; id < checkpoint.tokenizer->vocab_size(); ++id) {
    const auto text = checkpoint.tokenizer->Decode({id}, /*skip_special=*/false);
    if (text.ok()) longest = std::max(longest, text->size());
  }
  const int64_t positions = checkpoint.config.max_position_embeddings;
  const int64_t each = kSlack * static_cast<int64_t>(longest);
  return positions > kMost / each ? kMost : std::max(kLeast, positions * each);
}

// Whether the template's source names it as roles are named: in quotes, and no field of a message.
bool NamesRole(absl::string_view source, absl::string_view role) {
  for (const char* field : {"role", "content", "name", "type", "text"}) {
    if (role == field) return false;
  }
  const auto plain = [](char c) { return absl::ascii_isalnum(c) || c == '_' || c == '-'; };
  if (!std::all_of(role.begin(), role.end(), plain)) return false;
  return absl::StrContains(source, absl::StrCat("'", role, "'")) ||
         absl::StrContains(source, absl::StrCat("\"", role, "\""));
}

absl::Status AboutMessage(absl::Status status, size_t place) {
  return WithParam(std::move(status), absl::StrCat("messages[", place, "]"));
}

}  // namespace

// A chat's text, and where in it its messages stand.
struct ChatTemplate::Marked {
  std::string text;
  std::vector<model::PlainRange>
      messages;  // empty: the template changes them, and which are its own is not told
  bool told = false;
};

namespace {

struct Unmarked {
  std::string text;
  std::vector<model::PlainRange> plain;
  std::vector<bool> begun, ended;  // which messages' marks there are
  bool whole = true;               // each begin has its end
};

// Of which messages this mark is there.
std::vector<bool> PlacesBehind(absl::string_view mark, absl::string_view text, size_t messages) {
  std::vector<bool> there(messages);
  for (size_t at = 0; (at = text.find(mark, at)) != absl::string_view::npos; ++at) {
    const auto place = PlaceOf(text.substr(at + mark.size(), kPlaceBytes), messages);
    if (place.has_value()) there[*place] = true;
  }
  return there;
}

// Takes the marks out, and tells what stood between them.
Unmarked TakeMarks(absl::string_view marked, size_t messages) {
  Unmarked out;
  out.begun = PlacesBehind(kBegin, marked, messages);
  out.ended = PlacesBehind(kEnd, marked, messages);
  size_t at = 0;
  for (size_t begin, from = 0; (begin = marked.find(kBegin, from)) != absl::string_view::npos;) {
    const size_t first = begin + sizeof(kBegin) - 1 + kPlaceBytes;
    from = begin + 1;
    const absl::string_view place =
        first <= marked.size() ? marked.substr(first - kPlaceBytes, kPlaceBytes) : "";
    if (!PlaceOf(place, messages).has_value()) continue;  // somebody wrote it
    const size_t end = marked.find(absl::StrCat(kEnd, place), first);
    if (end == absl::string_view::npos) {
      out.whole = false;
      return out;
    }
    absl::StrAppend(&out.text, marked.substr(at, begin - at));
    const auto plain = static_cast<int64_t>(out.text.size());
    absl::StrAppend(&out.text, marked.substr(first, end - first));
    out.plain.push_back({plain, static_cast<int64_t>(out.text.size())});
    at = from = end + sizeof(kEnd) - 1 + kPlaceBytes;
  }
  absl::StrAppend(&out.text, marked.substr(at));
  return out;
}

}  // namespace

ChatTemplate::ChatTemplate(ChatRendererConfig config)
    : jinja_(config.jinja), renderer_(std::move(config)) {}

absl::StatusOr<std::unique_ptr<ChatTemplate>> ChatTemplate::Create(ChatRendererConfig config) {
  std::unique_ptr<ChatTemplate> chat(new ChatTemplate(std::move(config)));
  RETURN_IF_ERROR(chat->renderer_.Compile());
  return chat;
}

absl::StatusOr<std::unique_ptr<ChatTemplate>> ChatTemplate::Load(
    const std::string& model_path, const model::Checkpoint& checkpoint) {
  if (checkpoint.tokenizer == nullptr) {
    return absl::FailedPreconditionError("the model came without a tokenizer");
  }
  ChatRendererConfig config;
  ASSIGN_OR_RETURN(config.jinja, FindTemplate(model_path, checkpoint));
  if (config.jinja.empty()) {
    return absl::NotFoundError(absl::StrCat(
        model_path, " has no chat template (chat_template.jinja, tokenizer_config.json or GGUF)"));
  }
  config.bos = checkpoint.bos_text;
  config.eos = checkpoint.eos_text;
  ASSIGN_OR_RETURN(config.max_bytes, MaxBytes(checkpoint));
  return Create(std::move(config));
}

bool ChatTemplate::Mentions(absl::string_view name) const {
  return absl::StrContains(jinja_, name);
}

absl::StatusOr<std::string> ChatTemplate::Render(const std::vector<Message>& messages,
                                                 const ChatOptions& options) {
  // Templates that print a message see its fields in this order.
  nlohmann::ordered_json request = {{"messages", nlohmann::ordered_json::array()},
                                    {"add_generation_prompt", options.begin_answer}};
  for (const Message& message : messages) {
    request["messages"].push_back({{"role", message.role}, {"content", message.content}});
  }
  ASSIGN_OR_RETURN(const json more, ParseJsonObject(options.arguments, "chat_template_kwargs"));
  for (const auto& [name, value] : more.items()) {
    if (!request.contains(name)) request[name] = value;
  }
  return renderer_.Render(request);
}

// The roles as the template knows them.
absl::StatusOr<std::vector<Message>> ChatTemplate::Known(
    const std::vector<Message>& messages) const {
  std::vector<Message> known = messages;
  for (size_t i = 0; i < known.size(); ++i) {
    std::string& role = known[i].role;
    if (role == "system" || role == "user" || role == "assistant" || NamesRole(jinja_, role))
      continue;
    if (role == "developer") {
      role = "system";
      continue;
    }
    const std::string lower = absl::AsciiStrToLower(role);
    const bool by_case = lower != role && (lower == "system" || lower == "user" ||
                                           lower == "assistant" || NamesRole(jinja_, lower));
    return AboutMessage(
        absl::InvalidArgumentError(absl::StrCat(
            "messages[", i, "].role=", ShownJson(json(role)), ": the model's chat template knows ",
            by_case ? absl::StrCat("\"", lower, "\", in small letters")
                    : std::string("system, user, assistant, and no such role"))),
        i);
  }
  return known;
}

// One whose text makes no difference, of those that are not seen in the text.
absl::StatusOr<std::optional<size_t>> ChatTemplate::FindLeftOut(
    const std::vector<Message>& messages, const ChatOptions& options, const std::string& text,
    absl::FunctionRef<bool(size_t)> seen) {
  int tries = 0;
  for (size_t i = 0; i < messages.size() && tries < kMostTries; ++i) {
    if (seen(i) || absl::StripAsciiWhitespace(messages[i].content).empty()) continue;
    ++tries;  // the template may only change it
    std::vector<Message> others = messages;
    others[i].content = absl::StrCat("a", PlaceMark(i), others[i].content, PlaceMark(i), "b");
    const absl::StatusOr<std::string> other = Render(others, options);
    if (other.ok() && *other == text) return i;
    if (!other.ok() && !absl::IsInvalidArgument(other.status())) return other.status();
  }
  return std::nullopt;
}

absl::StatusOr<ChatTemplate::Marked> ChatTemplate::RenderMarked(
    const std::vector<Message>& messages, const ChatOptions& options, size_t first) {
  std::vector<Message> marked = messages;
  for (size_t i = 0; i < marked.size(); ++i) {
    // White space at the ends stays outside, for templates that trim it. One that says nothing may be left
    // out, and is marked only where the place of the first is asked for.
    std::string& content = marked[i].content;
    const absl::string_view inner = absl::StripAsciiWhitespace(content);
    if (inner.empty() && i > 0) continue;
    const auto before = static_cast<size_t>(inner.data() - content.data());
    content = absl::StrCat(content.substr(0, before), kBegin, PlaceMark(i), inner, kEnd,
                           PlaceMark(i), content.substr(before + inner.size()));
  }
  Marked result;
  ASSIGN_OR_RETURN(result.text, Render(messages, options));
  const absl::StatusOr<std::string> rendered = Render(marked, options);
  if (absl::IsInvalidArgument(rendered.status())) return result;  // it looks into messages
  RETURN_IF_ERROR(rendered.status());
  Unmarked unmarked = TakeMarks(*rendered, messages.size());
  ASSIGN_OR_RETURN(const std::optional<size_t> missing,
                   FindLeftOut(messages, options, result.text,
                               [&](size_t i) { return unmarked.begun[i] || unmarked.ended[i]; }));
  if (missing.has_value()) {
    return AboutMessage(
        absl::InvalidArgumentError(absl::StrCat(
            "messages[", first + *missing, "] (role ", Shown(messages[*missing].role, 64),
            "): the model's chat template leaves this message out where it stands")),
        first + *missing);
  }
  result.told = unmarked.whole && unmarked.text == result.text;
  if (result.told) result.messages = std::move(unmarked.plain);
  if (!options.continue_last) return result;
  if (!result.told || !unmarked.ended.back()) {
    return AboutMessage(absl::InvalidArgumentError(
                            "continue_final_message=true: the last message says nothing, or the "
                            "model's chat template does not tell where it ends"),
                        first + messages.size() - 1);
  }
  result.text.resize(static_cast<size_t>(result.messages.back().end));
  return result;
}

absl::StatusOr<std::vector<TokenId>> ChatTemplate::Encode(const std::vector<Message>& messages,
                                                          const model::Tokenizer& tokenizer,
                                                          const ChatOptions& options) {
  ASSIGN_OR_RETURN(const std::vector<Message> known, Known(messages));
  ASSIGN_OR_RETURN(const Marked marked, RenderKnown(known, tokenizer, options));
  return tokenizer.Encode(marked.text, nullptr, marked.messages);
}

absl::StatusOr<ChatTemplate::Marked> ChatTemplate::RenderKnown(const std::vector<Message>& messages,
                                                               const model::Tokenizer& tokenizer,
                                                               const ChatOptions& options) {
  bool any = false;
  for (const Message& message : messages) {
    const auto size = static_cast<int64_t>(message.content.size());
    ASSIGN_OR_RETURN(const std::vector<TokenId> as_text,
                     tokenizer.Encode(message.content, nullptr, {{0, size}}));
    ASSIGN_OR_RETURN(const std::vector<TokenId> with_control, tokenizer.Encode(message.content));
    any |= as_text != with_control;
  }
  ASSIGN_OR_RETURN(Marked marked, RenderMarked(messages, options, 0));
  if (!any) marked.messages.clear();
  if (!any || marked.told) return marked;
  return WithParam(
      absl::InvalidArgumentError(
          "a message contains a control token of the model, and the model's chat template changes "
          "messages in a way that does not tell which are its own"),
      "messages");
}

absl::StatusOr<std::string> ChatTemplate::TurnHead() {
  const absl::StatusOr<Marked> marked = RenderMarked({{"user", "x"}}, {}, 0);
  if (absl::IsInvalidArgument(marked.status())) return std::string();  // it wants other messages
  RETURN_IF_ERROR(marked.status());
  if (marked->messages.size() != 1) return std::string();
  return marked->text.substr(0, static_cast<size_t>(marked->messages.front().begin));
}

absl::StatusOr<bool> ChatTemplate::InTurn(const model::Tokenizer& tokenizer,
                                          absl::Span<const TokenId> document) {
  if (document.empty()) return false;  // none, or not told
  if (!model::IsControl(tokenizer, document.front())) return false;
  ASSIGN_OR_RETURN(const std::string head, TurnHead());
  ASSIGN_OR_RETURN(const std::string text, tokenizer.Decode(document, /*skip_special=*/false));
  ASSIGN_OR_RETURN(const std::vector<TokenId> ids, tokenizer.Encode(head));
  std::string before;
  model::StreamDecoder stream(&tokenizer, /*skip_special=*/false);
  for (const TokenId id : ids) {
    const bool control = model::IsControl(tokenizer, id);
    if (control && absl::StartsWith(text, head.substr(before.size()))) return true;
    ASSIGN_OR_RETURN(const std::string piece, stream.Push(id));
    before += piece;
    if (!absl::StartsWith(head, before)) return false;  // a tokenizer that does not give back texts
  }
  return false;
}

absl::StatusOr<model::Seam> ChatTemplate::EncodeBehind(const std::vector<Message>& messages,
                                                       const model::Tokenizer& tokenizer,
                                                       const library::DocumentEnds& document,
                                                       int64_t most_given_up,
                                                       const ChatOptions& options) {
  ASSIGN_OR_RETURN(const std::vector<Message> known, Known(messages));
  ASSIGN_OR_RETURN(const bool in_turn, InTurn(tokenizer, document.first));
  size_t first = 0;  // behind the system's, and a developer's, which is as good
  while (first < known.size() &&
         (known[first].role == "system" || known[first].role == "developer")) {
    ++first;
  }
  if (!in_turn || first == known.size() || known[first].role != "user") {
    ASSIGN_OR_RETURN(const Marked marked, RenderKnown(known, tokenizer, options));
    ASSIGN_OR_RETURN(model::Seam seam, model::JoinTokens(tokenizer, document.last, most_given_up,
                                                         marked.text, nullptr, marked.messages));
    if (!seam.tokens.empty() && seam.tokens.front() == tokenizer.bos_token_id()) {
      seam.tokens.erase(seam.tokens.begin());
    }
    return seam;
  }
  std::vector<Message> said(known.begin() + static_cast<std::ptrdiff_t>(first), known.end());
  for (size_t i = first; i-- > 0;) {
    said.front().content = absl::StrCat(known[i].content, "\n\n", said.front().content);
  }
  ASSIGN_OR_RETURN(Marked marked, RenderMarked(said, options, first));
  if (marked.messages.empty()) {
    return AboutMessage(
        absl::InvalidArgumentError(
            "the model's chat template changes messages in a way that does not tell where the "
            "first one begins, and the document stands in that turn"),
        first);
  }
  const int64_t cut = marked.messages.front().begin;
  constexpr absl::string_view kEmptyLine = "\n\n";
  for (model::PlainRange& range : marked.messages) {
    range.begin += static_cast<int64_t>(kEmptyLine.size()) - cut;
    range.end += static_cast<int64_t>(kEmptyLine.size()) - cut;
  }
  return model::JoinTokens(
      tokenizer, document.last, most_given_up,
      absl::StrCat(kEmptyLine, absl::string_view(marked.text).substr(static_cast<size_t>(cut))),
      nullptr, marked.messages);
}

std::string PlainChat(const std::vector<Message>& messages) {
  std::string prompt;
  for (const Message& message : messages) {
    if (message.role == "system") {
      absl::StrAppend(&prompt, "\n\n", message.content);
    } else if (message.role == "user") {
      absl::StrAppend(&prompt, "\n\nQuestion: ", message.content, "\nAnswer:");
    } else {
      prompt += message.content;  // as the model gave it, with its space
    }
  }
  return prompt;
}

}  // namespace carrel::serving
