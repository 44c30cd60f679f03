#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <clocale>
#include <cstdio>
#include <memory>
#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/status.h"
#include "tools/carrel/chat_partner.h"
#include "tools/carrel/commands.h"
#include "tools/carrel/known_names.h"
#include "tools/carrel/line_editor.h"
#include "tools/carrel/retrieval_flags.h"
#include "tools/carrel/source_report.h"

namespace carrel::tools {
namespace {

using serving::AnswerSource;
using serving::Message;

std::atomic<bool> interrupted{false};

void OnInterrupt(int) { interrupted = true; }

// While it lives, keys come one by one. Whatever ends the program, the terminal is as it was.
class RawTerminal {
 public:
  RawTerminal() {
    tcgetattr(STDIN_FILENO, &before_);
    termios raw = before_;
    cfmakeraw(&raw);
    raw.c_oflag = before_.c_oflag;
    tcsetattr(STDIN_FILENO, TCSADRAIN, &raw);
    std::fputs("\x1b[?2004h", stdout);  // pasted text is marked
  }
  ~RawTerminal() {
    std::fputs("\x1b[?2004l", stdout);
    std::fflush(stdout);
    tcsetattr(STDIN_FILENO, TCSADRAIN, &before_);
  }

 private:
  termios before_;
};

int Columns() {
  winsize size = {};
  return ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

// What somebody types, or the lines of a file. None: there is no more.
class Input {
 public:
  explicit Input(bool terminal) : terminal_(terminal), editor_("> ") {}

  absl::StatusOr<std::optional<std::string>> Next() {
    return terminal_ ? FromTerminal() : FromFile();
  }

 private:
  absl::StatusOr<std::optional<std::string>> FromTerminal() {
    RawTerminal raw;
    Show(editor_.Draw(Columns()));
    for (;;) {
      char bytes[4096];
      const ssize_t n = read(STDIN_FILENO, bytes, sizeof(bytes));
      if (n < 0 && errno == EINTR) continue;  // the window has another size
      if (n < 0) return ErrnoStatus(errno, "reading the terminal");
      if (n == 0) return std::optional<std::string>();
      for (ssize_t i = 0; i < n; ++i) {
        switch (editor_.Feed(bytes[i])) {
          case LineEditor::Event::kSubmit:
            Show(editor_.Draw(Columns()));
            Show(editor_.Leave());
            return std::optional<std::string>(editor_.Take());
          case LineEditor::Event::kEnd:
            Show(editor_.Leave());
            return std::optional<std::string>();
          case LineEditor::Event::kInterrupt:
            Show(editor_.Leave());
            Show("(Ctrl-D ends the chat)\r\n");
            break;
          default:
            break;
        }
      }
      Show(editor_.Draw(Columns()));
    }
  }

  static absl::StatusOr<std::optional<std::string>> FromFile() {
    std::string line;
    for (int c; (c = std::getchar()) != EOF;) {
      if (c == '\n' && !line.empty() && line.back() == '\\') {
        line.back() = '\n';
      } else if (c == '\n') {
        return std::optional<std::string>(line);
      } else {
        line += static_cast<char>(c);
      }
    }
    if (line.empty()) return std::optional<std::string>();
    return std::optional<std::string>(line);
  }

  static void Show(const std::string& bytes) {
    std::fwrite(bytes.data(), 1, bytes.size(), stdout);
    std::fflush(stdout);
  }

  const bool terminal_;
  LineEditor editor_;
};

struct ChatFlags {
  RetrievalFlags retrieval;
  std::string api;
  std::string system;
  ChatSettings settings;
  const CLI::App* command = nullptr;  // which flags were given
};

constexpr char kHelp[] =
    "Type a message, and Enter. Alt-Enter, or a backslash at the end of a line, goes on in the "
    "next.\n"
    "  /sources  what the last answer rests on; a number alone shows that source whole\n"
    "  /new      begin a new conversation\n"
    "  /quit     end (or Ctrl-D); Ctrl-C stops an answer\n";

class Chat {
 public:
  Chat(ChatFlags flags, std::unique_ptr<ChatPartner> partner, bool terminal)
      : flags_(std::move(flags)),
        partner_(std::move(partner)),
        terminal_(terminal),
        input_(terminal) {
    Begin();
  }

  absl::Status Run() {
    if (terminal_) {
      absl::PrintF("%s%s. /help says what else there is.\n", Harmless(partner_->name()),
                   flags_.settings.context.empty()
                       ? ", without a document"
                       : absl::StrCat(" about ", flags_.settings.context));
    }
    TellSampling(partner_->sampling(flags_.settings.sampling));
    for (;;) {
      ASSIGN_OR_RETURN(const std::optional<std::string> typed, input_.Next());
      if (!typed.has_value()) return absl::OkStatus();
      const std::string said(absl::StripAsciiWhitespace(*typed));
      if (said.empty()) continue;
      if (said == "/quit" || said == "/exit") return absl::OkStatus();
      if (Command(said)) continue;
      const absl::Status status = Ask(said);
      if (absl::IsCancelled(status)) {
        absl::PrintF("\n(stopped)\n");
        continue;
      }
      if (!status.ok() && !terminal_) return status;
      if (!status.ok()) absl::PrintF("%s\n", Harmless(status.message()));
    }
  }

 private:
  void Begin() {
    messages_.clear();
    sources_.clear();
    if (!flags_.system.empty()) messages_.push_back({"system", flags_.system});
  }

  bool Command(const std::string& said) {
    int64_t number = 0;
    if (absl::SimpleAtoi(said, &number) && number >= 1 &&
        number <= static_cast<int64_t>(sources_.size())) {
      const AnswerSource& source = sources_[static_cast<size_t>(number - 1)];
      absl::PrintF("[%d] bytes %d to %d of %s, %.0f%%\n%s\n", number, source.begin, source.end,
                   flags_.settings.context, 100 * source.share, Harmless(source.text));
      return true;
    }
    if (said[0] != '/') return false;
    if (said == "/sources") {
      ShowSources();
    } else if (said == "/new") {
      Begin();
      absl::PrintF("(a new conversation)\n");
    } else {
      if (said != "/help") absl::PrintF("There is no %s.\n", Harmless(said));
      std::fputs(kHelp, stdout);
    }
    return true;
  }

  // Once: how answers are drawn, where nobody here said so.
  void TellSampling(const std::string& how) {
    if (how.empty() || told_sampling_) return;
    told_sampling_ = true;
    std::fflush(stdout);
    absl::FPrintF(stderr, "carrel: %s\n", Harmless(how));
  }

  void ShowSources() const {
    std::fputs(SourcesTable(sources_, terminal_ ? Columns() : 100).c_str(), stdout);
  }

  absl::Status Ask(const std::string& said) {
    messages_.push_back({"user", said});
    interrupted = false;
    std::string shown;
    // An answer's first line begins at the left, whatever the model says first.
    const auto show = [&](const std::string& piece) {
      const absl::string_view rest =
          shown.empty() ? absl::StripLeadingAsciiWhitespace(piece) : absl::string_view(piece);
      absl::StrAppend(&shown, rest);
      std::fputs(Harmless(std::string(rest)).c_str(), stdout);
      std::fflush(stdout);
    };
    const absl::StatusOr<ChatAnswer> answer =
        partner_->Answer(messages_, flags_.settings, {show, [] { return !interrupted.load(); }});
    if (!answer.ok()) {
      messages_.pop_back();  // as if it had not been asked
      if (!shown.empty() && !absl::IsCancelled(answer.status())) absl::PrintF("\n");
      return answer.status();
    }
    absl::PrintF("\n");
    messages_.push_back({"assistant", answer->text});
    sources_ = answer->sources;
    TellSampling(answer->sampling);
    if (answer->cut_off) absl::PrintF("(cut off at --max-tokens)\n");
    if (flags_.settings.sources > 0) ShowSources();
    if (terminal_) {
      absl::PrintF(
          "\x1b[2m%s of %s prompt tokens known, first token after %.0f ms, %.1f ms per "
          "token\x1b[0m\n",
          absl::StrCat(answer->cached_tokens), absl::StrCat(answer->prompt_tokens),
          answer->prompt_ms, answer->ms_per_token);
    }
    std::fflush(stdout);
    return absl::OkStatus();
  }

  const ChatFlags flags_;
  const std::unique_ptr<ChatPartner> partner_;
  const bool terminal_;
  bool told_sampling_ = false;
  Input input_;
  std::vector<Message> messages_;
  std::vector<AnswerSource> sources_;
};

absl::Status RunChat(ChatFlags& flags) {
  RetrievalFlags& retrieval = flags.retrieval;
  std::unique_ptr<ChatPartner> partner;
  if (flags.api.empty()) {
    if (retrieval.model_dir.empty()) {
      return absl::InvalidArgumentError(
          "chat needs --model, or --api with the URL of a carrel api");
    }
    RETURN_IF_ERROR(retrieval.sampling.Check());
    RETURN_IF_ERROR(retrieval.Resolve());
    ASSIGN_OR_RETURN(partner, MakeLocalPartner(retrieval));
  } else {
    RETURN_IF_ERROR(CheckApiFlags(*flags.command));
    RETURN_IF_ERROR(retrieval.sampling.Check());
    ASSIGN_OR_RETURN(partner, MakeApiPartner(flags.api, retrieval.store.key_file));
  }
  flags.settings.context = retrieval.context;
  if (flags.settings.context.empty()) flags.settings.sources = 0;
  flags.settings.max_tokens = retrieval.max_tokens;
  flags.settings.sampling = retrieval.sampling;
  const bool terminal = isatty(STDIN_FILENO) != 0 && isatty(STDOUT_FILENO) != 0;
  if (terminal) {
    std::setlocale(LC_CTYPE, "C.UTF-8");  // how wide characters are
    struct sigaction action = {};
    action.sa_handler = OnInterrupt;
    sigaction(SIGINT, &action, nullptr);
  }
  return Chat(flags, std::move(partner), terminal).Run();
}

}  // namespace

void AddChat(CLI::App& app, Run& chosen) {
  auto flags = std::make_shared<ChatFlags>();
  flags->settings.sources = 3;
  CLI::App& command = *app.add_subcommand(
      "chat", "Talk about a context's document in the terminal; the answers' sources by number");
  command.add_option("--api", flags->api,
                     "http://HOST:PORT of a carrel api, instead of --model and --store");
  flags->retrieval.DeclareModel(command);
  flags->retrieval.DeclareContext(command, /*context_required=*/false);
  command.get_option("--model")->required(false);
  flags->command = &command;
  command.get_option("--max-tokens")->default_val(1024);
  command.add_option("--system", flags->system, "what the model is told before the conversation");
  command.add_option("--sources", flags->settings.sources, "passages to show below each answer")
      ->check(CLI::Range(int64_t{0}, int64_t{100}));
  command.callback([flags, &chosen] {
    chosen = [flags] {
      return WithNames(RunChat(*flags), flags->retrieval.store, flags->retrieval.context);
    };
  });
}

}  // namespace carrel::tools
