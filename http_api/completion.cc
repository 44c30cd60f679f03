#include "http_api/completion.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "common/status.h"

namespace carrel::http_api {
namespace {

using nlohmann::json;

absl::Status Bad(absl::string_view field, const json& value, absl::string_view wanted) {
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  if (text.size() > 100) text = text.substr(0, 100) + "..";
  return absl::InvalidArgumentError(absl::StrCat(field, "=", text, ": must be ", wanted));
}

bool Given(const json& body, const char* field) {
  const auto found = body.find(field);
  return found != body.end() && !found->is_null();
}

absl::Status ReadText(const json& body, const char* field, std::string& out) {
  if (!Given(body, field)) return absl::OkStatus();
  if (!body[field].is_string()) return Bad(field, body[field], "a text");
  out = body[field].get<std::string>();
  return absl::OkStatus();
}

absl::Status ReadNumber(const json& body, const char* field, double low, double high, double& out) {
  if (!Given(body, field)) return absl::OkStatus();
  const json& value = body[field];
  if (!value.is_number() || value.get<double>() < low || value.get<double>() > high) {
    return Bad(field, value, absl::StrCat("a number in [", low, ", ", high, "]"));
  }
  out = value.get<double>();
  return absl::OkStatus();
}

absl::Status ReadInteger(const json& body, const char* field, int64_t low, int64_t high,
                         int64_t& out) {
  if (!Given(body, field)) return absl::OkStatus();
  const json& value = body[field];
  const bool large =
      value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX);
  if (!value.is_number_integer() || large || value.get<int64_t>() < low ||
      value.get<int64_t>() > high) {
    return Bad(field, value, absl::StrCat("a whole number in [", low, ", ", high, "]"));
  }
  out = value.get<int64_t>();
  return absl::OkStatus();
}

absl::Status ReadBool(const json& body, const char* field, bool& out) {
  if (!Given(body, field)) return absl::OkStatus();
  if (!body[field].is_boolean()) return Bad(field, body[field], "true or false");
  out = body[field].get<bool>();
  return absl::OkStatus();
}

// What changes the answer and is not done here.
absl::Status CheckUnsupported(const json& body) {
  const auto harmless = [](const char* field, const json& value) {
    const std::string name = field;
    if (name == "n" || name == "best_of") return value == 1;
    if (value.is_number()) return value == 0;  // penalties
    if (value.is_boolean()) return !value.get<bool>();
    if (name == "response_format") return value.is_object() && value.value("type", "") == "text";
    if (name == "tool_choice") return value == "none";
    return value.empty();
  };
  for (const char* field : {"n", "best_of", "logprobs", "top_logprobs", "presence_penalty",
                            "frequency_penalty", "logit_bias", "tools", "tool_choice", "functions",
                            "response_format", "audio", "modalities", "echo", "suffix"}) {
    if (Given(body, field) && !harmless(field, body[field])) {
      return Bad(field, body[field], "left out: it is not supported");
    }
  }
  return absl::OkStatus();
}

absl::Status ReadStop(const json& body, std::vector<std::string>& stop) {
  if (!Given(body, "stop")) return absl::OkStatus();
  const json& value = body["stop"];
  const json list = value.is_array() ? value : json::array({value});
  if (list.size() > 16) return Bad("stop", value, "at most 16 texts");
  for (const json& text : list) {
    if (!text.is_string() || text.get<std::string>().empty() ||
        text.get<std::string>().size() > 1000) {
      return Bad("stop", value, "a text, or a list of texts, of 1 .. 1000 bytes each");
    }
    stop.push_back(text.get<std::string>());
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ReadContent(const json& content) {
  if (content.is_string()) return content.get<std::string>();
  std::string text;
  if (!content.is_array()) return Bad("messages.content", content, "a text, or a list of parts");
  for (const json& part : content) {
    if (!part.is_object() || part.value("type", "") != "text" || !part.contains("text") ||
        !part["text"].is_string()) {
      return Bad("messages.content", part, "a part of type text");
    }
    text += part["text"].get<std::string>();
  }
  return text;
}

absl::Status ReadMessages(const json& body, std::vector<Message>& messages) {
  constexpr size_t kMost = 10000;
  const json list = body.value("messages", json());
  if (!list.is_array() || list.empty() || list.size() > kMost) {
    return Bad("messages", list, absl::StrCat("a list of 1 .. ", kMost, " messages"));
  }
  for (const json& given : list) {
    if (!given.is_object() || !given.contains("role") || !given["role"].is_string()) {
      return Bad("messages", given, "an object with role and content");
    }
    if (Given(given, "tool_calls") || Given(given, "function_call")) {
      return Bad("messages.tool_calls", given, "left out: it is not supported");
    }
    Message& message = messages.emplace_back();
    message.role = given["role"].get<std::string>();
    if (!Given(given, "content")) return Bad("messages", given, "an object with role and content");
    ASSIGN_OR_RETURN(message.content, ReadContent(given["content"]));
  }
  return absl::OkStatus();
}

absl::Status ReadSampling(const json& body, CompletionRequest& request) {
  RETURN_IF_ERROR(ReadInteger(body, "max_tokens", 1, 1 << 20, request.max_tokens));
  RETURN_IF_ERROR(ReadInteger(body, "max_completion_tokens", 1, 1 << 20, request.max_tokens));
  RETURN_IF_ERROR(ReadNumber(body, "temperature", 0, 2, request.temperature));
  RETURN_IF_ERROR(ReadNumber(body, "top_p", 0, 1, request.top_p));
  if (request.top_p == 0) return Bad("top_p", body["top_p"], "above 0");
  int64_t seed = 0;
  RETURN_IF_ERROR(ReadInteger(body, "seed", INT64_MIN, INT64_MAX, seed));
  request.seeded = Given(body, "seed");
  request.seed = static_cast<uint64_t>(seed);
  if (!request.seeded) request.seed = std::random_device{}();
  return absl::OkStatus();
}

std::string Event(const json& value) {
  return "data: " + value.dump(-1, ' ', false, json::error_handler_t::replace) + "\n\n";
}

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

json SourcesOf(const std::vector<AnswerSource>& sources) {
  json list = json::array();
  for (const AnswerSource& source : sources) {
    list.push_back({{"text", source.text},
                    {"share", source.share},
                    {"bytes", {source.begin, source.end}},
                    {"tokens", {source.first_token, source.end_token}}});
  }
  return list;
}

json FiguresOf(const Figures& figures) {
  json told = {{"context", figures.context.empty() ? json() : json(figures.context)},
               {"recognised", figures.recognised},
               {"context_tokens", figures.context_tokens},
               {"rows_read", figures.rows_read},
               {"prompt_ms", figures.prompt_ms},
               {"ms_per_token", figures.ms_per_token}};
  if (figures.with_sources) told["sources"] = SourcesOf(figures.sources);
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

struct ErrorKind {
  int status;
  const char* type;
};

ErrorKind KindOf(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kUnimplemented:
      return {400, "invalid_request_error"};
    case absl::StatusCode::kUnauthenticated:
      return {401, "authentication_error"};
    case absl::StatusCode::kPermissionDenied:
      return {403, "permission_error"};
    case absl::StatusCode::kNotFound:
      return {404, "not_found_error"};
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kAlreadyExists:
      return {409, "conflict_error"};
    case absl::StatusCode::kResourceExhausted:
      return {429, "rate_limit_error"};
    case absl::StatusCode::kUnavailable:
      return {503, "server_error"};
    case absl::StatusCode::kDeadlineExceeded:
      return {504, "server_error"};
    default:
      return {500, "server_error"};
  }
}

json ErrorJson(const absl::Status& status) {
  return {{"error",
           {{"message", std::string(status.message())},
            {"type", KindOf(status.code()).type},
            {"param", nullptr},
            {"code", nullptr}}}};
}

}  // namespace

absl::StatusOr<CompletionRequest> ParseCompletion(bool chat, absl::string_view text) {
  const json body = json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (!body.is_object()) return absl::InvalidArgumentError("the body is no JSON object");
  CompletionRequest request;
  RETURN_IF_ERROR(ReadText(body, "model", request.model));
  RETURN_IF_ERROR(ReadText(body, "context", request.context));
  if (const size_t at = request.model.find('@');
      request.context.empty() && at != std::string::npos) {
    request.context = request.model.substr(at + 1);
  }
  RETURN_IF_ERROR(CheckUnsupported(body));
  if (chat) {
    RETURN_IF_ERROR(ReadMessages(body, request.messages));
  } else {
    if (!Given(body, "prompt") || !body["prompt"].is_string()) {
      return Bad("prompt", body.value("prompt", json()), "a text");
    }
    request.prompt = body["prompt"].get<std::string>();
  }
  RETURN_IF_ERROR(ReadSampling(body, request));
  RETURN_IF_ERROR(ReadStop(body, request.stop));
  RETURN_IF_ERROR(ReadInteger(body, "sources", 0, 100, request.sources));
  RETURN_IF_ERROR(ReadBool(body, "stream", request.stream));
  if (Given(body, "stream_options")) {
    if (!body["stream_options"].is_object()) {
      return Bad("stream_options", body["stream_options"], "an object");
    }
    RETURN_IF_ERROR(ReadBool(body["stream_options"], "include_usage", request.stream_usage));
  }
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
  if (part.messages.empty()) {
    if (!cut(part.prompt)) return std::nullopt;
    return part;
  }
  size_t all = 0, at = 0;
  for (const Message& message : part.messages) all += message.content.size();
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
  return whole.dump(-1, ' ', false, json::error_handler_t::replace);
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

std::string ErrorEvent(const absl::Status& status) { return Event(ErrorJson(status)); }

HttpError ErrorOf(const absl::Status& status) {
  return {KindOf(status.code()).status,
          ErrorJson(status).dump(-1, ' ', false, json::error_handler_t::replace)};
}

std::string StopFilter::Push(absl::string_view piece) {
  if (stopped_) return "";
  absl::StrAppend(&held_, piece);
  // The one that is whole first, however the text came.
  size_t first = std::string::npos, end = std::string::npos;
  for (const std::string& stop : stops_) {
    const size_t at = held_.find(stop);
    if (at == std::string::npos) continue;
    if (at + stop.size() < end || (at + stop.size() == end && at < first)) {
      first = at;
      end = at + stop.size();
    }
  }
  if (first != std::string::npos) {
    stopped_ = true;
    return std::exchange(held_, "").substr(0, first);
  }
  size_t keep = 0;  // bytes at the end that a stop text may begin with
  for (const std::string& stop : stops_) {
    for (size_t n = std::min(held_.size(), stop.size() - 1); n > keep; --n) {
      if (held_.compare(held_.size() - n, n, stop, 0, n) == 0) keep = n;
    }
  }
  std::string out = held_.substr(0, held_.size() - keep);
  held_.erase(0, out.size());
  return out;
}

std::string StopFilter::Finish() { return stopped_ ? "" : std::exchange(held_, ""); }

}  // namespace carrel::http_api
