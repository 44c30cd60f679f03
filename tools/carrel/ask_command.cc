#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/str_format.h"
#include "common/status.h"
#include "http_api/completion.h"
#include "model/safetensors.h"
#include "tools/carrel/chat_partner.h"
#include "tools/carrel/chat_text.h"
#include "tools/carrel/commands.h"
#include "tools/carrel/json_report.h"
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

void PrintAnswer(const AskFlags& flags, int64_t prompt_tokens,
                 const serving::AnswerJob::Done& answer, const serving::OpenedContext& context,
                 double open_seconds, const serving::Engine& engine) {
  const decoder::GenerateResult& result = answer.result;
  nlohmann::json json = {
      {"text",
       engine.checkpoint().tokenizer == nullptr ? nlohmann::json() : nlohmann::json(answer.text)},
      {"ids", result.ids},
      {"stop", StopReasonName(result.stop)},
      {"context_tokens", answer.context_tokens},
      {"prompt_tokens", prompt_tokens},
      {"open_seconds", open_seconds},
      {"prompt_seconds", result.prompt_seconds},
      {"generate_seconds", result.generate_seconds},
      {"tokens_per_s",
       result.steps == 0
           ? nlohmann::json()  // the prompt gives the first token: nothing to time
           : nlohmann::json(static_cast<double>(result.steps) / result.generate_seconds)}};
  if (!context.method.empty()) json["method"] = context.method;
  if (context.derived.has_value()) json["weights_derived"] = DerivedJson(*context.derived);
  if (flags.sources > 0) json["sources"] = http_api::SourcesJson(answer.sources);
  json["stats"] = StatisticsJson(engine.statistics(), flags.stats);
  if (context.plan.has_value()) json["plan"] = PlanJson(*context.plan);
  // Text that is not UTF-8 (a model may stop inside a character) is shown with replacement
  // characters; the ids are exact.
  PrintJson(json);
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
  if (!what.empty()) absl::FPrintF(stderr, "carrel: %s\n", what);
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
  const ChatListener listener = {.on_text =
                                     [&](const std::string& piece) {
                                       if (!flags.json) PrintStreamed(piece);
                                     },
                                 .wanted = [] { return true; }};
  const absl::StatusOr<ChatAnswer> answered =
      partner->knows_chats() && !flags.raw
          ? partner->Answer({{"user", flags.prompt}}, settings, listener)
          : partner->Complete(flags.prompt, settings, listener);
  RETURN_IF_ERROR(answered.status());
  const ChatAnswer& answer = *answered;
  if (!flags.json) absl::PrintF("\n");
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
  if (flags.sources > 0) json["sources"] = http_api::SourcesJson(answer.sources);
  PrintJson(json);
  return absl::OkStatus();
}

