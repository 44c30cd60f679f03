// What:   what /v1/completions and /v1/chat/completions are asked, and what they answer, as JSON.
// Source: OpenAI's API reference; what is not done is refused by name, never ignored: n other than 1,
//         logprobs, penalties, tools, response formats, images.
// Errors: InvalidArgument names the field, its value and its bound.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "http_api/answerer.h"
#include "http_api/chat_template.h"

namespace carrel::http_api {

struct CompletionRequest {
  std::string model;              // as the client calls it
  std::string context;            // of "context", or behind the @ of "model"; empty: none
  std::vector<Message> messages;  // of a chat
  std::string prompt;             // otherwise
  int64_t max_tokens = 1024;      // 1 .. 1048576
  double temperature = 1;         // 0 .. 2
  double top_p = 1;               // (0, 1]
  bool seeded = false;
  uint64_t seed = 0;
  std::vector<std::string> stop;  // at most 16, of 1 .. 1000 bytes
  bool stream = false;
  bool stream_usage = false;  // a last chunk tells how many tokens there were
  int64_t sources = 0;        // passages of the document that the answer rests on; at most 100
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
  double prompt_ms = 0, ms_per_token = 0;
  bool with_sources = false;  // they were asked for
  std::vector<AnswerSource> sources;
};

// What every part of one answer says of it.
struct CompletionHead {
  bool chat = false;
  std::string id;
  int64_t created_unix_s = 0;
  std::string model;
};

// finish: "stop" or "length".
std::string CompletionJson(const CompletionHead& head, const std::string& text,
                           const std::string& finish, const Usage& usage, const Figures& figures);
// Server-sent events, each with its end. The first of a chat tells the role.
std::string FirstEvent(const CompletionHead& head);
std::string TextEvent(const CompletionHead& head, const std::string& text);
std::string FinishEvent(const CompletionHead& head, const std::string& finish,
                        const Figures& figures);
std::string UsageEvent(const CompletionHead& head, const Usage& usage);
std::string ErrorEvent(const absl::Status& status);
inline constexpr char kDoneEvent[] = "data: [DONE]\n\n";

struct HttpError {
  int status = 500;
  std::string body;  // JSON in OpenAI's form
};
HttpError ErrorOf(const absl::Status& status);

// Hands out text as soon as it cannot be part of a stop text, and nothing of it or behind it.
class StopFilter {
 public:
  explicit StopFilter(std::vector<std::string> stops) : stops_(std::move(stops)) {}
  std::string Push(absl::string_view piece);
  std::string Finish();  // what was held back
  bool stopped() const { return stopped_; }

 private:
  const std::vector<std::string> stops_;
  std::string held_;
  bool stopped_ = false;
};

}  // namespace carrel::http_api
