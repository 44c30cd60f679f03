#include <CLI/CLI.hpp>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/file.h"
#include "common/json.h"
#include "common/status.h"
#include "eval/needle_document.h"
#include "model/tokenizer/tokenizer.h"
#include "synth/random.h"
#include "tools/carrel/commands.h"
#include "tools/carrel/json_report.h"

namespace carrel::tools {
namespace {

struct NeedleFlags {
  std::string model_dir;
  std::string out;
  std::vector<int64_t> lengths;
  std::vector<std::string> kinds = {"single"};
  eval::NeedleConfig config = {.depths = {0, 0.25, 0.5, 0.75, 1}};
  bool json = false;
};

std::string QuestionLines(const eval::NeedleDocument& document, int64_t length) {
  std::string lines;
  for (const eval::NeedleQuestion& question : document.questions) {
    const nlohmann::ordered_json json = {
        {"type", question.type},     {"kind", std::string(eval::NeedleKindName(question.kind))},
        {"length", length},          {"depth", question.depth},
        {"answer", question.answer}, {"prompt", question.prompt}};
    absl::StrAppend(&lines, DumpJson(json), "\n");
  }
  return lines;
}

absl::Status RunNeedle(NeedleFlags& flags) {
  flags.config.kinds.clear();
  for (const std::string& name : flags.kinds) {
    ASSIGN_OR_RETURN(const eval::NeedleKind kind, eval::ParseNeedleKind(name));
    flags.config.kinds.push_back(kind);
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<model::Tokenizer> tokenizer,
                   model::LoadTokenizer(flags.model_dir));
  const auto count = [&](absl::string_view text) -> absl::StatusOr<int64_t> {
    ASSIGN_OR_RETURN(const std::vector<TokenId> ids, tokenizer->Encode(text));
    return static_cast<int64_t>(ids.size());
  };
  std::error_code failed;
  std::filesystem::create_directories(flags.out, failed);
  if (failed) return ErrnoStatus(failed.value(), absl::StrCat("create folder ", flags.out));
  nlohmann::json report = nlohmann::json::array();
  for (const int64_t length : flags.lengths) {
    eval::NeedleConfig config = flags.config;
    config.tokens = length;
    // Documents of different lengths differ in their facts too.
    config.seed = synth::Mix(flags.config.seed, static_cast<uint64_t>(length));
    absl::StatusOr<eval::NeedleDocument> document = eval::MakeNeedleDocument(config, count);
    if (!document.ok()) return Annotate(document.status(), absl::StrCat("length ", length));
    const std::string base = absl::StrCat(flags.out, "/needle-", length);
    RETURN_IF_ERROR(WriteFileAtomically(base + ".txt", document->text));
    RETURN_IF_ERROR(
        WriteFileAtomically(base + ".questions.jsonl", QuestionLines(*document, length)));
    report.push_back({{"document", base + ".txt"},
                      {"questions_file", base + ".questions.jsonl"},
                      {"length", length},
                      {"tokens", document->tokens},
                      {"questions", document->questions.size()}});
    if (flags.json) continue;
    absl::PrintF("%s.txt: %d tokens, %d questions\n", base, document->tokens,
                 document->questions.size());
  }
  if (flags.json) PrintJson(report);
  return absl::OkStatus();
}

}  // namespace

void AddNeedle(CLI::App& app, Run& chosen) {
  auto flags = std::make_shared<NeedleFlags>();
  CLI::App& command = *app.add_subcommand(
      "needle",
      "Write documents with facts hidden at chosen depths, in the demo model's language, and "
      "questions about them");
  command
      .add_option("--model", flags->model_dir, "folder or GGUF file whose tokenizer counts tokens")
      ->required();
  command.add_option("--out", flags->out, "folder of needle-LENGTH.txt and .questions.jsonl")
      ->required();
  command.add_option("--lengths", flags->lengths, "tokens of the documents, say 2000,8000")
      ->required()
      ->delimiter(',');
  command
      .add_option("--depths", flags->config.depths, "where facts stand: 0 the beginning, 1 the end")
      ->delimiter(',');
  command
      .add_option("--kinds", flags->kinds,
                  "single (one fact) | multi-value (several values of a key, the others elsewhere) "
                  "| two-hop (a keeper, whose city stands elsewhere)")
      ->delimiter(',');
  command.add_option("--per-depth", flags->config.per_depth, "needles of each kind at each depth");
  command.add_option("--others", flags->config.others,
                     "facts that nobody asks for, spread over the document; 0: needles alone");
  command.add_option("--seed", flags->config.seed, "of everything drawn");
  command.add_flag("--json", flags->json, "report as one JSON array");
  command.callback([flags, &chosen] { chosen = [flags] { return RunNeedle(*flags); }; });
}

}  // namespace carrel::tools
