#include "http_api/chat_template.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "common/file.h"
#include "common/status.h"
#include "http_api/render_chat.h"
#include "model/checkpoint.h"

namespace carrel::http_api {
namespace {

using nlohmann::json;

// Where a message begins and ends in a text that is thrown away; not in any text that people write.
constexpr char kBegin[] = "\xf3\xb0\x80\x8a\xf3\xb0\x82\x93",
               kEnd[] = "\xf3\xb0\x80\x8b\xf3\xb0\x82\x94";

// The system's, whose packages are the system's.
constexpr char kPython[] = "/usr/bin/python3";

// A child that answers a line with a line.
class Renderer {
 public:
  ~Renderer() { Stop(); }

  absl::Status Start() {
    int to[2], from[2];
    if (pipe2(to, O_CLOEXEC) != 0) return ErrnoStatus(errno, "chat template: pipe");
    if (pipe2(from, O_CLOEXEC) != 0) {
      close(to[0]);
      close(to[1]);
      return ErrnoStatus(errno, "chat template: pipe");
    }
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, to[0], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, from[1], STDOUT_FILENO);
    posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
    std::string program = kPython, isolated = "-I", command = "-c", script = kRenderChat;
    char* arguments[] = {program.data(), isolated.data(), command.data(), script.data(), nullptr};
    std::string path = "PATH=/usr/local/bin:/usr/bin:/bin", utf8 = "PYTHONUTF8=1";
    char* environment[] = {path.data(), utf8.data(), nullptr};
    const int error =
        posix_spawn(&pid_, program.c_str(), &actions, nullptr, arguments, environment);
    posix_spawn_file_actions_destroy(&actions);
    close(to[0]);
    close(from[1]);
    in_ = to[1];
    out_ = from[0];
    if (error == 0) return absl::OkStatus();
    pid_ = -1;
    Stop();
    return absl::FailedPreconditionError(
        absl::StrCat("chat template: ", kPython, " does not start: ", strerror(error)));
  }

