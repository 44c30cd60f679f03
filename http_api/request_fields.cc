#include "http_api/request_fields.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/json.h"
#include "common/shown.h"
#include "common/status.h"
#include "http_api/api_error.h"

namespace carrel::http_api {
namespace {

using nlohmann::json;

constexpr char kAll[] = "chat prompt";
constexpr char kNoTools[] = "tools are not supported";
constexpr char kNoPenalty[] = "use repetition_penalty";
constexpr char kNoForm[] = "answers of a given form are not supported";
constexpr char kNoSampler[] =
    "this way of drawing is not supported: temperature, top_p, top_k, min_p";
constexpr char kNotRead[] = "not supported";
constexpr char kMaxTokens[] = "say max_tokens";
constexpr char kKwargs[] = "say chat_template_kwargs";

bool IsNothing(const json& value) {
  return value.is_null() || value == false || value == "" ||
         (value.is_structured() && value.empty());
}

bool IsNeutral(const FieldRule& rule, const json& value) {
  if (value.is_null()) return true;
  const absl::StatusOr<json> taken = ParseJson(rule.neutral, rule.name);
  return taken.ok() && std::find(taken->begin(), taken->end(), value) != taken->end();
}

absl::string_view NameOf(RequestKind kind) {
  return kind == RequestKind::kChat ? "chat" : kind == RequestKind::kPrompt ? "prompt" : "message";
}

bool Holds(const FieldRule& rule, RequestKind kind) {
  return absl::StrContains(rule.where, NameOf(kind));
}

const FieldRule* Find(RequestKind kind, absl::string_view name) {
  for (const FieldRule& rule : FieldRules()) {
    if (rule.name == name && Holds(rule, kind)) return &rule;
  }
  return nullptr;
}

// Without what people write in several ways: maxTokens, max-tokens.
std::string Plain(absl::string_view name) {
  std::string plain;
  for (const char c : name) {
    if (absl::ascii_isalnum(c)) plain += absl::ascii_tolower(c);
  }
  return plain;
}

// Letters that must be added, left out, changed, or swapped with the next.
size_t Distance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> before, last(b.size() + 1), now(b.size() + 1);
  std::iota(last.begin(), last.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    now[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      now[j + 1] = std::min({last[j + 1] + 1, now[j] + 1, last[j] + (a[i] != b[j])});
      if (i > 0 && j > 0 && a[i] == b[j - 1] && a[i - 1] == b[j]) {
        now[j + 1] = std::min(now[j + 1], before[j - 1] + 1);
      }
    }
    before = std::exchange(last, now);
  }
  return last[b.size()];
}

// A name that is read and that this one is nearly; null: none.
const FieldRule* Meant(RequestKind kind, absl::string_view name) {
  const std::string given = Plain(name.substr(0, 64));
  const FieldRule* meant = nullptr;
  size_t least = SIZE_MAX;
  for (const FieldRule& rule : FieldRules()) {
    if (rule.kind != FieldRule::kRead || !Holds(rule, kind)) continue;
    const std::string known = Plain(rule.name);
    size_t distance = Distance(given, known);
    if (distance > (known.size() < 5 ? 1u : 2u)) distance = SIZE_MAX;
    // "context_name", "model_id", "carrel_context".
    bool within = known.size() >= 5 && absl::EndsWith(given, known);
    for (const char* more : {"name", "id", "ids", "names", "list", "value"}) {
      within |= given == absl::StrCat(known, more);
    }
    if (within) distance = std::min<size_t>(distance, 2);
    if (distance >= least) continue;
    least = distance;
    meant = &rule;
  }
  return meant;
}

absl::Status Refused(absl::string_view path, absl::string_view name, const json& value,
                     absl::string_view what) {
  const std::string whole = absl::StrCat(path, name);
  return WithParam(absl::InvalidArgumentError(
                       absl::StrCat(Shown(whole, 100), "=", ShownJson(value), ": ", what)),
                   whole.substr(0, 100));
}

absl::Status CheckField(RequestKind kind, absl::string_view path, const std::string& name,
                        const json& value, std::vector<std::string>& ignored) {
  constexpr size_t kMostIgnored = 100;
  const FieldRule* const rule = Find(kind, name);
  if (rule != nullptr && rule->kind != FieldRule::kNeutral) return absl::OkStatus();
  if (rule != nullptr) {
    if (IsNeutral(*rule, value)) return absl::OkStatus();
    return Refused(path, name, value, absl::StrCat("leave it out: ", rule->words));
  }
  if (IsNothing(value)) return absl::OkStatus();
  if (const FieldRule* const meant = Meant(kind, name); meant != nullptr) {
    return Refused(path, name, value,
                   absl::StrCat("there is no such field; did you mean ", meant->name, "?"));
  }
  const std::string whole = absl::StrCat(path, name.substr(0, 100));
  if (ignored.size() < kMostIgnored &&
      std::find(ignored.begin(), ignored.end(), whole) == ignored.end()) {
    ignored.push_back(whole);
  }
  return absl::OkStatus();
}

using R = FieldRule;

const R kRules[] = {
    {"model", kAll, R::kRead, "", "the model's name, or NAME@CONTEXT; empty: the one there is"},
    {"context", kAll, R::kRead, "", "whose document stands before all"},
    {"messages", "chat", R::kRead, "", "1 .. 10000"},
    {"prompt", "prompt", R::kRead, "", "a text, or a list of one"},
    {"max_tokens", kAll, R::kRead, "", "1 .. 1048576, by default 1024; -1: what fits"},
    {"max_completion_tokens", kAll, R::kRead, "", "the same, and counts before it"},
    {"temperature", kAll, R::kRead, "", "0 .. 2; 0: the likeliest token each time"},
    {"top_p", kAll, R::kRead, "", "above 0, to 1"},
    {"top_k", kAll, R::kRead, "", "0 .. 2147483647; 0, -1: all"},
    {"min_p", kAll, R::kRead, "", "0 .. 1"},
    {"repetition_penalty", kAll, R::kRead, "", "0.01 .. 100; 1: none"},
    {"repeat_penalty", kAll, R::kRead, "", "llama.cpp's name of repetition_penalty"},
    {"seed", kAll, R::kRead, "", "a whole number; without: another one each time"},
    {"stop", kAll, R::kRead, "", "a text, or at most 16, of at most 1000 bytes"},
    {"stream", kAll, R::kRead, "", "true or false"},
    {"stream_options", kAll, R::kRead, "", "include_usage"},
    {"sources", kAll, R::kRead, "", "0 .. 100 passages that the answer rests on"},
    {"wait", kAll, R::kRead, "", "0 .. 600 seconds for a document that is being read"},
    {"chat_template_kwargs", "chat", R::kRead, "", "an object: more for the model's chat template"},
    {"enable_thinking", "chat", R::kRead, "", "the same as in chat_template_kwargs"},
    {"reasoning_effort", "chat", R::kRead, "", "the same as in chat_template_kwargs"},
    {"add_generation_prompt", "chat", R::kRead, "", "false: the template begins no answer"},
    {"continue_final_message", "chat", R::kRead, "",
     "true: the answer goes on in the last message"},
    // Nothing that these say changes an answer.
    {"user", kAll, R::kHarmless, "", "who asks"},
    {"metadata", kAll, R::kHarmless, "", "of the client's own"},
    {"store", kAll, R::kHarmless, "", "nothing is stored for OpenAI's tools"},
    {"service_tier", kAll, R::kHarmless, "", "there is one"},
    {"safety_identifier", kAll, R::kHarmless, "", "who asks"},
    {"prompt_cache_key", kAll, R::kHarmless, "", "what is known is found by its tokens"},
    {"prompt_cache_retention", kAll, R::kHarmless, "", "likewise"},
    {"cache_prompt", kAll, R::kHarmless, "", "likewise"},
    {"parallel_tool_calls", kAll, R::kHarmless, "", "there are no tools"},
    {"id_slot", kAll, R::kHarmless, "", "llama.cpp's"},
    {"keep_alive", kAll, R::kHarmless, "", "Ollama's: the model stays"},
    {"priority", kAll, R::kHarmless, "", "of vLLM's queue"},
    {"request_id", kAll, R::kHarmless, "", "of the client's own"},
    {"timings_per_token", kAll, R::kHarmless, "", "times stand in carrel"},
    // These would change it.
    {"n", kAll, R::kNeutral, "[1]", "one answer a request"},
    {"best_of", kAll, R::kNeutral, "[1]", "one answer a request"},
    {"echo", kAll, R::kNeutral, "[false]", "the prompt is not repeated"},
    {"suffix", "prompt", R::kNeutral, "[\"\"]", "write the model's own marks into the prompt"},
    {"logprobs", "chat", R::kNeutral, "[false, 0]", kNotRead},
    {"logprobs", "prompt", R::kNeutral, "[false]", kNotRead},
    {"top_logprobs", kAll, R::kNeutral, "[0]", kNotRead},
    {"prompt_logprobs", kAll, R::kNeutral, "[false]", kNotRead},
    {"n_probs", kAll, R::kNeutral, "[0]", kNotRead},
    {"presence_penalty", kAll, R::kNeutral, "[0]", kNoPenalty},
    {"frequency_penalty", kAll, R::kNeutral, "[0]", kNoPenalty},
    {"length_penalty", kAll, R::kNeutral, "[1]", kNoSampler},
    {"logit_bias", kAll, R::kNeutral, "[{}, []]", kNotRead},
    {"tools", kAll, R::kNeutral, "[[]]", kNoTools},
    {"tool_choice", kAll, R::kNeutral, "[\"none\", \"auto\"]", kNoTools},
    {"functions", kAll, R::kNeutral, "[[]]", kNoTools},
    {"function_call", kAll, R::kNeutral, "[\"none\", \"auto\"]", kNoTools},
    {"web_search_options", kAll, R::kNeutral, "[]", kNoTools},
    {"response_format", kAll, R::kNeutral, "[{\"type\": \"text\"}]", kNoForm},
    {"format", kAll, R::kNeutral, "[\"\"]", kNoForm},
    {"json_schema", kAll, R::kNeutral, "[\"\", {}]", kNoForm},
    {"grammar", kAll, R::kNeutral, "[\"\"]", kNoForm},
    {"structured_outputs", kAll, R::kNeutral, "[{}]", kNoForm},
    {"guided_json", kAll, R::kNeutral, "[\"\", {}]", kNoForm},
    {"guided_regex", kAll, R::kNeutral, "[\"\"]", kNoForm},
    {"guided_choice", kAll, R::kNeutral, "[[]]", kNoForm},
    {"guided_grammar", kAll, R::kNeutral, "[\"\"]", kNoForm},
    {"modalities", kAll, R::kNeutral, "[[\"text\"]]", "answers are text"},
    {"audio", kAll, R::kNeutral, "[]", "answers are text"},
    {"prediction", kAll, R::kNeutral, "[]", kNotRead},
    {"verbosity", kAll, R::kNeutral, "[\"medium\"]", kKwargs},
    {"reasoning", kAll, R::kNeutral, "[{}]", kKwargs},
    {"thinking", kAll, R::kNeutral, "[{}]", kKwargs},
    {"think", kAll, R::kNeutral, "[]", kKwargs},
    {"chat_template", kAll, R::kNeutral, "[\"\"]", "the model's own is used"},
    {"documents", kAll, R::kNeutral, "[[]]", "bring it to /v1/contexts, and name it as context"},
    {"extra_body", kAll, R::kNeutral, "[{}]", "its fields stand in the body itself"},
    {"options", kAll, R::kNeutral, "[{}]", "Ollama's: its fields stand in the body itself"},
    {"input", kAll, R::kNeutral, "[]", "say messages or prompt"},
    {"n_predict", kAll, R::kNeutral, "[-1]", kMaxTokens},
    {"max_new_tokens", kAll, R::kNeutral, "[]", kMaxTokens},
    {"max_output_tokens", kAll, R::kNeutral, "[]", kMaxTokens},
    {"max_length", kAll, R::kNeutral, "[]", kMaxTokens},
    {"min_tokens", kAll, R::kNeutral, "[0]", kNotRead},
    {"ignore_eos", kAll, R::kNeutral, "[false]", kNotRead},
    {"stop_token_ids", kAll, R::kNeutral, "[[]]", "say stop, with their texts"},
    {"stop_sequences", kAll, R::kNeutral, "[[]]", "say stop"},
    {"include_stop_str_in_output", kAll, R::kNeutral, "[false]", kNotRead},
    {"skip_special_tokens", kAll, R::kNeutral, "[true]", kNotRead},
    {"bad_words", kAll, R::kNeutral, "[[]]", kNotRead},
    {"allowed_token_ids", kAll, R::kNeutral, "[[]]", kNotRead},
    {"truncate_prompt_tokens", kAll, R::kNeutral, "[]", "nothing is cut off in silence"},
    {"use_beam_search", kAll, R::kNeutral, "[false]", kNoSampler},
    {"typical_p", kAll, R::kNeutral, "[1]", kNoSampler},
    {"top_a", kAll, R::kNeutral, "[0]", kNoSampler},
    {"tfs", kAll, R::kNeutral, "[1]", kNoSampler},
    {"tfs_z", kAll, R::kNeutral, "[1]", kNoSampler},
    {"mirostat", kAll, R::kNeutral, "[0]", kNoSampler},
    {"mirostat_mode", kAll, R::kNeutral, "[0]", kNoSampler},
    {"dynatemp_range", kAll, R::kNeutral, "[0]", kNoSampler},
    {"dry_multiplier", kAll, R::kNeutral, "[0]", kNoSampler},
    {"xtc_probability", kAll, R::kNeutral, "[0]", kNoSampler},
    {"samplers", kAll, R::kNeutral, "[[]]", kNoSampler},
    // Of a message.
    {"role", "message", R::kRead, "", "as the template knows it: system, user, assistant"},
    {"content", "message", R::kRead, "", "a text, or a list of parts of type text"},
    {"tool_calls", "message", R::kNeutral, "[[]]", kNoTools},
    {"function_call", "message", R::kNeutral, "[]", kNoTools},
    {"audio", "message", R::kNeutral, "[]", "messages are text"},
    {"prefix", "message", R::kNeutral, "[false]", "say continue_final_message"},
    {"refusal", "message", R::kHarmless, "", "of an earlier answer"},
    {"annotations", "message", R::kHarmless, "", "of an earlier answer"},
    {"id", "message", R::kHarmless, "", "of the client's own"},
    {"tool_call_id", "message", R::kHarmless, "", "which call a tool's message answers"},
};

}  // namespace

const std::vector<FieldRule>& FieldRules() {
  static const std::vector<FieldRule> rules(std::begin(kRules), std::end(kRules));
  return rules;
}

absl::Status CheckFields(RequestKind kind, const json& object, absl::string_view path,
                         std::vector<std::string>& ignored) {
  for (const auto& [name, value] : object.items()) {
    RETURN_IF_ERROR(CheckField(kind, path, name, value, ignored));
  }
  return absl::OkStatus();
}

}  // namespace carrel::http_api
