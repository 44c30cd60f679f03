#include "tools/carrel/flag_rules.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"

namespace carrel::tools {
namespace {

// Lists of names. commands: empty: all that have the flag and one of those it needs.
struct Row {
  const char* commands;
  const char* flags;
  const char* needs;
  const char* values;  // of what is needed; empty: any
};

constexpr char kRetrieval[] =
    "fidelity target-error top-k select max-rows estimate dense-layers sink local budget prefetch "
    "oversample want row-cache effort method rope beyond-trained plan";

constexpr Row kRows[] = {
    {"", "tls-ca tls-cert tls-key retry-for request-timeout", "server", ""},
    {"", "key-file", "server api", ""},
    {"ask chat", "content-id", "context", ""},
    {"inspect", "model device gpu-memory fidelity threads", "plan", ""},
    {"doctor", "fidelity context threads", "model", ""},
    {"ask chat", kRetrieval, "context", ""},
    {"api", kRetrieval, "store server remote", ""},
    {"api", "read-only keep-documents", "store", ""},
    {"api", "index max-document-bytes max-queued-documents", "store jobs", ""},
    {"api", "nats nats-credentials", "jobs", ""},
    {"", "nats-credentials", "nats", ""},
    {"api", "keep-tokens", "keep-documents", ""},
    {"serve", "tls-key tls-client-ca", "tls-cert", ""},
    {"serve", "tls-cert", "tls-key", ""},
    {"eval", "html measure", "compare", ""},
    {"", "gpu-memory gpu-new-tokens", "device", "cuda"},
    {"", "bank-bytes bank-map bank-ahead", "zone", "host"},
    {"", "bank-bytes bank-map bank-ahead", "device", "cuda"},
    {"", "bank-ahead", "prefetch", "speculative"},
    {"", "oversample", "prefetch", "speculative verified"},
    {"", "row-cache", "want", "rows"},
    {"", "code-bits code-train code-scan", "index", "code auto"},
    {"", "auto-recall auto-rows", "index", "auto"},
    {"", "hnsw-m", "index", "hnsw graph auto"},
    {"", "hnsw-ef-construction", "index", "hnsw auto"},
    {"", "ivf-lists", "index", "ivf graph auto"},
};

std::vector<std::string> Names(const char* list) {
  return absl::StrSplit(list, ' ', absl::SkipEmpty());
}

const CLI::Option* Find(const CLI::App& command, absl::string_view name) {
  return command.get_option_no_throw(absl::StrCat("--", name));
}

bool Holds(const std::vector<std::string>& list, const std::string& name) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

bool Satisfied(const CLI::App& command, const FlagRule& rule) {
  return std::any_of(rule.needs.begin(), rule.needs.end(), [&](const std::string& name) {
    const CLI::Option& option = *Find(command, name);
    if (rule.values.empty()) return option.count() > 0;
    const std::string value =
        option.count() > 0 ? option.results().front() : option.get_default_str();
    return Holds(rule.values, value);
  });
}

}  // namespace

bool Given(const CLI::Option& option) {
  if (option.count() == 0) return false;
  const std::string& variable = option.get_envname();
  static const std::vector<std::string> shared = {"CARREL_TLS_CA", "CARREL_TLS_CERT",
                                                  "CARREL_TLS_KEY", "CARREL_KEY_FILE"};
  if (!Holds(shared, variable)) return true;
  const char* const value = std::getenv(variable.c_str());
  return value == nullptr || option.results().front() != value;
}

std::vector<FlagRule> RulesOf(const CLI::App& command) {
  std::vector<FlagRule> rules;
  for (const Row& row : kRows) {
    if (*row.commands != '\0' && !Holds(Names(row.commands), command.get_name())) continue;
    std::vector<std::string> needs = Names(row.needs);
    std::erase_if(needs, [&](const std::string& name) { return Find(command, name) == nullptr; });
    if (needs.empty()) continue;
    for (const std::string& flag : Names(row.flags)) {
      if (Find(command, flag) != nullptr) rules.push_back({flag, needs, Names(row.values)});
    }
  }
  return rules;
}

absl::Status CheckFlags(const CLI::App& command) {
  for (const FlagRule& rule : RulesOf(command)) {
    if (!Given(*Find(command, rule.flag)) || Satisfied(command, rule)) continue;
    const std::string with =
        rule.values.empty() ? "" : absl::StrCat(" ", absl::StrJoin(rule.values, " or "));
    return absl::InvalidArgumentError(absl::StrCat("--", rule.flag, " changes nothing without --",
                                                   absl::StrJoin(rule.needs, " or --"), with));
  }
  return absl::OkStatus();
}

}  // namespace carrel::tools