  void Stop() {
    if (in_ >= 0) close(in_);
    if (out_ >= 0) close(out_);
    in_ = out_ = -1;
    if (pid_ < 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

  bool running() const { return pid_ >= 0; }

  absl::StatusOr<json> Ask(std::string line, absl::Time until) {
    line += '\n';
    for (size_t sent = 0; sent < line.size();) {
      RETURN_IF_ERROR(Wait(in_, POLLOUT, until));
      const ssize_t n = write(in_, line.data() + sent, std::min<size_t>(line.size() - sent, 4096));
      if (n < 0 && errno != EINTR) return Ended();
      if (n > 0) sent += static_cast<size_t>(n);
    }
    std::string answer;
    while (answer.empty() || answer.back() != '\n') {
      RETURN_IF_ERROR(Wait(out_, POLLIN, until));
      char buffer[65536];
      const ssize_t n = read(out_, buffer, sizeof(buffer));
      if (n == 0 || (n < 0 && errno != EINTR)) return Ended();
      if (n > 0) answer.append(buffer, static_cast<size_t>(n));
    }
    json parsed = json::parse(answer, nullptr, /*allow_exceptions=*/false);
    if (!parsed.is_object()) return Ended();
    return parsed;
  }

 private:
  absl::Status Wait(int fd, short events, absl::Time until) {
    pollfd poll_fd = {fd, events, 0};
    const int64_t left = absl::ToInt64Milliseconds(until - absl::Now());
    const int n = left <= 0 ? 0 : poll(&poll_fd, 1, static_cast<int>(left));
    if (n > 0 || (n < 0 && errno == EINTR)) return absl::OkStatus();
    return absl::DeadlineExceededError(absl::StrCat("the model's chat template took longer than ",
                                                    absl::FormatDuration(ChatTemplate::kPatience)));
  }

  static absl::Status Ended() {
    return absl::FailedPreconditionError(
        absl::StrCat("chat template: ", kPython,
                     " with jinja2 (Debian: python3-jinja2) ended without an answer"));
  }

  pid_t pid_ = -1;
  int in_ = -1, out_ = -1;
};

class JinjaTemplate final : public ChatTemplate {
 public:
  JinjaTemplate(const std::string& jinja, const std::string& bos, const std::string& eos)
      : source_({{"template", jinja}, {"bos_token", bos}, {"eos_token", eos}}) {}

  absl::Status Compile() {
    absl::MutexLock lock(&mu_);
    return CompileLocked();
  }

  absl::StatusOr<std::string> Render(const std::vector<Message>& messages) override {
    // Templates that print a message see its fields in this order.
    nlohmann::ordered_json request = {{"messages", nlohmann::ordered_json::array()},
                                      {"add_generation_prompt", true}};
    for (const Message& message : messages) {
      request["messages"].push_back({{"role", message.role}, {"content", message.content}});
    }
    absl::MutexLock lock(&mu_);
    if (!renderer_.running()) RETURN_IF_ERROR(CompileLocked());
    ASSIGN_OR_RETURN(
        const json answer,
        AskLocked(request.dump(-1, ' ', true, nlohmann::ordered_json::error_handler_t::replace)));
    if (answer.contains("text") && answer["text"].is_string())
      return answer["text"].get<std::string>();
    return absl::InvalidArgumentError(absl::StrCat(
        "the model's chat template refuses these messages: ", answer.value("error", "")));
  }

 private:
  absl::StatusOr<json> AskLocked(std::string request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    absl::StatusOr<json> answer = renderer_.Ask(std::move(request), absl::Now() + kPatience);
    if (!answer.ok()) renderer_.Stop();  // the next one gets a child of its own
    return answer;
  }

  absl::Status CompileLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    RETURN_IF_ERROR(renderer_.Start());
    ASSIGN_OR_RETURN(const json answer, AskLocked(source_.dump()));
    if (!answer.contains("error")) return absl::OkStatus();
    renderer_.Stop();
    return absl::InvalidArgumentError(
        absl::StrCat("the model's chat template: ", answer.value("error", "")));
  }

  const json source_;
  absl::Mutex mu_;
  Renderer renderer_ ABSL_GUARDED_BY(mu_);
};

absl::StatusOr<std::string> TokenText(const model::Checkpoint& checkpoint, TokenId id) {
  if (id < 0) return std::string();
  return checkpoint.tokenizer->Decode({id}, /*skip_special=*/false);
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
  const json config = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!config.is_object() || !config.contains("chat_template")) return std::string();
  const json& found = config["chat_template"];
  if (found.is_string()) return found.get<std::string>();
  for (const json& named : found) {  // [{"name", "template"}]
    if (named.is_object() && named.value("name", "") == "default")
      return named.value("template", "");
  }
  return std::string();
}

// Takes the marks out, and tells what stood between them.
absl::StatusOr<std::string> Unmarked(const std::string& text,
                                     std::vector<model::PlainRange>& plain) {
  std::string rest;
  size_t at = 0;
  for (size_t begin; (begin = text.find(kBegin, at)) != std::string::npos;) {
    const size_t first = begin + sizeof(kBegin) - 1, end = text.find(kEnd, first);
    if (end == std::string::npos) return absl::InvalidArgumentError("an end is missing");
    rest.append(text, at, begin - at);
    const auto from = static_cast<int64_t>(rest.size());
    rest.append(text, first, end - first);
    plain.push_back({from, static_cast<int64_t>(rest.size())});
    at = end + sizeof(kEnd) - 1;
  }
  rest.append(text, at);
  return rest;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ChatTemplate>> ChatTemplate::Create(const std::string& jinja,
                                                                   const std::string& bos,
                                                                   const std::string& eos) {
  auto chat = std::make_unique<JinjaTemplate>(jinja, bos, eos);
  RETURN_IF_ERROR(chat->Compile());
  return chat;
}

absl::StatusOr<std::unique_ptr<ChatTemplate>> ChatTemplate::Load(
    const std::string& model_path, const model::Checkpoint& checkpoint) {
  if (checkpoint.tokenizer == nullptr) {
    return absl::FailedPreconditionError("the model came without a tokenizer");
  }
  ASSIGN_OR_RETURN(const std::string jinja, FindTemplate(model_path, checkpoint));
  if (jinja.empty()) {
    return absl::NotFoundError(absl::StrCat(
        model_path, " has no chat template (chat_template.jinja, tokenizer_config.json or GGUF)"));
  }
  ASSIGN_OR_RETURN(const std::string bos,
                   TokenText(checkpoint, checkpoint.tokenizer->bos_token_id()));
  const std::vector<TokenId>& ends = checkpoint.config.eos_token_ids;
  ASSIGN_OR_RETURN(const std::string eos, TokenText(checkpoint, ends.empty() ? -1 : ends.front()));
  return Create(jinja, bos, eos);
}

// A chat's text, and where in it its messages stand.
struct ChatTemplate::Marked {
  std::string text;
  std::vector<model::PlainRange> messages;
};

absl::StatusOr<ChatTemplate::Marked> ChatTemplate::RenderMarked(
    const std::vector<Message>& messages) {
  std::vector<Message> marked = messages;
  for (Message& message : marked) {
    // White space at the ends stays outside, for templates that trim it.
    const absl::string_view inner = absl::StripAsciiWhitespace(message.content);
    const auto before = static_cast<size_t>(inner.data() - message.content.data());
    message.content = absl::StrCat(message.content.substr(0, before), kBegin, inner, kEnd,
                                   message.content.substr(before + inner.size()));
  }
  ASSIGN_OR_RETURN(const std::string rendered, Render(marked));
  Marked result;
  const absl::StatusOr<std::string> unmarked = Unmarked(rendered, result.messages);
  ASSIGN_OR_RETURN(result.text, Render(messages));
  if (unmarked.ok() && *unmarked == result.text) return result;
  return absl::InvalidArgumentError(
      "a message contains a control token of the model, and the model's chat template changes "
      "messages in a way that does not tell which are its own");
}

absl::StatusOr<ChatTemplate::Marked> ChatTemplate::RenderFor(const std::vector<Message>& messages,
                                                             const model::Tokenizer& tokenizer) {
  bool any = false;
  for (const Message& message : messages) {
    const auto size = static_cast<int64_t>(message.content.size());
    ASSIGN_OR_RETURN(const std::vector<TokenId> as_text,
                     tokenizer.Encode(message.content, nullptr, {{0, size}}));
    ASSIGN_OR_RETURN(const std::vector<TokenId> with_control, tokenizer.Encode(message.content));
    any |= as_text != with_control;
  }
  if (any) return RenderMarked(messages);
  Marked marked;
  ASSIGN_OR_RETURN(marked.text, Render(messages));
  return marked;
}

absl::StatusOr<std::vector<TokenId>> ChatTemplate::Encode(const std::vector<Message>& messages,
                                                          const model::Tokenizer& tokenizer) {
  ASSIGN_OR_RETURN(const Marked marked, RenderFor(messages, tokenizer));
  return tokenizer.Encode(marked.text, nullptr, marked.messages);
}

absl::StatusOr<std::string> ChatTemplate::TurnHead() {
  const absl::StatusOr<Marked> marked = RenderMarked({{"user", "x"}});
  if (absl::IsInvalidArgument(marked.status())) return std::string();  // it wants other messages
  RETURN_IF_ERROR(marked.status());
  if (marked->messages.size() != 1) return std::string();
  return marked->text.substr(0, static_cast<size_t>(marked->messages.front().begin));
}

absl::StatusOr<bool> ChatTemplate::InTurn(const model::Tokenizer& tokenizer,
                                          absl::Span<const TokenId> document) {
  const auto is_control = [&](TokenId id) -> absl::StatusOr<bool> {
    ASSIGN_OR_RETURN(const std::string hidden, tokenizer.Decode({id}, /*skip_special=*/true));
    ASSIGN_OR_RETURN(const std::string shown, tokenizer.Decode({id}, /*skip_special=*/false));
    return hidden.empty() && !shown.empty();
  };
  if (document.empty()) return false;  // none, or not told
  ASSIGN_OR_RETURN(const bool begins, is_control(document.front()));
  if (!begins) return false;
  ASSIGN_OR_RETURN(const std::string head, TurnHead());
  ASSIGN_OR_RETURN(const std::string text, tokenizer.Decode(document, /*skip_special=*/false));
  ASSIGN_OR_RETURN(const std::vector<TokenId> ids, tokenizer.Encode(head));
  std::string before;
  model::StreamDecoder stream(&tokenizer, /*skip_special=*/false);
  for (const TokenId id : ids) {
    ASSIGN_OR_RETURN(const bool control, is_control(id));
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
                                                       int64_t most_given_up) {
  ASSIGN_OR_RETURN(const bool in_turn, InTurn(tokenizer, document.first));
  const bool system = !messages.empty() && messages.front().role == "system";
  const size_t first = system ? 1 : 0;
  if (!in_turn || messages.size() <= first || messages[first].role != "user") {
    ASSIGN_OR_RETURN(const Marked marked, RenderFor(messages, tokenizer));
    ASSIGN_OR_RETURN(model::Seam seam, model::JoinTokens(tokenizer, document.last, most_given_up,
                                                         marked.text, nullptr, marked.messages));
    if (!seam.tokens.empty() && seam.tokens.front() == tokenizer.bos_token_id()) {
      seam.tokens.erase(seam.tokens.begin());
    }
    return seam;
  }
  std::vector<Message> said(messages.begin() + static_cast<std::ptrdiff_t>(first), messages.end());
  if (system) said.front().content = absl::StrCat(messages[0].content, "\n\n", said[0].content);
  ASSIGN_OR_RETURN(Marked marked, RenderMarked(said));
  if (marked.messages.empty()) {
    return absl::InvalidArgumentError("the model's chat template leaves out the first message");
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

}  // namespace carrel::http_api
