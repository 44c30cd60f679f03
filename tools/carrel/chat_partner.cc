#include "tools/carrel/chat_partner.h"

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "carrel/v1/context.pb.h"
#include "common/status.h"
#include "http_api/api_client.h"
#include "http_api/completion.h"
#include "kvstore/service/context_client.h"
#include "library/document_ends.h"
#include "model/tokenizer/seam.h"

namespace carrel::tools {
namespace {

using http_api::AnswerJob;
using http_api::Message;
using nlohmann::json;
using OnText = std::function<void(const std::string&)>;

class LocalPartner final : public ChatPartner {
 public:
  LocalPartner(RetrievalFlags flags, std::shared_ptr<library::LoadedModel> model,
               std::shared_ptr<library::StoreAccess> store,
               std::unique_ptr<http_api::ChatTemplate> chat)
      : flags_(std::move(flags)),
        model_(std::move(model)),
        store_(std::move(store)),
        chat_(std::move(chat)),
        answerer_(http_api::Answerer::Create({.retrieval = flags_.config,
                                              .device = flags_.device_config,
                                              .derived_weights = flags_.weights == "derived",
                                              .folder = flags_.store.folder},
                                             model_, store_)) {}

  std::string name() const override { return flags_.model_dir; }

  absl::StatusOr<ChatAnswer> Answer(const std::vector<Message>& messages,
                                    const ChatSettings& settings, const OnText& on_text,
                                    const std::function<bool()>& wanted) override {
    ASSIGN_OR_RETURN(model::Seam prompt, Prompt(messages, settings));
    return Submit(std::move(prompt), chat_ == nullptr, settings, on_text, wanted);
  }

  absl::StatusOr<ChatAnswer> Complete(const std::string& prompt, const ChatSettings& settings,
                                      const OnText& on_text,
                                      const std::function<bool()>& wanted) override {
    ASSIGN_OR_RETURN(model::Seam tokens, Plain(prompt, settings));
    return Submit(std::move(tokens), /*plain=*/false, settings, on_text, wanted);
  }

 private:
  // plain: the next question, if the model goes on to ask one itself, is not part of the answer.
  absl::StatusOr<ChatAnswer> Submit(model::Seam prompt, bool plain, const ChatSettings& settings,
                                    const OnText& on_text, const std::function<bool()>& wanted) {
    AnswerJob job;
    job.context = settings.context;
    if (!job.context.empty()) {
      ASSIGN_OR_RETURN(const auto client, store_->NewContextClient());
      ASSIGN_OR_RETURN(const v1::Manifest manifest, client->Get(job.context));
      if (!absl::StartsWith(manifest.content_id(), flags_.config.content_id)) {
        return absl::FailedPreconditionError(absl::StrCat("context \"", job.context, "\" holds ",
                                                          manifest.content_id(),
                                                          ", not what --content-id says"));
      }
      job.content_id = manifest.content_id();
    }
    const auto prompt_tokens = static_cast<int64_t>(prompt.tokens.size());
    job.prompt = std::move(prompt.tokens);
    job.give_up = prompt.give_up;
    job.sources = settings.sources;
    job.max_tokens = settings.max_tokens;
    job.sampling = settings.sampling;
    job.wanted = wanted;
    ChatAnswer answer;
    http_api::StopFilter filter(plain ? std::vector<std::string>{kPlainStop}
                                      : std::vector<std::string>());
    const auto show = [&](const std::string& piece) {
      answer.text += piece;
      if (!piece.empty()) on_text(piece);
    };
    job.on_text = [&](const std::string& piece) {
      show(filter.Push(piece));
      return !filter.stopped() && wanted();
    };
    absl::Notification ended;
    absl::StatusOr<AnswerJob::Done> done;
    job.done = [&](absl::StatusOr<AnswerJob::Done> what) {
      done = std::move(what);
      ended.Notify();
    };
    RETURN_IF_ERROR(answerer_->Submit(std::move(job)));
    ended.WaitForNotification();
    RETURN_IF_ERROR(done.status());
    show(filter.Finish());
    if (!wanted()) return absl::CancelledError("nobody wants the answer any more");
    answer.cut_off = done->at_max_tokens && !filter.stopped();
    answer.prompt_tokens = done->context_tokens + prompt_tokens;
    answer.cached_tokens = done->context_tokens + done->resumed_tokens;
    answer.tokens = done->tokens;
    answer.prompt_ms = 1e3 * done->prompt_seconds;
    if (done->tokens > 1) {
      answer.ms_per_token = 1e3 * done->generate_seconds / static_cast<double>(done->tokens - 1);
    }
    answer.sources = std::move(done->sources);
    return answer;
  }

