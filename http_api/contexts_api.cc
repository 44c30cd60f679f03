#include "http_api/contexts_api.h"

#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/status.h"
#include "http_api/completion.h"
#include "kvstore/access/access.h"
#include "library/document_text.h"

namespace carrel::http_api {
namespace {

using nlohmann::json;

constexpr char kJson[] = "application/json";

std::string Dump(const json& value) {
  return value.dump(-1, ' ', false, json::error_handler_t::replace);
}

const char* NameOf(DocumentState state) {
  switch (state) {
    case DocumentState::kQueued:
      return "queued";
    case DocumentState::kPrefilling:
      return "prefilling";
    case DocumentState::kReady:
      return "ready";
    case DocumentState::kFailed:
      return "failed";
  }
  return "";
}

json JsonOf(const Document& document) {
  json value = {{"object", "context"},
                {"name", document.name},
                {"state", NameOf(document.state)},
                {"progress", document.progress},
                {"tokens", document.tokens},
                {"bytes", document.bytes},
                {"content_id", document.content_id.empty() ? json() : json(document.content_id)},
                {"index", document.index},
                {"created", document.created_unix_s},
                {"usable", document.usable}};
  if (document.state == DocumentState::kPrefilling) value["where"] = document.where;
  if (document.state == DocumentState::kFailed) {
    value["error"] = json::parse(ErrorOf(document.error).body)["error"];
  }
  return value;
}

absl::Status WrongMethod(const HttpRequest& request, const char* wanted) {
  return absl::InvalidArgumentError(
      absl::StrCat(ContextsApi::kTarget, " is for ", wanted, ", not ", request.method));
}

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// A parameter of a query, %XX and + taken as bytes; empty: none.
std::string Parameter(absl::string_view query, absl::string_view name) {
  while (!query.empty()) {
    const size_t end = query.find('&');
    absl::string_view one = query.substr(0, end);
    query = end == absl::string_view::npos ? "" : query.substr(end + 1);
    if (!absl::ConsumePrefix(&one, name) || !absl::ConsumePrefix(&one, "=")) continue;
    std::string value;
    for (size_t i = 0; i < one.size(); ++i) {
      if (one[i] == '%' && i + 2 < one.size() && HexDigit(one[i + 1]) >= 0 &&
          HexDigit(one[i + 2]) >= 0) {
        value += static_cast<char>(16 * HexDigit(one[i + 1]) + HexDigit(one[i + 2]));
        i += 2;
      } else {
        value += one[i] == '+' ? ' ' : one[i];
      }
    }
    return value;
  }
  return "";
}

std::string EventOf(const Document& document) {
  return absl::StrCat("data: ", Dump(JsonOf(document)), "\n\n");
}

absl::Status StreamEvents(Documents& documents, const std::string& name,
                          const std::shared_ptr<HttpReply>& reply) {
  bool begun = false;
  return documents.Watch(name, [reply, begun](const Document& document) mutable {
    if (!begun) reply->Begin("text/event-stream; charset=utf-8");
    begun = true;
    reply->Write(EventOf(document));
    const bool last =
        document.state == DocumentState::kReady || document.state == DocumentState::kFailed;
    if (last) {
      reply->Write(kDoneEvent);
      reply->End();
    }
    return !last && !reply->gone();
  });
}

}  // namespace

Documents::Sees SeenBy(kvstore::Principal* who) {
  return [who](const std::string& name) { return who == nullptr || who->Sees(name); };
}

absl::Status ContextsApi::Handle(const HttpRequest& request, kvstore::Principal* who,
                                 const std::shared_ptr<HttpReply>& reply) const {
  const auto check = [&](kvstore::Right right) {
    return who == nullptr ? absl::OkStatus() : who->Check(right);
  };
  const size_t question = request.target.find('?');
  const std::string query =
      question == std::string::npos ? "" : request.target.substr(question + 1);
  absl::string_view name = absl::string_view(request.target).substr(0, question);
  if (!absl::ConsumePrefix(&name, kTarget) || (!name.empty() && !absl::ConsumePrefix(&name, "/"))) {
    return absl::NotFoundError(absl::StrCat("there is no ", request.target.substr(0, 200)));
  }
  if (documents == nullptr) {
    return absl::FailedPreconditionError("there is no store: carrel api needs --store FOLDER");
  }
  if (name.empty()) {
    if (request.method == "POST") {
      RETURN_IF_ERROR(check(kvstore::Right::kImport));
      return Create(request, query, who, *reply);
    }
    if (request.method != "GET") return WrongMethod(request, "GET and POST");
    RETURN_IF_ERROR(check(kvstore::Right::kList));
    ASSIGN_OR_RETURN(const std::vector<Document> all, documents->List());
    json data = json::array();
    for (const Document& document : all) {
      if (who == nullptr || who->Sees(document.name)) data.push_back(JsonOf(document));
    }
    reply->Send(200, kJson, Dump({{"object", "list"}, {"data", std::move(data)}}));
    return absl::OkStatus();
  }
  const bool events = absl::ConsumeSuffix(&name, "/events");
  const bool text = !events && absl::ConsumeSuffix(&name, "/text");
  const std::string context(name);
  if (request.method != "GET" && (events || text || request.method != "DELETE")) {
    return WrongMethod(request, events || text ? "GET" : "GET and DELETE");
  }
  const bool removal = request.method == "DELETE";
  RETURN_IF_ERROR(check(removal ? kvstore::Right::kDelete
                        : text  ? kvstore::Right::kOpen
                                : kvstore::Right::kList));
  if (who != nullptr && !who->Sees(context)) {
    return absl::NotFoundError(absl::StrCat("no context \"", context, "\""));
  }
  ASSIGN_OR_RETURN(const Document document, documents->Get(context));
  if (events) return StreamEvents(*documents, context, reply);
  if (text) return SendText(document, *reply);
  if (removal) {
    RETURN_IF_ERROR(documents->Delete(context));
    reply->Send(200, kJson, Dump({{"name", context}, {"object", "context"}, {"deleted", true}}));
  } else {
    reply->Send(200, kJson, Dump(JsonOf(document)));
  }
  return absl::OkStatus();
}

absl::Status ContextsApi::SendText(const Document& document, HttpReply& reply) const {
  ASSIGN_OR_RETURN(std::vector<TokenId> tokens,
                   store->DocumentTokens(document.name, document.content_id));
  std::string head;
  if (chat != nullptr) {
    ASSIGN_OR_RETURN(head, chat->TurnHead());
  }
  ASSIGN_OR_RETURN(const library::DocumentText text,
                   library::DocumentText::Create(std::move(tokens), *checkpoint->tokenizer, head));
  reply.Send(200, "text/plain; charset=utf-8", text.text());
  return absl::OkStatus();
}

// A name that the caller would not see afterwards is refused before anybody looks whether it is taken.
absl::Status ContextsApi::CheckNew(const std::string& name, int64_t tokens,
                                   kvstore::Principal* who) const {
  if (who == nullptr) return absl::OkStatus();
  if (!who->SeesAll() && (name.empty() || !who->Sees(name))) {
    return absl::PermissionDeniedError(
        absl::StrCat("name=", name, ": this key may not make a context of this name"));
  }
  if (!who->OfTenant(name)) return absl::OkStatus();
  ASSIGN_OR_RETURN(const std::vector<Document> all, documents->List());
  const AttentionShape& shape = checkpoint->config.shape;
  const int64_t token_bytes = int64_t{4} * shape.layers * shape.kv_heads * shape.head_dim;
  int64_t contexts = 0, bytes = 0;
  for (const Document& document : all) {
    if (!who->OfTenant(document.name)) continue;
    ++contexts;
    bytes += document.bytes > 0 ? document.bytes : document.tokens * token_bytes;
  }
  // Documents that wait and those on their way are among `all`: nothing is held beside them.
  return who->TakeImport(contexts, bytes, tokens * token_bytes).status();
}

absl::Status ContextsApi::Create(const HttpRequest& request, const std::string& query,
                                 kvstore::Principal* who, HttpReply& reply) const {
  std::string name = Parameter(query, "name"), text = request.body;
  const std::string chat_wanted = Parameter(query, "chat");
  if (!chat_wanted.empty() && chat_wanted != "true" && chat_wanted != "false") {
    return absl::InvalidArgumentError(
        absl::StrCat("chat=", chat_wanted, ": must be true or false"));
  }
  bool in_turn = chat_wanted != "false";
  if (absl::StartsWith(request.content_type, kJson)) {
    const json body = json::parse(text, nullptr, /*allow_exceptions=*/false);
    if (!body.is_object()) return absl::InvalidArgumentError("the body is no JSON object");
    for (const auto& [field, into] : {std::pair{"name", &name}, {"text", &text}}) {
      const auto found = body.find(field);
      if (found != body.end() && !found->is_string()) {
        return absl::InvalidArgumentError(absl::StrCat(field, " must be a text"));
      }
      if (found != body.end()) *into = found->get<std::string>();
    }
    if (body.contains("chat")) {
      if (!body["chat"].is_boolean())
        return absl::InvalidArgumentError("chat must be true or false");
      in_turn = body["chat"].get<bool>();
    }
    if (!body.contains("text")) return absl::InvalidArgumentError("text is missing");
  }
  if (text.empty()) return absl::InvalidArgumentError("text: the document is empty");
  if (static_cast<int64_t>(text.size()) > max_text_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("text: the document has ", text.size(),
                                                   " bytes: must be at most ", max_text_bytes,
                                                   " (--max-document-bytes)"));
  }
  const model::Tokenizer& tokenizer = *checkpoint->tokenizer;
  std::string head;
  if (in_turn && chat != nullptr) {
    ASSIGN_OR_RETURN(head, chat->TurnHead());
  }
  absl::StatusOr<std::vector<TokenId>> tokens = library::EncodeGivenText(tokenizer, head, text);
  if (!tokens.ok()) return Annotate(tokens.status(), "text");
  RETURN_IF_ERROR(CheckNew(name, static_cast<int64_t>(tokens->size()), who));
  ASSIGN_OR_RETURN(const Documents::Added added,
                   documents->Add(name, *std::move(tokens), SeenBy(who)));
  json value = JsonOf(added.document);
  value["existed"] = added.existed;
  reply.Send(added.existed ? 200 : 202, kJson, Dump(value));
  return absl::OkStatus();
}

}  // namespace carrel::http_api
