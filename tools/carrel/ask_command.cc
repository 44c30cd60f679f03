#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/str_format.h"
#include "common/json.h"
#include "common/status.h"
#include "model/safetensors.h"
#include "tools/carrel/chat_partner.h"
#include "tools/carrel/chat_text.h"
#include "tools/carrel/commands.h"
#include "tools/carrel/known_names.h"
#include "tools/carrel/lab.h"
#include "tools/carrel/report.h"
#include "tools/carrel/retrieval_flags.h"
#include "tools/carrel/source_report.h"
#include "tools/carrel/token_file.h"

namespace carrel::tools {
namespace {

constexpr int64_t kColumns = 100;  // of a line that shows a source

struct AskFlags {
  RetrievalFlags retrieval;
  std::string prompt;
  std::string prompt_tokens;
  std::string logits;
  bool raw = false;
  bool ignore_eos = false;
  bool stats = false;
  bool verbose = false;
  bool json = false;
  int64_t sources = 0;
  std::string api;
  const CLI::App* command = nullptr;  // which flags were given
};

absl::Status WriteLogits(const std::string& path, const std::vector<float>& logits,
                         int64_t vocab_size) {
  model::NamedTensor tensor;
  tensor.name = "logits";
  tensor.view.dtype = DType::kF32;
  tensor.view.shape = {static_cast<int64_t>(logits.size()) / vocab_size, vocab_size};
  tensor.view.bytes = absl::string_view(reinterpret_cast<const char*>(logits.data()),
                                        logits.size() * sizeof(float));
  return model::WriteSafetensors(path, {tensor});
}

// As it is, for files and other programs.
void PrintStreamed(const std::string& piece) {
  static const bool terminal = isatty(STDOUT_FILENO) != 0;
  const std::string text = terminal ? Harmless(piece) : piece;
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

nlohmann::json DerivedJson(const library::DerivedWeights& derived) {
  const model::Derivation& seen = derived.seen;
  return {{"of_weights_sha256", derived.of_sha256},
          {"matrices", seen.matrices},
          {"values", seen.values},
          {"quantised", seen.quantised},
          {"beyond", seen.beyond},
          {"beyond_allowed", seen.beyond_allowed},
          {"spread", seen.spread}};
}

void PrintJson(const AskFlags& flags, const std::vector<TokenId>& prompt,
               const decoder::GenerateResult& result, const nlohmann::json& text,
               absl::Span<const serving::AnswerSource> sources, OpenDecoder& open,
               double open_seconds) {
  const decoder::Decoder& decoder = open.decoder();
  nlohmann::json json = {
      {"text", text},
      {"ids", result.ids},
      {"stop", StopReasonName(result.stop)},
      {"context_tokens", decoder.context_tokens() - decoder.sequence().given_up()},
      {"prompt_tokens", prompt.size()},
      {"open_seconds", open_seconds},
      {"prompt_seconds", result.prompt_seconds},
      {"generate_seconds", result.generate_seconds},
      {"tokens_per_s",
       result.steps == 0
           ? nlohmann::json()  // the prompt gives the first token: nothing to time
           : nlohmann::json(static_cast<double>(result.steps) / result.generate_seconds)}};
  if (!open.method().empty()) json["method"] = open.method();
  if (open.derived().has_value()) json["weights_derived"] = DerivedJson(*open.derived());
  if (flags.sources > 0) json["sources"] = SourcesJson(sources);
  json["stats"] = StatisticsJson(decoder.statistics(), flags.stats);
  if (decoder.plan().has_value()) json["plan"] = PlanJson(*decoder.plan());
  // Text that is not UTF-8 (a model may stop inside a character) is shown with replacement
  // characters; the ids are exact.
  std::printf("%s\n", DumpJson(json).c_str());
}

absl::StatusOr<std::vector<serving::AnswerSource>> FindSources(
    OpenDecoder& open, const decoder::GenerateResult& result, int64_t most) {
  if (most == 0) return std::vector<serving::AnswerSource>();
  ASSIGN_OR_RETURN(const std::vector<library::Source> sources, open.Sources(result.ids, most));
  ASSIGN_OR_RETURN(const library::DocumentText* const document, open.Document());
  return WithTexts(sources, *document);
}

// Empty, unless the answer has no text: then why it ended.
std::string WhyEmpty(const std::string& text, const decoder::GenerateResult& result,
                     const model::Tokenizer* tokenizer, int64_t max_tokens) {
  if (tokenizer == nullptr || !absl::StripAsciiWhitespace(text).empty()) return "";
  std::string why;
  if (result.stop == decoder::StopReason::kEos) {
    const absl::StatusOr<std::string> token =
        tokenizer->Decode({result.end_token}, /*skip_special=*/false);
    why = absl::StrCat("it ended at ", token.ok() && !token->empty()
                                           ? Harmless(*token)
                                           : absl::StrCat("token ", result.end_token));
  } else if (result.stop == decoder::StopReason::kMaxTokens) {
    why = absl::StrCat("it ended at --max-tokens ", max_tokens);
  } else {
    why = "it ended where the model's length does";
  }
  const size_t tokens = result.ids.size();
  return absl::StrCat("the answer is empty: ", why,
                      tokens == 0 ? "" : absl::StrCat(", after ", tokens, " tokens without text"));
}

void Tell(const std::string& what) {
  if (!what.empty()) std::fprintf(stderr, "carrel: %s\n", what.c_str());
}

// Of a running carrel api, which has model and store.
absl::Status AskApi(const AskFlags& flags) {
  RETURN_IF_ERROR(CheckApiFlags(*flags.command));
  const RetrievalFlags& retrieval = flags.retrieval;
  if (flags.prompt.empty()) return absl::InvalidArgumentError("ask --api needs PROMPT (text)");
  RETURN_IF_ERROR(retrieval.sampling.Check());
  ASSIGN_OR_RETURN(const std::unique_ptr<ChatPartner> partner,
                   MakeApiPartner(flags.api, retrieval.store.key_file));
  const ChatSettings settings = {.context = retrieval.context,
                                 .max_tokens = retrieval.max_tokens,
                                 .sampling = retrieval.sampling,
                                 .sources = flags.sources};
  const auto show = [&](const std::string& piece) {
    if (!flags.json) PrintStreamed(piece);
  };
  const auto wanted = [] { return true; };
  const std::vector<serving::Message> question = {{"user", flags.prompt}};
  absl::StatusOr<ChatAnswer> answered = absl::UnknownError("");
  if (partner->knows_chats() && !flags.raw) {
    answered = partner->Answer(question, settings, show, wanted);
  } else {
    answered = partner->Complete(flags.prompt, settings, show, wanted);
  }
  RETURN_IF_ERROR(answered.status());
  const ChatAnswer& answer = *answered;
  if (!flags.json) std::printf("\n");
  std::fflush(stdout);
  Tell(answer.sampling);
  if (absl::StripAsciiWhitespace(answer.text).empty()) {
    Tell(answer.cut_off
             ? absl::StrCat("the answer is empty: it ended at --max-tokens ", retrieval.max_tokens)
             : "the answer is empty: the model ended it at once");
  }
  if (!flags.json) {
    if (flags.sources > 0) std::fputs(SourcesTable(answer.sources, kColumns).c_str(), stderr);
    return absl::OkStatus();
  }
  nlohmann::json json = {{"text", answer.text},
                         {"stop", answer.cut_off ? "max_tokens" : "eos"},
                         {"prompt_tokens", answer.prompt_tokens},
                         {"cached_tokens", answer.cached_tokens},
                         {"prompt_seconds", answer.prompt_ms / 1e3},
                         {"ms_per_token", answer.ms_per_token}};
  if (flags.sources > 0) json["sources"] = SourcesJson(answer.sources);
  std::printf("%s\n", DumpJson(json).c_str());
  return absl::OkStatus();
}

// chat: null: the prompt is taken as it is.
absl::StatusOr<model::Seam> PromptOf(const AskFlags& flags, const Chat& chat, OpenDecoder& open) {
  model::Seam prompt;
  if (!flags.prompt_tokens.empty()) {
    ASSIGN_OR_RETURN(prompt.tokens, ReadTokenFile(flags.prompt_tokens));
    return prompt;
  }
  if (chat == nullptr) {
    return EncodePrompt(flags.retrieval.missing_bytes, "prompt", open, flags.prompt);
  }
  const model::Tokenizer& tokenizer = *open.checkpoint().tokenizer;
  const auto size = static_cast<int64_t>(flags.prompt.size());
  ASSIGN_OR_RETURN(const std::vector<TokenId> as_text,
                   tokenizer.Encode(flags.prompt, nullptr, {{0, size}}));
  ASSIGN_OR_RETURN(const std::vector<TokenId> with_control, tokenizer.Encode(flags.prompt));
  if (as_text != with_control) {
    Tell("the prompt holds control tokens of the model: they are text, unless --raw is given");
  }
  const std::vector<serving::Message> messages = {{"user", flags.prompt}};
  if (flags.retrieval.context.empty()) {
    ASSIGN_OR_RETURN(prompt.tokens, chat->Encode(messages, tokenizer));
    return prompt;
  }
  ASSIGN_OR_RETURN(const library::DocumentEnds document, open.Ends());
  return chat->EncodeBehind(messages, tokenizer, document, open.decoder().most_given_up());
}

// What became of the seam between document and prompt.
std::string SeamText(const model::Seam& prompt) {
  if (!prompt.whole) return "the prompt's tokens stand apart from the document's\n";
  if (prompt.give_up == 0) return "";
  return absl::StrCat("the prompt says the document's last ", prompt.give_up,
                      " tokens anew, with what follows them\n");
}

absl::Status CheckAsk(const AskFlags& flags) {
  if (flags.retrieval.model_dir.empty()) {
    return absl::InvalidArgumentError("--model is required, or --api with the URL of a carrel api");
  }
  if (flags.prompt.empty() == flags.prompt_tokens.empty()) {
    return absl::InvalidArgumentError(
        "ask needs one of PROMPT (text) and --prompt-tokens FILE.json");
  }
  if (flags.raw && !flags.prompt_tokens.empty()) {
    return absl::InvalidArgumentError("--raw is of PROMPT: --prompt-tokens are taken as they are");
  }
  return flags.retrieval.sampling.Check();
}

// Prints the answer as it comes, unless it is wanted as JSON; its text.
struct Streamed {
  decoder::GenerateResult result;
  std::string text;
};

absl::StatusOr<Streamed> Generate(const AskFlags& flags, const decoder::SamplingConfig& sampling,
                                  const model::Seam& prompt, OpenDecoder& open) {
  const model::Tokenizer* const tokenizer = open.checkpoint().tokenizer.get();
  model::StreamDecoder stream(tokenizer);
  Streamed streamed;
  const auto show = [&](const std::string& piece) {
    streamed.text += piece;
    if (!flags.json) PrintStreamed(piece);
  };
  decoder::GenerateOptions options;
  options.max_tokens = flags.retrieval.max_tokens;
  options.give_up = prompt.give_up;
  options.sampling = sampling;
  options.keep_logits = !flags.logits.empty();
  options.ignore_eos = flags.ignore_eos;
  options.trace = flags.sources > 0;
  if (flags.sources > 0) RETURN_IF_ERROR(open.Document().status());
  options.on_token = [&](TokenId id) -> absl::Status {
    if (tokenizer == nullptr) {
      if (!flags.json) PrintStreamed(absl::StrCat(id, " "));
      return absl::OkStatus();
    }
    ASSIGN_OR_RETURN(const std::string piece, stream.Push(id));
    show(piece);
    return absl::OkStatus();
  };
  absl::StatusOr<decoder::GenerateResult> generated =
      open.decoder().Generate(prompt.tokens, options);
  RETURN_IF_ERROR(open.Confirm(generated.status()));
  streamed.result = *std::move(generated);
  if (tokenizer != nullptr) {
    ASSIGN_OR_RETURN(const std::string rest, stream.Finish());
    show(rest);
  }
  return streamed;
}

absl::Status RunAsk(AskFlags& flags) {
  if (!flags.api.empty()) return AskApi(flags);
  RETURN_IF_ERROR(CheckAsk(flags));
  RETURN_IF_ERROR(flags.retrieval.Resolve());
  flags.retrieval.config.measure = flags.stats;
  ASSIGN_OR_RETURN(std::shared_ptr<library::LoadedModel> model, LoadModel(flags.retrieval));
  ASSIGN_OR_RETURN(const Chat chat,
                   LoadChatUnlessRaw(flags.raw || !flags.prompt_tokens.empty(),
                                     flags.retrieval.model_dir, model->checkpoint()));
  if (chat != nullptr && flags.retrieval.missing_bytes != "refuse") {
    return absl::InvalidArgumentError(
        "--missing-bytes is of a prompt that is taken as it is: --raw");
  }
  const model::GenerationDefaults& advice = model->checkpoint().generation_defaults;
  ASSIGN_OR_RETURN(const decoder::SamplingConfig sampling,
                   flags.retrieval.sampling.Resolve(advice));
  Tell(flags.retrieval.sampling.Tell(advice));
  std::string turn_head;
  if (flags.sources > 0) {
    turn_head = chat == nullptr ? TurnHeadOf(flags.retrieval.model_dir, model->checkpoint())
                                : TurnHeadOf(chat);
  }
  double open_seconds = 0;
  ASSIGN_OR_RETURN(const std::unique_ptr<OpenDecoder> open,
                   MakeDecoder(flags.retrieval, std::move(model), turn_head, &open_seconds));
  const model::Checkpoint& checkpoint = open->checkpoint();
  ASSIGN_OR_RETURN(const model::Seam prompt, PromptOf(flags, chat, *open));
  ASSIGN_OR_RETURN(const Streamed streamed, Generate(flags, sampling, prompt, *open));
  const decoder::GenerateResult& result = streamed.result;
  if (!flags.logits.empty())
    RETURN_IF_ERROR(WriteLogits(flags.logits, result.logits, checkpoint.config.vocab_size));
  ASSIGN_OR_RETURN(const std::vector<serving::AnswerSource> sources,
                   FindSources(*open, result, flags.sources));
  if (!flags.json) std::printf("\n");
  std::fflush(stdout);
  Tell(WhyEmpty(streamed.text, result, checkpoint.tokenizer.get(), flags.retrieval.max_tokens));
  if (flags.json) {
    const nlohmann::json text =
        checkpoint.tokenizer == nullptr ? nlohmann::json() : nlohmann::json(streamed.text);
    PrintJson(flags, prompt.tokens, result, text, sources, *open, open_seconds);
    return absl::OkStatus();
  }
  if (flags.sources > 0) std::fputs(SourcesTable(sources, kColumns).c_str(), stderr);
  if (flags.verbose) {
    std::fputs(AnswerLine(open->decoder(), result, checkpoint.config.shape.kv_heads,
                          static_cast<int64_t>(prompt.tokens.size()))
                   .c_str(),
               stderr);
  }
  if (flags.stats) {
    if (const auto& plan = open->decoder().plan(); plan.has_value())
      std::fputs(decoder::PlanTable(*plan).c_str(), stderr);
    if (!open->method().empty()) std::fprintf(stderr, "rows: %s\n", open->method().c_str());
    std::fprintf(stderr, "%s%s%d prompt tokens in %.3f s, %d tokens in %.3f s, %s\n",
                 StatisticsTable(open->decoder().statistics(), true).c_str(),
                 SeamText(prompt).c_str(), static_cast<int>(prompt.tokens.size()),
                 result.prompt_seconds, static_cast<int>(result.ids.size()),
                 result.generate_seconds, DescribeSampling(sampling).c_str());
  }
  return absl::OkStatus();
}

}  // namespace

void AddAsk(CLI::App& app, Run& chosen) {
  auto flags = std::make_shared<AskFlags>();
  CLI::App& command =
      *app.add_subcommand("ask", "Ask about a context's document and print what the model says");
  command.add_option("PROMPT", flags->prompt,
                     "a question, in the model's chat template where it has one");
  flags->retrieval.Declare(command, /*context_required=*/false);
  command.add_flag("--raw", flags->raw, "PROMPT as it is, control tokens too; no chat template");
  command.add_option("--prompt-tokens", flags->prompt_tokens,
                     "instead of PROMPT: a file with a JSON array of ids");
  command.add_option(
      "--logits", flags->logits,
      "write the logits of every prompt and generated position to this safetensors file");
  command.add_flag("--ignore-eos", flags->ignore_eos,
                   "go on to --max-tokens whatever the model says");
  command.add_flag("--stats", flags->stats,
                   "measure and print retrieval per layer, beside the answer");
  command.add_flag("--verbose", flags->verbose, "one line beside the answer: plan, rows, times");
  command.add_flag("--json", flags->json, "one JSON object instead of streamed text");
  command
      .add_option("--sources", flags->sources,
                  "also find so many passages of the document that the answer rests on")
      ->check(CLI::Range(int64_t{0}, int64_t{100}))
      ->capture_default_str();
  command.add_option("--api", flags->api,
                     "http://HOST:PORT of a carrel api, instead of --model and --store");
  command.get_option("--model")->required(false);
  flags->command = &command;
  MoveToLab(command, {"logits", "ignore-eos"});
  command.callback([flags, &chosen] {
    chosen = [flags] {
      return WithNames(RunAsk(*flags), flags->retrieval.store, flags->retrieval.context);
    };
  });
}

}  // namespace carrel::tools
