#include "tools/carrel/chat_partner.h"

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "carrel/v1/context.pb.h"
#include "common/json.h"
#include "common/shown.h"
#include "common/status.h"
#include "http_api/api_client.h"
#include "kvstore/service/context_client.h"
#include "library/document_ends.h"
#include "model/tokenizer/seam.h"
#include "serving/stop_filter.h"
#include "tools/carrel/chat_text.h"
#include "tools/carrel/flag_rules.h"

namespace carrel::tools {
namespace {

using nlohmann::json;
using serving::AnswerJob;
using serving::Message;
using OnText = std::function<void(const std::string&)>;

class LocalPartner final : public ChatPartner {
 public:
  LocalPartner(RetrievalFlags flags, std::shared_ptr<library::LoadedModel> model,
               std::shared_ptr<library::StoreAccess> store, Chat chat)
      : flags_(std::move(flags)),
        model_(std::move(model)),
        store_(std::move(store)),
        chat_(std::move(chat)),
        scheduler_(
            serving::Scheduler::Create({.runner = {.retrieval = flags_.config,
                                                   .device = flags_.device_config,
                                                   .derived_weights = flags_.weights == "derived",
                                                   .folder = flags_.store.folder,
                                                   .turn_head = TurnHeadOf(chat_)}},
                                       model_, store_)) {}

  std::string name() const override { return flags_.model_dir; }
  bool knows_chats() const override { return chat_ != nullptr; }
  std::string sampling(const SamplingFlags& flags) const override {
    return flags.Tell(model_->checkpoint().generation_defaults);
  }

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
    ASSIGN_OR_RETURN(job.sampling,
                     settings.sampling.Resolve(model_->checkpoint().generation_defaults));
    job.wanted = wanted;
    ChatAnswer answer;
    serving::StopFilter filter(plain ? std::vector<std::string>{kPlainStop}
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
    RETURN_IF_ERROR(scheduler_->Submit(std::move(job)));
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
  const std::shared_ptr<library::StoreAccess> store_;  // null: no context
  const Chat chat_;
  const std::unique_ptr<serving::Scheduler> scheduler_;
  library::DocumentEndsCache ends_;
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

  absl::StatusOr<ChatAnswer> Post(const std::string& target, json request,
                                  const ChatSettings& settings, const OnText& on_text,
                                  const std::function<bool()>& wanted) {
    request.update({{"model", model_},
                    {"stream", true},
                    {"stream_options", {{"include_usage", true}}},
                    {"max_tokens", settings.max_tokens},
                    {"sources", settings.sources}});
    RETURN_IF_ERROR(AddSampling(settings.sampling, request));
    if (!settings.context.empty()) request["context"] = settings.context;
    ChatAnswer answer;
    client_.set_wanted(wanted);
    client_.set_context(settings.context);
    RETURN_IF_ERROR(client_.Stream(target, DumpJson(request), [&](absl::string_view data) {
      return AddEvent(data, on_text, answer);
    }));
    return answer;
  }

  static absl::Status AddEvent(absl::string_view data, const OnText& on_text, ChatAnswer& answer) {
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
      if (!piece.empty()) on_text(piece);
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
  ASSIGN_OR_RETURN(Chat chat, LoadChat(flags.model_dir, model->checkpoint()));
  return std::make_unique<LocalPartner>(flags, std::move(model), std::move(store), std::move(chat));
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
