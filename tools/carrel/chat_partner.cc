#include "tools/carrel/chat_partner.h"

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "common/json.h"
#include "common/shown.h"
#include "common/status.h"
#include "http_api/api_client.h"
#include "tools/carrel/flag_rules.h"

namespace carrel::tools {
namespace {

using nlohmann::json;
using serving::AnswerJob;
using serving::Message;

class LocalPartner final : public ChatPartner {
 public:
  LocalPartner(RetrievalFlags flags, std::unique_ptr<serving::Engine> engine)
      : flags_(std::move(flags)), engine_(std::move(engine)) {}

  std::string name() const override { return flags_.model_dir; }
  bool knows_chats() const override { return engine_->chat().ok(); }
  std::string sampling(const SamplingFlags& flags) const override {
    return flags.Tell(engine_->checkpoint().generation_defaults);
  }

 private:
  absl::StatusOr<ChatAnswer> Ask(const serving::Prompt& prompt,
                                 const std::vector<std::string>& stop, const ChatSettings& settings,
                                 const ChatListener& listener) override {
    AnswerJob job;
    job.context = settings.context;
    ASSIGN_OR_RETURN(const serving::OpenedContext context,
                     engine_->Open(job.context, flags_.config.content_id, /*count=*/1));
    job.content_id = context.content_id;
    ASSIGN_OR_RETURN(model::Seam tokens, engine_->Encode(prompt, job.context, job.content_id));
    const auto prompt_tokens = static_cast<int64_t>(tokens.tokens.size());
    job.prompt = std::move(tokens.tokens);
    job.give_up = tokens.give_up;
    job.sources = settings.sources;
    job.max_tokens = settings.max_tokens;
    job.stop = stop;
    ASSIGN_OR_RETURN(job.sampling,
                     settings.sampling.Resolve(engine_->checkpoint().generation_defaults));
    job.wanted = listener.wanted;
    job.on_text = [&](const std::string& piece) {
      if (!piece.empty()) listener.on_text(piece);
      return listener.wanted();
    };
    ASSIGN_OR_RETURN(AnswerJob::Done done, engine_->Answer(std::move(job)));
    if (!listener.wanted()) return absl::CancelledError("nobody wants the answer any more");
    return ChatAnswer{.text = std::move(done.text),
                      .cut_off = done.at_max_tokens,
                      .prompt_tokens = done.context_tokens + prompt_tokens,
                      .cached_tokens = done.context_tokens + done.resumed_tokens,
                      .tokens = std::ssize(done.result.ids),
                      .prompt_ms = 1e3 * done.prompt_seconds,
                      .ms_per_token = done.ms_per_token(),
                      .sources = std::move(done.sources)};
  }

  const RetrievalFlags flags_;
  const std::unique_ptr<serving::Engine> engine_;
};

class ApiPartner final : public ChatPartner {
 public:
  explicit ApiPartner(http_api::ApiClient client) : client_(std::move(client)) {}

  absl::Status Greet() {
    ASSIGN_OR_RETURN(const std::string answer, client_.Call("/v1/models", ""));
    ASSIGN_OR_RETURN(const json models, ParseJsonObject(answer, kWhere, kMessageBounds));
    const json* const carrel = JsonAt(models, {"data", "0", "carrel"});
    if (carrel == nullptr || !carrel->is_object()) {
      return absl::FailedPreconditionError("the server is not carrel api: it names no model so");
    }
    model_ = JsonText(JsonAt(models, {"data", "0", "id"})).substr(0, kMaxWords);
    chat_ = JsonBool(JsonAt(*carrel, {"chat"}));
    const json* const sampling = JsonAt(*carrel, {"sampling"});
    advised_ = sampling != nullptr && sampling->is_object() && !sampling->empty();
    return absl::OkStatus();
  }