  absl::StatusOr<model::Seam> Prompt(const std::vector<Message>& messages,
                                     const ChatSettings& settings) {
    if (chat_ == nullptr) return Plain(PlainPrompt(messages), settings);
    const model::Tokenizer& tokenizer = *model_->checkpoint().tokenizer;
    model::Seam alone;
    if (settings.context.empty()) {
      ASSIGN_OR_RETURN(alone.tokens, chat_->Encode(messages, tokenizer));
      return alone;
    }
    ASSIGN_OR_RETURN(const library::DocumentEnds document, ends_.Of(settings.context, "", *store_));
    return chat_->EncodeBehind(messages, tokenizer, document, MostGivenUp(document));
  }

  absl::StatusOr<model::Seam> Plain(const std::string& prompt, const ChatSettings& settings) {
    model::Seam alone;
    if (settings.context.empty()) {
      ASSIGN_OR_RETURN(alone.tokens, model_->checkpoint().EncodeDocument(prompt));
      return alone;
    }
    ASSIGN_OR_RETURN(const library::DocumentEnds document, ends_.Of(settings.context, "", *store_));
    return model::JoinTokens(*model_->checkpoint().tokenizer, document.last, MostGivenUp(document),
                             prompt);
  }

  int64_t MostGivenUp(const library::DocumentEnds& document) const {
    return decoder::MostGivenUp(flags_.config, flags_.device_config, document.tokens);
  }

  const RetrievalFlags flags_;
  const std::shared_ptr<library::LoadedModel> model_;
  const std::shared_ptr<library::StoreAccess> store_;   // null: no context
  const std::unique_ptr<http_api::ChatTemplate> chat_;  // null: the model has none
  const std::unique_ptr<http_api::Answerer> answerer_;
  library::DocumentEndsCache ends_;
};

absl::StatusOr<json> ParseObject(absl::string_view text) {
  json parsed = json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (parsed.is_object()) return parsed;
  return absl::DataLossError("the server's answer is no JSON object: is it carrel api?");
}

class ApiPartner final : public ChatPartner {
 public:
  explicit ApiPartner(http_api::ApiClient client) : client_(std::move(client)) {}

  absl::Status Greet() {
    ASSIGN_OR_RETURN(const std::string answer, client_.Call("/v1/models", ""));
    ASSIGN_OR_RETURN(const json models, ParseObject(answer));
    if (!models.contains("data") || !models["data"].is_array() || models["data"].empty() ||
        !models["data"][0].contains("carrel")) {
      return absl::FailedPreconditionError("the server is not carrel api: it names no model so");
    }
    const json& model = models["data"][0];
    model_ = model.value("id", "");
    chat_ = model["carrel"].value("chat", false);
    return absl::OkStatus();
  }

  std::string name() const override { return absl::StrCat(model_, " at ", client_.address()); }

  absl::StatusOr<ChatAnswer> Answer(const std::vector<Message>& messages,
                                    const ChatSettings& settings, const OnText& on_text,
                                    const std::function<bool()>& wanted) override {
    if (!chat_) {
      return Post("/v1/completions", {{"prompt", PlainPrompt(messages)}, {"stop", {kPlainStop}}},
                  settings, on_text, wanted);
    }
    json list = json::array();
    for (const Message& message : messages) {
      list.push_back({{"role", message.role}, {"content", message.content}});
    }
    return Post("/v1/chat/completions", {{"messages", std::move(list)}}, settings, on_text, wanted);
  }

  absl::StatusOr<ChatAnswer> Complete(const std::string& prompt, const ChatSettings& settings,
                                      const OnText& on_text,
                                      const std::function<bool()>& wanted) override {
    return Post("/v1/completions", {{"prompt", prompt}}, settings, on_text, wanted);
  }

