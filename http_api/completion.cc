#include "http_api/completion.h"

#include <cmath>
#include <nlohmann/json.hpp>
#include <random>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "common/json.h"
#include "common/status.h"
#include "http_api/request_fields.h"
#include "kvstore/format/context_name.h"

namespace carrel::http_api {
namespace {

using nlohmann::json;

// Of what the answer names again.
constexpr size_t kMostNames = 100, kLongestName = 100;

absl::Status Bad(absl::string_view field, const json& value, absl::string_view wanted) {
  return WithParam(
      absl::InvalidArgumentError(absl::StrCat(field, "=", ShownJson(value), ": must be ", wanted)),
      field);
}

// One object, read field by field; null counts as absent.
class Reader {
 public:
  explicit Reader(const json& body, std::string path = "") : body_(body), path_(std::move(path)) {}

  const json* Find(const char* field) const {
    const auto found = body_.find(field);
    return found == body_.end() || found->is_null() ? nullptr : &*found;
  }
  bool Given(const char* field) const { return Find(field) != nullptr; }
  std::string Path(const char* field) const { return absl::StrCat(path_, field); }

  absl::Status Text(const char* field, size_t most, std::string& out) const {
    const json* const value = Find(field);
    if (value == nullptr) return absl::OkStatus();
    if (!value->is_string()) return Bad(Path(field), *value, "a text");
    out = value->get_ref<const std::string&>();
    if (out.size() <= most) return absl::OkStatus();
    return Bad(Path(field), *value, absl::StrCat("at most ", most, " bytes, not ", out.size()));
  }

  absl::Status Number(const char* field, double low, double high,
                      std::optional<double>& out) const {
    const json* const value = Find(field);
    if (value == nullptr) return absl::OkStatus();
    const double number = value->is_number() ? value->get<double>() : std::nan("");
    if (!(number >= low && number <= high)) {
      return Bad(Path(field), *value, absl::StrCat("a number in [", low, ", ", high, "]"));
    }
    out = number;
    return absl::OkStatus();
  }

  // Also 8.0, which languages without whole numbers write.
  absl::Status Integer(const char* field, int64_t low, int64_t high,
                       std::optional<int64_t>& out) const {
    constexpr double kExact = 9007199254740992;  // 2^53
    const json* const value = Find(field);
    if (value == nullptr) return absl::OkStatus();
    bool good = false;
    int64_t number = 0;
    if (value->is_number_unsigned()) {
      good = value->get<uint64_t>() <= uint64_t{INT64_MAX};
    } else if (value->is_number_integer()) {
      good = true;
    } else if (value->is_number_float()) {
      const double given = value->get<double>();
      good = std::abs(given) <= kExact && given == std::floor(given);
    }
    if (good) number = value->get<int64_t>();
    if (!good || number < low || number > high) {
      return Bad(Path(field), *value, absl::StrCat("a whole number in [", low, ", ", high, "]"));
    }
    out = number;
    return absl::OkStatus();
  }

  absl::Status Bool(const char* field, bool& out) const {
    const json* const value = Find(field);
    if (value == nullptr) return absl::OkStatus();
    if (!value->is_boolean()) return Bad(Path(field), *value, "true or false");
    out = value->get<bool>();
    return absl::OkStatus();
  }