  std::string name() const override { return absl::StrCat(model_, " at ", client_.address()); }
  bool knows_chats() const override { return chat_; }
  std::string sampling(const SamplingFlags&) const override { return ""; }  // each answer says it

 private:
  static constexpr size_t kMaxWords = 2000;  // of a server that nobody vouches for
  static constexpr char kWhere[] = "the server's answer (is it carrel api?)";

  // What is not said is as the model advises, if it does; a model that advises nothing is greedy here, as it is
  // in this process, and not at OpenAI's temperature of 1.
  absl::Status AddSampling(const SamplingFlags& flags, json& request) const {
    if (!advised_ || flags.temperature.has_value()) {
      ASSIGN_OR_RETURN(const decoder::SamplingConfig config, flags.Resolve({}));
      request["temperature"] = config.temperature;
    }
    if (flags.top_p.has_value()) request["top_p"] = *flags.top_p;
    request["seed"] = static_cast<int64_t>(flags.seed.value_or(0));
    return absl::OkStatus();
  }

  absl::StatusOr<ChatAnswer> Ask(const serving::Prompt& prompt,
                                 const std::vector<std::string>& stop, const ChatSettings& settings,
                                 const ChatListener& listener) override {
    const bool chat = !prompt.messages.empty();
    json request = {{"model", model_},
                    {"stream", true},
                    {"stream_options", {{"include_usage", true}}},
                    {"max_tokens", settings.max_tokens},
                    {"sources", settings.sources}};
    if (!chat) request["prompt"] = prompt.text;
    if (!stop.empty()) request["stop"] = stop;
    for (const Message& message : prompt.messages) {
      request["messages"].push_back({{"role", message.role}, {"content", message.content}});
    }
    RETURN_IF_ERROR(AddSampling(settings.sampling, request));
    if (!settings.context.empty()) request["context"] = settings.context;
    ChatAnswer answer;
    client_.set_wanted(listener.wanted);
    client_.set_context(settings.context);
    RETURN_IF_ERROR(
        client_.Stream(chat ? "/v1/chat/completions" : "/v1/completions", DumpJson(request),
                       [&](absl::string_view data) { return AddEvent(data, listener, answer); }));
    return answer;
  }

  static absl::Status AddEvent(absl::string_view data, const ChatListener& listener,
                               ChatAnswer& answer) {
    ASSIGN_OR_RETURN(const json event, ParseJsonObject(data, kWhere, kMessageBounds));
    if (event.contains("error")) {
      const std::string words = JsonText(JsonAt(event, {"error", "message"}));
      return absl::InternalError(words.empty() ? "the server failed" : Shown(words, kMaxWords));
    }
    if (const json* const usage = JsonAt(event, {"usage"});
        usage != nullptr && usage->is_object()) {
      answer.prompt_tokens = JsonInt(JsonAt(*usage, {"prompt_tokens"}));
      answer.tokens = JsonInt(JsonAt(*usage, {"completion_tokens"}));
      answer.cached_tokens = JsonInt(JsonAt(*usage, {"prompt_tokens_details", "cached_tokens"}));
    }
    if (const json* const told = JsonAt(event, {"carrel"}); told != nullptr) {
      AddFigures(*told, answer);
    }
    const json* const choices = JsonAt(event, {"choices"});
    if (choices == nullptr || !choices->is_array()) return absl::OkStatus();
    for (const json& choice : *choices) {
      const std::string piece =
          JsonText(JsonAt(choice, {"delta", "content"}), JsonText(JsonAt(choice, {"text"})));
      answer.text += piece;
      if (!piece.empty()) listener.on_text(piece);
      answer.cut_off |= JsonText(JsonAt(choice, {"finish_reason"})) == "length";
    }
    return absl::OkStatus();
  }