 private:
  absl::StatusOr<ChatAnswer> Post(const std::string& target, json request,
                                  const ChatSettings& settings, const OnText& on_text,
                                  const std::function<bool()>& wanted) {
    request.update({{"model", model_},
                    {"stream", true},
                    {"stream_options", {{"include_usage", true}}},
                    {"max_tokens", settings.max_tokens},
                    {"temperature", settings.sampling.temperature},
                    {"top_p", settings.sampling.top_p},
                    {"seed", static_cast<int64_t>(settings.sampling.seed)},
                    {"sources", settings.sources}});
    if (!settings.context.empty()) request["context"] = settings.context;
    ChatAnswer answer;
    client_.set_wanted(wanted);
    RETURN_IF_ERROR(
        client_.Stream(target, request.dump(-1, ' ', false, json::error_handler_t::replace),
                       [&](absl::string_view data) { return AddEvent(data, on_text, answer); }));
    return answer;
  }

  static absl::Status AddEvent(absl::string_view data, const OnText& on_text, ChatAnswer& answer) {
    ASSIGN_OR_RETURN(const json event, ParseObject(data));
    if (event.contains("error")) {
      return absl::InternalError(event["error"].value("message", "the server failed"));
    }
    if (event.contains("usage") && event["usage"].is_object()) {
      const json& usage = event["usage"];
      answer.prompt_tokens = usage.value("prompt_tokens", int64_t{0});
      answer.tokens = usage.value("completion_tokens", int64_t{0});
      answer.cached_tokens =
          usage.value("/prompt_tokens_details/cached_tokens"_json_pointer, int64_t{0});
    }
    if (event.contains("carrel")) AddFigures(event["carrel"], answer);
    for (const json& choice : event.value("choices", json::array())) {
      const std::string piece = choice.contains("delta") ? choice["delta"].value("content", "")
                                                         : choice.value("text", "");
      answer.text += piece;
      if (!piece.empty()) on_text(piece);
      if (choice.contains("finish_reason") && choice["finish_reason"] == "length") {
        answer.cut_off = true;
      }
    }
    return absl::OkStatus();
  }

  static void AddFigures(const json& told, ChatAnswer& answer) {
    answer.prompt_ms = told.value("prompt_ms", 0.0);
    answer.ms_per_token = told.value("ms_per_token", 0.0);
    for (const json& source : told.value("sources", json::array())) {
      http_api::AnswerSource& added = answer.sources.emplace_back();
      added.text = source.value("text", "");
      added.share = source.value("share", 0.0);
      added.first_token = source.value("/tokens/0"_json_pointer, int64_t{0});
      added.end_token = source.value("/tokens/1"_json_pointer, int64_t{0});
      added.begin = source.value("/bytes/0"_json_pointer, int64_t{0});
      added.end = source.value("/bytes/1"_json_pointer, int64_t{0});
    }
  }

  http_api::ApiClient client_;
  std::string model_;
  bool chat_ = false;
};

}  // namespace

absl::Status CheckApiFlags(const CLI::App& command) {
  static const absl::flat_hash_set<std::string> taken = {
      "PROMPT", "api",  "context", "key-file", "max-tokens", "temperature",
      "top-p",  "seed", "sources", "json",     "system"};
  for (const CLI::Option* option : command.get_options()) {
    if (option->count() == 0 || taken.contains(option->get_single_name())) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--api: leave out --", option->get_single_name(),
                     ": model, store and how rows are retrieved are the server's"));
  }
  return absl::OkStatus();
}

std::string PlainPrompt(const std::vector<Message>& messages) {
  std::string prompt;
  for (const Message& message : messages) {
    if (message.role == "system") {
      absl::StrAppend(&prompt, "\n\n", message.content);
    } else if (message.role == "user") {
      absl::StrAppend(&prompt, "\n\nQuestion: ", message.content, "\nAnswer:");
    } else {
      prompt += message.content;  // as the model gave it, with its space
    }
  }
  return prompt;
}

absl::StatusOr<std::unique_ptr<ChatPartner>> MakeLocalPartner(const RetrievalFlags& flags) {
  ASSIGN_OR_RETURN(std::shared_ptr<library::LoadedModel> model,
                   library::LoadedModel::Load(flags.model_dir, flags.adapter_dir, flags.threads));
  std::shared_ptr<library::StoreAccess> store;
  if (!flags.context.empty()) {
    ASSIGN_OR_RETURN(store, OpenStore(flags));
  }
  absl::StatusOr<std::unique_ptr<http_api::ChatTemplate>> chat =
      http_api::ChatTemplate::Load(flags.model_dir, model->checkpoint());
  if (!chat.ok() && !absl::IsNotFound(chat.status())) return chat.status();
  return std::make_unique<LocalPartner>(flags, std::move(model), std::move(store),
                                        chat.ok() ? *std::move(chat) : nullptr);
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
