#include "serving/chat_renderer.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/json.h"
#include "common/status.h"
#include "serving/render_chat.h"
#include "serving/status_details.h"

namespace carrel::serving {

using nlohmann::json;

// A process that answers a line with a line.
class ChatRenderer::Child {
 public:
  ~Child() {
    if (in_ >= 0) close(in_);
    if (out_ >= 0) close(out_);
    if (pid_ < 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }

  absl::Status Start(const std::string& python) {
    int to[2], from[2];
    if (pipe2(to, O_CLOEXEC) != 0) return ErrnoStatus(errno, "chat template: pipe");
    if (pipe2(from, O_CLOEXEC) != 0) {
      const int error = errno;
      close(to[0]);
      close(to[1]);
      return ErrnoStatus(error, "chat template: pipe");
    }
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, to[0], STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, from[1], STDOUT_FILENO);
    posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
    std::string program = python, isolated = "-I", command = "-c", script = kRenderChat;
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
    return absl::FailedPreconditionError(
        absl::StrCat("chat template: ", python, " does not start (", std::strerror(error),
                     "): rendering chats needs Python with jinja2 (Debian: python3-jinja2)"));
  }

  absl::StatusOr<json> Ask(std::string line, Clock::time_point until, int64_t most) {
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
      if (static_cast<int64_t>(answer.size()) > most) return Ended();
    }
    absl::StatusOr<json> parsed = ParseJsonObject(answer, "the chat's renderer");
    if (!parsed.ok()) return Ended();
    return parsed;
  }

 private:
  static absl::Status Wait(int fd, short events, Clock::time_point until) {
    using std::chrono::milliseconds;
    for (;;) {
      const auto left = std::chrono::duration_cast<milliseconds>(until - Clock::now()).count();
      pollfd poll_fd = {fd, events, 0};
      const int n = left <= 0 ? 0 : poll(&poll_fd, 1, static_cast<int>(left));
      if (n > 0) return absl::OkStatus();
      if (n < 0 && errno == EINTR) continue;
      return absl::DeadlineExceededError(
          "the model's chat template, or the program that renders it, took too long");
    }
  }

  static absl::Status Ended() {
    return absl::FailedPreconditionError(
        "the model's chat template: the program that renders it ended without an answer");
  }

  pid_t pid_ = -1;
  int in_ = -1, out_ = -1;
};

ChatRenderer::Clock::time_point ChatRenderer::In(absl::Duration patience) {
  return Clock::now() + std::chrono::seconds(absl::ToInt64Seconds(patience));
}

ChatRenderer::ChatRenderer(ChatRendererConfig config) : config_(std::move(config)) {}
ChatRenderer::~ChatRenderer() = default;

// One that is idle, or a new one, which knows the template.
absl::StatusOr<std::unique_ptr<ChatRenderer::Child>> ChatRenderer::Take() {
  {
    std::unique_lock lock(mu_);
    const bool there = freed_.wait_until(
        lock, In(kPatience), [this] { return !idle_.empty() || children_ < kMostChildren; });
    if (!there) {
      return absl::DeadlineExceededError(absl::StrCat("the model's chat template is busy with ",
                                                      kMostChildren, " other chats; ask again"));
    }
    if (!idle_.empty()) {
      std::unique_ptr<Child> child = std::move(idle_.back());
      idle_.pop_back();
      return child;
    }
    ++children_;
  }
  auto child = std::make_unique<Child>();
  const auto begun = [&]() -> absl::Status {
    RETURN_IF_ERROR(child->Start(config_.python));
    const json source = {{"template", config_.jinja},
                         {"bos_token", config_.bos},
                         {"eos_token", config_.eos},
                         {"max_bytes", config_.max_bytes}};
    ASSIGN_OR_RETURN(const json answer,
                     child->Ask(DumpJson(source), In(kStartPatience), int64_t{1} << 20));
    if (const json* const missing = JsonAt(answer, {"missing"}); missing != nullptr) {
      return absl::FailedPreconditionError(
          absl::StrCat("chat template: ", config_.python, " has no ", JsonText(missing),
                       ": rendering chats needs it (Debian: python3-jinja2)"));
    }
    const json* const error = JsonAt(answer, {"error"});
    if (error == nullptr) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("the model's chat template: ", JsonText(error)));
  }();
  if (begun.ok()) return child;
  child = nullptr;
  GiveBack(nullptr);
  return begun;
}

void ChatRenderer::GiveBack(std::unique_ptr<Child> child) {
  {
    std::lock_guard lock(mu_);
    if (child == nullptr) {
      --children_;
    } else {
      idle_.push_back(std::move(child));
    }
  }
  freed_.notify_one();
}

absl::Status ChatRenderer::Compile() {
  ASSIGN_OR_RETURN(std::unique_ptr<Child> child, Take());
  GiveBack(std::move(child));
  return absl::OkStatus();
}

absl::StatusOr<std::string> ChatRenderer::Render(const nlohmann::ordered_json& request) {
  ASSIGN_OR_RETURN(std::unique_ptr<Child> child, Take());
  // A byte is at most six in JSON.
  const absl::StatusOr<json> answer = child->Ask(DumpJson(request, JsonLetters::kAscii),
                                                 In(kPatience), 6 * config_.max_bytes + (1 << 16));
  if (!answer.ok()) child = nullptr;  // the next one gets a child of its own
  GiveBack(std::move(child));
  RETURN_IF_ERROR(answer.status());
  if (const json* const text = JsonAt(*answer, {"text"}); text != nullptr && text->is_string()) {
    return text->get<std::string>();
  }
  if (const json* const bytes = JsonAt(*answer, {"bytes"}); bytes != nullptr) {
    return WithCode(WithParam(absl::InvalidArgumentError(absl::StrCat(
                                  "messages: the chat as the model's template writes it has ",
                                  JsonInt(bytes), " bytes: must be at most ", config_.max_bytes,
                                  ", which is more than the model reads")),
                              "messages"),
                    kContextLengthExceeded);
  }
  return WithParam(
      absl::InvalidArgumentError(absl::StrCat("the model's chat template refuses these messages: ",
                                              JsonText(JsonAt(*answer, {"error"})))),
      "messages");
}

}  // namespace carrel::serving