absl::StatusOr<model::Seam> PromptOf(const AskFlags& flags, bool chat, serving::Engine& engine,
                                     const serving::OpenedContext& context) {
  if (!flags.prompt_tokens.empty()) {
    model::Seam prompt;
    ASSIGN_OR_RETURN(prompt.tokens, ReadTokenFile(flags.prompt_tokens));
    return prompt;
  }
  if (!chat) return EncodePrompt(flags.retrieval, "prompt", engine, context, flags.prompt);
  const model::Tokenizer& tokenizer = *engine.checkpoint().tokenizer;
  const auto size = static_cast<int64_t>(flags.prompt.size());
  ASSIGN_OR_RETURN(const std::vector<TokenId> as_text,
                   tokenizer.Encode(flags.prompt, nullptr, {{0, size}}));
  ASSIGN_OR_RETURN(const std::vector<TokenId> with_control, tokenizer.Encode(flags.prompt));
  if (as_text != with_control) {
    Tell("the prompt holds control tokens of the model: they are text, unless --raw is given");
  }
  return engine.Encode({.messages = {{"user", flags.prompt}}}, flags.retrieval.context,
                       context.content_id);
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

// Whether the prompt is a turn of a chat; else it is taken as it is.
absl::StatusOr<bool> AsksInAChat(const AskFlags& flags, serving::Engine& engine) {
  if (flags.raw || !flags.prompt_tokens.empty()) return false;
  const absl::Status chat = engine.chat().status();
  if (absl::IsNotFound(chat)) return false;
  if (!chat.ok()) return OfferRaw(chat);
  if (flags.retrieval.missing_bytes != "refuse") {
    return absl::InvalidArgumentError(
        "--missing-bytes is of a prompt that is taken as it is: --raw");
  }
  return true;
}

// Printed as it comes, unless it is wanted as JSON.
absl::StatusOr<serving::AnswerJob::Done> Answer(const AskFlags& flags, model::Seam prompt,
                                                const serving::Sampling& sampling,
                                                const serving::OpenedContext& context,
                                                serving::Engine& engine) {
  if (flags.sources > 0 && flags.retrieval.context.empty()) {
    return absl::FailedPreconditionError("sources: there is no context");
  }
  serving::AnswerJob job;
  job.context = flags.retrieval.context;
  job.content_id = context.content_id;
  job.prompt = std::move(prompt.tokens);
  job.give_up = prompt.give_up;
  job.resume = false;
  job.max_tokens = flags.retrieval.max_tokens;
  job.sampling = sampling;
  job.keep_logits = !flags.logits.empty();
  job.ignore_eos = flags.ignore_eos;
  job.sources = flags.sources;
  if (!flags.json) {
    job.on_text = [](const std::string& piece) {
      PrintStreamed(piece);
      return true;
    };
  }
  return engine.Answer(std::move(job));
}

// Beside the answer.
void PrintStats(const decoder::GenerateResult& result, const model::Seam& prompt,
                int64_t prompt_tokens, const serving::Sampling& sampling,
                const serving::OpenedContext& context, const serving::Engine& engine) {
  if (context.plan.has_value()) std::fputs(decoder::PlanTable(*context.plan).c_str(), stderr);
  if (!context.method.empty()) absl::FPrintF(stderr, "rows: %s\n", context.method);
  absl::FPrintF(stderr, "%s%s%d prompt tokens in %.3f s, %d tokens in %.3f s, %s\n",
                StatisticsTable(engine.statistics(), true), SeamText(prompt), prompt_tokens,
                result.prompt_seconds, result.ids.size(), result.generate_seconds,
                DescribeSampling(sampling));
}

absl::Status RunAsk(AskFlags& flags) {
  if (!flags.api.empty()) return AskApi(flags);
  RETURN_IF_ERROR(CheckAsk(flags));
  RetrievalFlags& retrieval = flags.retrieval;
  RETURN_IF_ERROR(retrieval.Resolve());
  retrieval.config.measure = flags.stats;
  ASSIGN_OR_RETURN(std::shared_ptr<library::LoadedModel> model, LoadModel(retrieval));
  const absl::Time start = absl::Now();
  ASSIGN_OR_RETURN(const std::unique_ptr<serving::Engine> engine,
                   StartEngine(retrieval, std::move(model), /*answers=*/1));
  absl::Duration open_time = absl::Now() - start;
  ASSIGN_OR_RETURN(const bool chat, AsksInAChat(flags, *engine));
  const model::GenerationDefaults& advice = engine->checkpoint().generation_defaults;
  ASSIGN_OR_RETURN(const serving::Sampling sampling, retrieval.sampling.Resolve(advice));
  Tell(retrieval.sampling.Tell(advice));
  const absl::Time open_start = absl::Now();
  ASSIGN_OR_RETURN(const serving::OpenedContext context,
                   OpenContext(retrieval, *engine, /*count=*/1));
  open_time += absl::Now() - open_start;
  ASSIGN_OR_RETURN(const model::Seam prompt, PromptOf(flags, chat, *engine, context));
  ASSIGN_OR_RETURN(const serving::AnswerJob::Done answer,
                   Answer(flags, prompt, sampling, context, *engine));
  const model::Checkpoint& checkpoint = engine->checkpoint();
  const auto prompt_tokens = static_cast<int64_t>(prompt.tokens.size());
  if (!flags.logits.empty())
    RETURN_IF_ERROR(WriteLogits(flags.logits, answer.result.logits, checkpoint.config.vocab_size));
  if (!flags.json) absl::PrintF("\n");
  std::fflush(stdout);
  Tell(WhyEmpty(answer.text, answer.result, checkpoint.tokenizer.get(), retrieval.max_tokens));
  if (flags.json) {
    PrintAnswer(flags, prompt_tokens, answer, context, absl::ToDoubleSeconds(open_time), *engine);
    return absl::OkStatus();
  }
  if (flags.sources > 0) std::fputs(SourcesTable(answer.sources, kColumns).c_str(), stderr);
  if (flags.verbose) {
    std::fputs(AnswerLine(context, engine->statistics(), answer.result,
                          checkpoint.config.shape.kv_heads, prompt_tokens)
                   .c_str(),
               stderr);
  }
  if (flags.stats) PrintStats(answer.result, prompt, prompt_tokens, sampling, context, *engine);
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
      ->check(CLI::Range(int64_t{0}, int64_t{100}));
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