  static void AddFigures(const json& told, ChatAnswer& answer) {
    answer.prompt_ms = JsonNumber(JsonAt(told, {"prompt_ms"}));
    answer.ms_per_token = JsonNumber(JsonAt(told, {"ms_per_token"}));
    if (const json* const advised = JsonAt(told, {"sampling", "advised"});
        advised != nullptr && advised->is_array() && !advised->empty()) {
      const json& sampling = *JsonAt(told, {"sampling"});
      const decoder::SamplingConfig config = {
          .temperature = JsonNumber(JsonAt(sampling, {"temperature"})),
          .top_p = JsonNumber(JsonAt(sampling, {"top_p"}), 1),
          .top_k = JsonInt(JsonAt(sampling, {"top_k"})),
          .min_p = JsonNumber(JsonAt(sampling, {"min_p"})),
          .repetition_penalty = JsonNumber(JsonAt(sampling, {"repetition_penalty"}), 1)};
      answer.sampling = absl::StrCat("sampling as the model advises: ", DescribeSampling(config),
                                     "; --temperature 0 is greedy");
    }
    const json* const sources = JsonAt(told, {"sources"});
    if (sources == nullptr || !sources->is_array()) return;
    for (const json& source : *sources) {
      serving::AnswerSource& added = answer.sources.emplace_back();
      added.text = JsonText(JsonAt(source, {"text"}));
      added.share = JsonNumber(JsonAt(source, {"share"}));
      added.first_token = JsonInt(JsonAt(source, {"tokens", "0"}));
      added.end_token = JsonInt(JsonAt(source, {"tokens", "1"}));
      added.begin = JsonInt(JsonAt(source, {"bytes", "0"}));
      added.end = JsonInt(JsonAt(source, {"bytes", "1"}));
    }
  }

  http_api::ApiClient client_;
  std::string model_;
  bool chat_ = false;
  bool advised_ = false;  // the model's makers advise how to draw tokens
};

}  // namespace

absl::StatusOr<ChatAnswer> ChatPartner::Answer(const std::vector<Message>& messages,
                                               const ChatSettings& settings,
                                               const ChatListener& listener) {
  if (knows_chats()) return Ask({.messages = messages}, {}, settings, listener);
  return Ask({.text = serving::PlainChat(messages)}, {serving::kPlainChatStop}, settings, listener);
}

absl::Status CheckApiFlags(const CLI::App& command) {
  static const absl::flat_hash_set<std::string> taken = {
      "PROMPT", "api",  "context", "key-file", "max-tokens", "temperature",
      "top-p",  "seed", "sources", "json",     "system",     "raw"};
  for (const CLI::Option* option : command.get_options()) {
    if (!Given(*option) || taken.contains(option->get_single_name())) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--api: leave out --", option->get_single_name(),
                     ": model, store and how rows are retrieved are the server's"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<ChatPartner>> MakeLocalPartner(const RetrievalFlags& flags) {
  ASSIGN_OR_RETURN(std::shared_ptr<library::LoadedModel> model, LoadModel(flags));
  ASSIGN_OR_RETURN(std::unique_ptr<serving::Engine> engine,
                   StartEngine(flags, std::move(model), /*answers=*/1));
  const absl::Status chat = engine->chat().status();
  if (!chat.ok() && !absl::IsNotFound(chat)) return chat;
  return std::make_unique<LocalPartner>(flags, std::move(engine));
}

absl::StatusOr<std::unique_ptr<ChatPartner>> MakeApiPartner(const std::string& url,
                                                            const std::string& key_file) {
  ASSIGN_OR_RETURN(http_api::ApiClient client, http_api::ApiClient::Create(url));
  if (!key_file.empty()) {
    library::StoreAddress address;  // which says where a key may travel
    address.server = client.address();
    address.key_file = key_file;
    ASSIGN_OR_RETURN(const ServerLogin login, address.Login());
    client.set_key(login.key);
  }
  auto partner = std::make_unique<ApiPartner>(std::move(client));
  RETURN_IF_ERROR(partner->Greet());
  return partner;
}

}  // namespace carrel::tools
