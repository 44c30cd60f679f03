// What:   what /v1/completions and /v1/chat/completions are asked, and what they answer, as JSON.
// Source: OpenAI's API reference; request_fields.h says what of it is read, taken, refused or ignored.
// Errors: InvalidArgument names the field, its value and its bound, with the field as `param` (api_error.h).
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "http_api/api_error.h"
#include "serving/answer_job.h"
#include "serving/chat_template.h"

namespace carrel::http_api {

// How tokens are to be drawn; what is not said, the model's makers or the server say.
struct RequestedSampling {
  std::optional<double> temperature;         // 0 .. 2
  std::optional<double> top_p;               // (0, 1]
  std::optional<int64_t> top_k;              // 0: all
  std::optional<double> min_p;               // 0 .. 1
  std::optional<double> repetition_penalty;  // 0.01 .. 100
  uint64_t seed = 0;
};

struct CompletionRequest {
  static constexpr int64_t kMaxTokens = 1 << 20;
  static constexpr size_t kMaxName = 256;  // bytes of model and context

  std::string model;                       // as the client calls it
  std::string context;                     // of "context", or behind the @ of "model"; empty: none
  std::vector<serving::Message> messages;  // of a chat
  serving::ChatOptions chat;
  // Fields of it that the template gets, as the request says them and as the template does.
  std::vector<std::pair<std::string, std::string>> template_fields;
  std::string prompt;         // otherwise
  int64_t max_tokens = 1024;  // 1 .. kMaxTokens
  RequestedSampling sampling;
  std::vector<std::string> stop;  // at most 16, of 1 .. 1000 bytes
  bool stream = false;
  bool stream_usage = false;  // a last chunk tells how many tokens there were
  int64_t sources = 0;        // passages of the document that the answer rests on; at most 100
  double wait_s = 0;          // for a document that is being read; at most 600
  std::vector<std::string> ignored;  // fields that are not known, and had no effect
};

absl::StatusOr<CompletionRequest> ParseCompletion(bool chat, absl::string_view body);

// The request without what follows its document: the first message that is at least half of all, and
// what stands before it; of the last message, and of a prompt, what stands before its last empty line (or
// its last line, where there is none). None: nothing would follow.
std::optional<CompletionRequest> DocumentPart(const CompletionRequest& request);

struct Usage {
  int64_t prompt_tokens = 0;  // the context's included
  int64_t cached_tokens = 0;  // of them, the context's and those of the conversation's last turn
  int64_t completion_tokens = 0;
};

// What Carrel tells beyond OpenAI's fields, in "carrel" of the answer or its last chunk but one: how
// this answer came to be.
struct Figures {
  std::string context;      // that it was answered from; empty: none
  bool recognised = false;  // by its text; the client named none
  int64_t context_tokens = 0;
  double rows_read = 0;  // of those, per token, layer and KV head, in the mean
  std::string plan;      // how they were attended to (decoder::WayName); empty: nothing was planned
  double prompt_ms = 0, ms_per_token = 0;
  bool with_sources = false;  // they were asked for
  std::vector<serving::AnswerSource> sources;
  serving::Sampling sampling;        // as it was
  std::vector<std::string> advised;  // names of it that the model's makers said, not the client
  std::vector<std::string> ignored;  // fields of the request that had no effect
  std::string
      not_kept;  // why its document was not kept, which it might have been; empty: no matter
};

// What every part of one answer says of it.
struct CompletionHead {
  bool chat = false;
  std::string id;
  int64_t created_unix_s = 0;
  std::string model;
};

nlohmann::json SourcesJson(absl::Span<const serving::AnswerSource> sources);

// finish: "stop" or "length".
std::string CompletionJson(const CompletionHead& head, const std::string& text,
                           const std::string& finish, const Usage& usage, const Figures& figures);
// Server-sent events, each with its end. The first of a chat tells the role.
std::string FirstEvent(const CompletionHead& head);
std::string TextEvent(const CompletionHead& head, const std::string& text);
std::string FinishEvent(const CompletionHead& head, const std::string& finish,
                        const Figures& figures);
std::string UsageEvent(const CompletionHead& head, const Usage& usage);
inline constexpr char kDoneEvent[] = "data: [DONE]\n\n";

}  // namespace carrel::http_api