 private:
  const json& body_;
  const std::string path_;
};

absl::Status ReadStop(const Reader& body, std::vector<std::string>& stop) {
  constexpr size_t kMost = 16, kLongest = 1000;
  const json* const given = body.Find("stop");
  if (given == nullptr) return absl::OkStatus();
  const auto add = [&](const json& text) -> absl::Status {
    if (!text.is_string() || text.get_ref<const std::string&>().size() > kLongest) {
      return Bad("stop", *given,
                 absl::StrCat("a text, or a list of texts, of at most ", kLongest, " bytes each"));
    }
    // An empty one ends nothing.
    if (text != "") stop.push_back(text.get<std::string>());
    return absl::OkStatus();
  };
  if (!given->is_array()) return add(*given);
  if (given->size() > kMost) return Bad("stop", *given, absl::StrCat("at most ", kMost, " texts"));
  for (const json& text : *given) RETURN_IF_ERROR(add(text));
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadContent(const json& content, const std::string& path) {
  if (content.is_string()) return content.get<std::string>();
  if (!content.is_array()) return Bad(path, content, "a text, or a list of parts");
  std::string text;
  for (size_t i = 0; i < content.size(); ++i) {
    const json& part = content[i];
    if (part.is_string()) {
      text += part.get_ref<const std::string&>();
      continue;
    }
    const std::string at = absl::StrCat(path, "[", i, "]");
    if (!part.is_object()) return Bad(at, part, "a part of type text");
    // Some clients write a part without its type.
    const auto type = part.find("type"), said = part.find("text");
    if (type != part.end() && !type->is_null() && *type != "text") {
      return Bad(absl::StrCat(at, ".type"), *type, "\"text\": nothing else is read");
    }
    if (said == part.end() || !said->is_string()) {
      return Bad(absl::StrCat(at, ".text"), said == part.end() ? json() : *said, "a text");
    }
    text += said->get_ref<const std::string&>();
  }
  return text;
}

absl::Status ReadMessage(const json& given, const std::string& path, CompletionRequest& request) {
  constexpr size_t kLongestRole = 64;
  if (!given.is_object()) return Bad(path, given, "an object with role and content");
  RETURN_IF_ERROR(CheckFields(RequestKind::kMessage, given, "messages.", request.ignored));
  const Reader fields(given, absl::StrCat(path, "."));
  serving::Message& message = request.messages.emplace_back();
  RETURN_IF_ERROR(fields.Text("role", kLongestRole, message.role));
  if (message.role.empty()) {
    return Bad(fields.Path("role"), given.contains("role") ? given["role"] : json(),
               "\"system\", \"user\" or \"assistant\"");
  }
  const json* const content = fields.Find("content");
  if (content != nullptr) {
    ASSIGN_OR_RETURN(message.content, ReadContent(*content, fields.Path("content")));
  } else if (message.role != "assistant") {  // which may have said nothing
    return Bad(fields.Path("content"), json(), "a text, or a list of parts");
  }
  return absl::OkStatus();
}

absl::Status ReadMessages(const json& body, CompletionRequest& request) {
  constexpr size_t kMost = 10000;
  const auto list = body.find("messages");
  if (list == body.end() || !list->is_array() || list->empty() || list->size() > kMost) {
    return Bad("messages", list == body.end() ? json() : *list,
               absl::StrCat("a list of 1 .. ", kMost, " messages"));
  }
  for (size_t i = 0; i < list->size(); ++i) {
    RETURN_IF_ERROR(ReadMessage((*list)[i], absl::StrCat("messages[", i, "]"), request));
  }
  return absl::OkStatus();
}

absl::Status ReadPrompt(const json& body, CompletionRequest& request) {
  const auto found = body.find("prompt");
  static const json nothing;
  const json& given = found == body.end() ? nothing : *found;
  const json& text = given.is_array() && given.size() == 1 ? given[0] : given;
  if (!text.is_string()) {
    return Bad("prompt", given, "a text, or a list of one text; token ids are not taken");
  }
  request.prompt = text.get<std::string>();
  return absl::OkStatus();
}

// What the template gets beside the messages.
absl::StatusOr<json> ReadArguments(const Reader& body, CompletionRequest& request) {
  json arguments = json::object();
  if (const json* const given = body.Find("chat_template_kwargs"); given != nullptr) {
    if (!given->is_object() || given->size() > kMostNames) {
      return Bad("chat_template_kwargs", *given,
                 absl::StrCat("an object of at most ", kMostNames, " names"));
    }
    arguments = *given;
  }
  for (const char* name : {"messages", "add_generation_prompt", "continue_final_message",
                           "bos_token", "eos_token", "tools", "documents"}) {
    if (!arguments.contains(name)) continue;
    return Bad(absl::StrCat("chat_template_kwargs.", name), arguments[name],
               "left out: the server says it");
  }
  for (const auto& [name, value] : arguments.items()) {
    if (name.size() > kLongestName) {
      return Bad("chat_template_kwargs", json(name),
                 absl::StrCat("names of at most ", kLongestName, " bytes"));
    }
    request.template_fields.emplace_back(absl::StrCat("chat_template_kwargs.", name), name);
  }
  for (const char* name : {"enable_thinking", "reasoning_effort"}) {
    const json* const given = body.Find(name);
    if (given == nullptr) continue;
    if (arguments.contains(name) && arguments[name] != *given) {
      return Bad(name, *given, "what chat_template_kwargs says");
    }
    arguments[name] = *given;
    request.template_fields.emplace_back(name, name);
  }
  return arguments;
}

absl::Status ReadChatOptions(const Reader& body, CompletionRequest& request) {
  ASSIGN_OR_RETURN(const json arguments, ReadArguments(body, request));
  serving::ChatOptions& options = request.chat;
  options.arguments = DumpJson(arguments);
  RETURN_IF_ERROR(body.Bool("add_generation_prompt", options.begin_answer));
  RETURN_IF_ERROR(body.Bool("continue_final_message", options.continue_last));
  if (!options.continue_last) return absl::OkStatus();
  if (body.Given("add_generation_prompt") && options.begin_answer) {
    return Bad("add_generation_prompt", json(true), "false with continue_final_message");
  }
  options.begin_answer = false;
  return absl::OkStatus();
}

absl::Status ReadMaxTokens(const Reader& body, int64_t& max_tokens) {
  std::optional<int64_t> given;
  RETURN_IF_ERROR(body.Integer("max_tokens", -1, CompletionRequest::kMaxTokens, given));
  RETURN_IF_ERROR(body.Integer("max_completion_tokens", -1, CompletionRequest::kMaxTokens, given));
  if (given == 0) {
    return Bad(body.Given("max_completion_tokens") ? "max_completion_tokens" : "max_tokens",
               json(0), "at least 1; -1 is what fits");
  }
  if (given.has_value()) max_tokens = *given < 0 ? CompletionRequest::kMaxTokens : *given;
  return absl::OkStatus();
}

absl::Status ReadSampling(const Reader& body, RequestedSampling& sampling) {
  RETURN_IF_ERROR(body.Number("temperature", 0, 2, sampling.temperature));
  RETURN_IF_ERROR(body.Number("top_p", 0, 1, sampling.top_p));
  if (sampling.top_p == 0.0) return Bad("top_p", json(0), "above 0");
  RETURN_IF_ERROR(body.Integer("top_k", -1, INT32_MAX, sampling.top_k));
  if (sampling.top_k == -1) sampling.top_k = 0;
  RETURN_IF_ERROR(body.Number("min_p", 0, 1, sampling.min_p));
  RETURN_IF_ERROR(body.Number("repeat_penalty", 0.01, 100, sampling.repetition_penalty));
  RETURN_IF_ERROR(body.Number("repetition_penalty", 0.01, 100, sampling.repetition_penalty));
  std::optional<int64_t> seed;
  RETURN_IF_ERROR(body.Integer("seed", INT64_MIN, INT64_MAX, seed));
  sampling.seed = seed.has_value() ? static_cast<uint64_t>(*seed) : std::random_device{}();
  return absl::OkStatus();
}

// "context", or what stands behind the @ of "model".
absl::Status ReadNames(const Reader& body, CompletionRequest& request) {
  RETURN_IF_ERROR(body.Text("model", CompletionRequest::kMaxName, request.model));
  RETURN_IF_ERROR(body.Text("context", CompletionRequest::kMaxName, request.context));
  const size_t at = request.model.find('@');
  const char* field = "context";
  if (at != std::string::npos) {
    const std::string behind = request.model.substr(at + 1);
    if (!request.context.empty() && !behind.empty() && request.context != behind) {
      return Bad("context", json(request.context),
                 absl::StrCat("the one of model=", ShownJson(json(request.model))));
    }
    if (request.context.empty()) field = "model";
    if (!behind.empty()) request.context = behind;
  }
  if (request.context.empty()) return absl::OkStatus();
  return WithParam(kvstore::ValidateContextName(request.context), field);
}

absl::Status ReadStreaming(const Reader& body, CompletionRequest& request) {
  RETURN_IF_ERROR(body.Bool("stream", request.stream));
  const json* const options = body.Find("stream_options");
  if (options == nullptr) return absl::OkStatus();
  if (!options->is_object()) return Bad("stream_options", *options, "an object");
  for (const auto& [name, value] : options->items()) {
    const bool says_something = !value.is_null() && value != false;
    if (name != "include_usage" && says_something && request.ignored.size() < kMostNames) {
      request.ignored.push_back(absl::StrCat("stream_options.", name.substr(0, kLongestName)));
    }
  }
  return Reader(*options, "stream_options.").Bool("include_usage", request.stream_usage);
}

std::string Event(const json& value) { return absl::StrCat("data: ", DumpJson(value), "\n\n"); }

json Base(const CompletionHead& head, bool chunk) {
  return {{"id", head.id},
          {"object", !head.chat ? "text_completion"
                     : chunk    ? "chat.completion.chunk"
                                : "chat.completion"},
          {"created", head.created_unix_s},
          {"model", head.model}};
}

json UsageOf(const Usage& usage) {
  return {{"prompt_tokens", usage.prompt_tokens},
          {"completion_tokens", usage.completion_tokens},
          {"total_tokens", usage.prompt_tokens + usage.completion_tokens},
          {"prompt_tokens_details", {{"cached_tokens", usage.cached_tokens}}}};
}

json SamplingOf(const Figures& figures) {
  const serving::Sampling& sampling = figures.sampling;
  return {{"temperature", sampling.temperature},
          {"top_p", sampling.top_p},
          {"top_k", sampling.top_k},
          {"min_p", sampling.min_p},
          {"repetition_penalty", sampling.repetition_penalty},
          {"seed", static_cast<int64_t>(sampling.seed)},
          {"advised", figures.advised}};
}

json FiguresOf(const Figures& figures) {
  json told = {{"context", figures.context.empty() ? json() : json(figures.context)},
               {"recognised", figures.recognised},
               {"context_tokens", figures.context_tokens},
               {"rows_read", figures.rows_read},
               {"prompt_ms", figures.prompt_ms},
               {"ms_per_token", figures.ms_per_token},
               {"sampling", SamplingOf(figures)}};
  if (!figures.plan.empty()) told["plan"] = figures.plan;
  if (!figures.ignored.empty()) told["ignored"] = figures.ignored;
  if (!figures.not_kept.empty()) {
    told["kept"] = false;
    told["not_kept"] = figures.not_kept;
  }
  if (figures.with_sources) told["sources"] = SourcesJson(figures.sources);
  return told;
}

json Chunk(const CompletionHead& head, const json& delta, const std::string& text,
           const json& finish) {
  json event = Base(head, /*chunk=*/true);
  json choice = {{"index", 0}, {"finish_reason", finish}, {"logprobs", nullptr}};
  if (head.chat) {
    choice["delta"] = delta;
  } else {
    choice["text"] = text;
  }
  event["choices"] = json::array({std::move(choice)});
  return event;
}

}  // namespace

json SourcesJson(absl::Span<const serving::AnswerSource> sources) {
  json list = json::array();
  for (const serving::AnswerSource& source : sources) {
    list.push_back({{"text", source.text},
                    {"share", source.share},
                    {"bytes", {source.begin, source.end}},
                    {"tokens", {source.first_token, source.end_token}}});
  }
  return list;
}

absl::StatusOr<CompletionRequest> ParseCompletion(bool chat, absl::string_view text) {
  JsonBounds bounds = kMessageBounds;
  bounds.unique_names = true;
  ASSIGN_OR_RETURN(const json body, ParseJsonObject(text, "the body", bounds));
  const Reader fields(body);
  CompletionRequest request;
  RETURN_IF_ERROR(ReadNames(fields, request));
  RETURN_IF_ERROR(
      CheckFields(chat ? RequestKind::kChat : RequestKind::kPrompt, body, "", request.ignored));
  if (chat) {
    RETURN_IF_ERROR(ReadMessages(body, request));
    RETURN_IF_ERROR(ReadChatOptions(fields, request));
  } else {
    RETURN_IF_ERROR(ReadPrompt(body, request));
  }
  RETURN_IF_ERROR(ReadMaxTokens(fields, request.max_tokens));
  RETURN_IF_ERROR(ReadSampling(fields, request.sampling));
  RETURN_IF_ERROR(ReadStop(fields, request.stop));
  std::optional<int64_t> sources;
  RETURN_IF_ERROR(fields.Integer("sources", 0, 100, sources));
  request.sources = sources.value_or(0);
  std::optional<double> wait;
  RETURN_IF_ERROR(fields.Number("wait", 0, 600, wait));
  request.wait_s = wait.value_or(0);
  RETURN_IF_ERROR(ReadStreaming(fields, request));
  return request;
}

std::optional<CompletionRequest> DocumentPart(const CompletionRequest& request) {
  const auto cut = [](std::string& text) {
    const absl::string_view whole = absl::StripTrailingAsciiWhitespace(text);
    size_t end = whole.rfind("\n\n");
    if (end == absl::string_view::npos) end = whole.rfind('\n');
    if (end == absl::string_view::npos) return false;
    text.resize(absl::StripTrailingAsciiWhitespace(whole.substr(0, end)).size());
    return !text.empty();
  };
  CompletionRequest part = request;
  part.chat.continue_last = false;
  if (part.messages.empty()) {
    if (!cut(part.prompt)) return std::nullopt;
    return part;
  }
  size_t all = 0, at = 0;
  for (const serving::Message& message : part.messages) all += message.content.size();
  while (2 * part.messages[at].content.size() < all && at + 1 < part.messages.size()) ++at;
  if (at + 1 == part.messages.size() && !cut(part.messages[at].content)) return std::nullopt;
  part.messages.resize(at + 1);
  return part;
}

std::string CompletionJson(const CompletionHead& head, const std::string& text,
                           const std::string& finish, const Usage& usage, const Figures& figures) {
  json whole = Base(head, /*chunk=*/false);
  json choice = {{"index", 0}, {"finish_reason", finish}, {"logprobs", nullptr}};
  if (head.chat) {
    choice["message"] = {{"role", "assistant"}, {"content", text}, {"refusal", nullptr}};
  } else {
    choice["text"] = text;
  }
  whole["choices"] = json::array({std::move(choice)});
  whole["usage"] = UsageOf(usage);
  whole["carrel"] = FiguresOf(figures);
  return DumpJson(whole);
}

std::string FirstEvent(const CompletionHead& head) {
  if (!head.chat) return "";
  return Event(Chunk(head, {{"role", "assistant"}, {"content", ""}}, "", nullptr));
}

std::string TextEvent(const CompletionHead& head, const std::string& text) {
  return Event(Chunk(head, {{"content", text}}, text, nullptr));
}

std::string FinishEvent(const CompletionHead& head, const std::string& finish,
                        const Figures& figures) {
  json event = Chunk(head, json::object(), "", finish);
  event["carrel"] = FiguresOf(figures);
  return Event(event);
}

std::string UsageEvent(const CompletionHead& head, const Usage& usage) {
  json event = Base(head, /*chunk=*/true);
  event["choices"] = json::array();
  event["usage"] = UsageOf(usage);
  return Event(event);
}

}  // namespace carrel::http_api
