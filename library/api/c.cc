#include "carrel/c.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "carrel/engine.h"
#include "carrel/prefill.h"
#include "carrel/reader.h"
#include "carrel/retrieval.h"
#include "carrel/server.h"
#include "carrel/version.h"

using namespace carrel;  // NOLINT: this file is the library once more

struct carrel_model {
  std::shared_ptr<Model> model;
};
struct carrel_store {
  std::shared_ptr<Store> store;
};
struct carrel_reader {
  std::unique_ptr<Reader> reader;
};
struct carrel_engine {
  std::unique_ptr<carrel::Engine> engine;
};
struct carrel_answer {
  Reply answer;
};
struct carrel_session {
  std::unique_ptr<Session> session;
};
struct carrel_server {
  std::unique_ptr<Server> server;
};

namespace {

thread_local std::string last_error;

carrel_code Fail(const Status& status) {
  last_error = status.message();
  return static_cast<carrel_code>(status.code());
}

// No exception leaves: what the standard library throws for want of memory becomes a code.
template <typename F>
carrel_code Guarded(F body) {
  try {
    const Status status = body();
    return status.ok() ? 0 : Fail(status);
  } catch (const std::bad_alloc&) {
    return Fail(Status(StatusCode::kResourceExhausted, "out of memory"));
  } catch (const std::exception& error) {
    return Fail(Status(StatusCode::kInternal, error.what()));
  }
}

Status Missing(const char* what) {
  return Status(StatusCode::kInvalidArgument, std::string(what) + " is NULL");
}

std::string Text(const char* text) { return text == nullptr ? std::string() : text; }

// What a call needs, with the names of these.
using Needed = std::initializer_list<std::pair<const void*, const char*>>;

Status CheckNeeded(Needed needed) {
  for (const auto& [what, name] : needed) {
    if (what == nullptr) return Missing(name);
  }
  return {};
}

// A new *out of what `make` gives, once all that it needs is there.
template <typename T, typename F>
carrel_code Make(T** out, Needed needed, F make) {
  return Guarded([&]() -> Status {
    if (out == nullptr) return Missing("out");
    *out = nullptr;
    if (Status status = CheckNeeded(needed); !status.ok()) return status;
    auto made = make();
    if (!made.ok()) return made.status();
    *out = new T{*std::move(made)};
    return {};
  });
}

// Options as this library knows them: those of a smaller struct, of an older header, are completed.
template <typename T>
T Completed(const T* given, void (*init)(T*)) {
  T options;
  init(&options);
  if (given != nullptr) std::memcpy(&options, given, std::min(given->size, sizeof(T)));
  return options;
}

// One token's queries: [q_heads, head_dim].
std::span<const float> OneToken(const ContextInfo& context, const float* queries) {
  return {queries, static_cast<size_t>(context.q_heads) * static_cast<size_t>(context.head_dim)};
}

Status CheckTopK(int64_t top_k) {
  if (top_k == kAllRows || top_k >= 1) return {};
  return Status(StatusCode::kInvalidArgument,
                absl::StrCat("top_k=", top_k, " is neither -1 (all) nor at least 1"));
}

Selection SelectionOf(int64_t top_k) {
  if (top_k == kAllRows) return All();
  return TopK{top_k};
}

}  // namespace

const char* carrel_version(void) { return Version(); }
const char* carrel_last_error(void) { return last_error.c_str(); }

carrel_code carrel_model_load(const char* path, const char* adapter, int threads,
                              carrel_model** out) {
  return Make(out, {{path, "path"}}, [&] { return Model::Load(path, {Text(adapter), threads}); });
}

void carrel_model_free(carrel_model* model) { delete model; }

carrel_code carrel_store_open(const char* folder, int writable, carrel_store** out) {
  return Make(out, {{folder, "folder"}}, [&] {
    return Store::Open(folder, writable != 0 ? StoreMode::kReadWrite : StoreMode::kRead);
  });
}

void carrel_login_init(carrel_login* login) {
  *login = {};
  login->size = sizeof(*login);
  login->retry_for_s = Login().retry_for_s;
}

carrel_code carrel_store_connect(const char* address, const carrel_login* login,
                                 carrel_store** out) {
  return Make(out, {{address, "address"}}, [&] {
    const carrel_login given = Completed(login, carrel_login_init);
    return Store::Connect(address, {Text(given.tls_ca), Text(given.tls_cert), Text(given.tls_key),
                                    Text(given.key_file), given.retry_for_s});
  });
}

void carrel_store_free(carrel_store* store) { delete store; }

carrel_code carrel_store_list(carrel_store* store,
                              int (*show)(const carrel_context_info*, void* user), void* user) {
  return Guarded([&]() -> Status {
    if (Status status =
            CheckNeeded({{store, "store"}, {reinterpret_cast<const void*>(show), "show"}});
        !status.ok())
      return status;
    const Result<std::vector<ContextInfo>> contexts = store->store->List();
    if (!contexts.ok()) return contexts.status();
    for (const ContextInfo& context : *contexts) {
      const carrel_context_info info = {context.name.c_str(),  context.content_id.c_str(),
                                        context.index.c_str(), context.tokens,
                                        context.stored_bytes,  context.created_unix_s,
                                        context.layers,        context.q_heads,
                                        context.kv_heads,      context.head_dim};
      if (show(&info, user) != 0) break;
    }
    return {};
  });
}

carrel_code carrel_store_delete(carrel_store* store, const char* name) {
  return Guarded([&]() -> Status {
    if (Status status = CheckNeeded({{store, "store"}, {name, "name"}}); !status.ok())
      return status;
    return store->store->Delete(name);
  });
}

carrel_code carrel_prefill(carrel_model* model, carrel_store* store, const char* name,
                           const char* text, size_t text_size, const char* index,
                           void (*progress)(double share, const char* where, void* user),
                           void* user) {
  return Guarded([&]() -> Status {
    if (Status status =
            CheckNeeded({{model, "model"}, {store, "store"}, {name, "name"}, {text, "text"}});
        !status.ok())
      return status;
    const Result<std::vector<Token>> tokens = model->model->EncodeDocument({text, text_size});
    if (!tokens.ok()) return tokens.status();
    PrefillOptions options;
    if (index != nullptr) options.index = index;
    if (progress != nullptr) {
      options.progress = [&](double share, const std::string& where) {
        progress(share, where.c_str(), user);
      };
    }
    return Prefill(*model->model, *tokens, *store->store, name, options).status();
  });
}

void carrel_reader_options_init(carrel_reader_options* options) {
  *options = {};
  options->size = sizeof(*options);
  options->fidelity = CARREL_BALANCED;
  options->zone = CARREL_ZONE_AUTO;
}

namespace {

Result<ReaderOptions> Inside(const carrel_reader_options* options) {
  const carrel_reader_options given = Completed(options, carrel_reader_options_init);
  if (given.fidelity < CARREL_FAST || given.fidelity > CARREL_FAITHFUL ||
      given.zone < CARREL_ZONE_STORE || given.zone > CARREL_ZONE_AUTO ||
      given.device < CARREL_CPU || given.device > CARREL_CUDA) {
    return Status(StatusCode::kInvalidArgument,
                  absl::StrCat("fidelity=", given.fidelity, ", zone=", given.zone,
                               ", device=", given.device, ": outside [0, 2], [0, 3], [0, 1]"));
  }
  ReaderOptions inside;
  inside.fidelity = static_cast<Fidelity>(given.fidelity);
  if (given.target_error != 0) inside.target_error = given.target_error;
  if (given.top_k != 0) inside.top_k = given.top_k;
  inside.zone = static_cast<Zone>(given.zone);
  inside.device = static_cast<Device>(given.device);
  inside.content_id = Text(given.content_id);
  return inside;
}

}  // namespace

carrel_code carrel_reader_open(carrel_model* model, carrel_store* store, const char* context,
                               const carrel_reader_options* options, carrel_reader** out) {
  return Make(out, {{model, "model"}, {store, "store"}, {context, "context"}},
              [&]() -> Result<std::unique_ptr<Reader>> {
                const Result<ReaderOptions> inside = Inside(options);
                if (!inside.ok()) return inside.status();
                return Reader::Open(model->model, store->store, context, *inside);
              });
}

void carrel_reader_free(carrel_reader* reader) { delete reader; }

void carrel_generate_options_init(carrel_generate_options* options) {
  const GenerateOptions defaults;
  *options = {};
  options->size = sizeof(*options);
  options->max_tokens = defaults.max_tokens;
  options->temperature = defaults.temperature;
  options->top_p = defaults.top_p;
  options->seed = defaults.seed;
}

namespace {

// on_text and user are copied.
GenerateOptions Inside(const carrel_generate_options* options) {
  const carrel_generate_options given = Completed(options, carrel_generate_options_init);
  GenerateOptions inside;
  inside.max_tokens = given.max_tokens;
  inside.temperature = given.temperature;
  inside.top_p = given.top_p;
  inside.seed = given.seed;
  if (given.on_text != nullptr) {
    inside.on_text = [on_text = given.on_text, user = given.user](std::string_view piece) {
      return on_text(piece.data(), piece.size(), user) == 0;
    };
  }
  return inside;
}

}  // namespace

carrel_code carrel_generate(carrel_reader* reader, const char* prompt, size_t prompt_size,
                            const carrel_generate_options* options, carrel_answer** out) {
  return Make(out, {{reader, "reader"}, {prompt, "prompt"}}, [&]() -> Result<Reply> {
    Result<Answer> answer = reader->reader->Generate({prompt, prompt_size}, Inside(options));
    if (!answer.ok()) return answer.status();
    return Reply{*std::move(answer)};
  });
}

const char* carrel_answer_text(const carrel_answer* answer, size_t* size) {
  if (size != nullptr) *size = answer->answer.text.size();
  return answer->answer.text.c_str();
}

const int32_t* carrel_answer_tokens(const carrel_answer* answer, size_t* count) {
  if (count != nullptr) *count = answer->answer.tokens.size();
  return answer->answer.tokens.data();
}

void carrel_answer_free(carrel_answer* answer) { delete answer; }

carrel_code carrel_engine_start(carrel_model* model, carrel_store* store,
                                const carrel_reader_options* reading, int64_t answers,
                                carrel_engine** out) {
  return Make(out, {{model, "model"}, {store, "store"}},
              [&]() -> Result<std::unique_ptr<carrel::Engine>> {
                const Result<ReaderOptions> inside = Inside(reading);
                if (!inside.ok()) return inside.status();
                EngineOptions options = {.reading = *inside};
                if (answers != 0) options.answers = answers;
                return carrel::Engine::Start(model->model, store->store, options);
              });
}

void carrel_engine_free(carrel_engine* engine) { delete engine; }

void carrel_question_init(carrel_question* question) {
  *question = {};
  question->size = sizeof(*question);
}

carrel_code carrel_engine_ask(carrel_engine* engine, const carrel_question* const* questions,
                              size_t count, carrel_answer** answers, carrel_code* codes) {
  return Guarded([&]() -> Status {
    if (engine == nullptr || questions == nullptr || answers == nullptr) {
      return Missing("engine, questions or answers");
    }
    std::fill_n(answers, count, nullptr);
    std::vector<Question> inside(count);
    for (size_t i = 0; i < count; ++i) {
      if (questions[i] == nullptr) return Missing("a question");
      const carrel_question given = Completed(questions[i], carrel_question_init);
      inside[i].context = Text(given.context);
      inside[i].prompt = Text(given.prompt);
      inside[i].options = Inside(given.options);
      inside[i].sources = given.sources;
      for (size_t k = 0; k < given.message_count; ++k) {
        inside[i].messages.push_back(
            {Text(given.messages[k].role), Text(given.messages[k].content)});
      }
    }
    std::vector<Result<Reply>> replies = engine->engine->AskMany(inside);
    Status first;
    for (size_t i = 0; i < count; ++i) {
      const Status status = replies[i].ok() ? Status() : replies[i].status();
      if (codes != nullptr) codes[i] = static_cast<carrel_code>(status.code());
      if (first.ok()) first = status;
      if (status.ok()) answers[i] = new carrel_answer{*std::move(replies[i])};
    }
    return first;
  });
}

int64_t carrel_answer_known_tokens(const carrel_answer* answer) {
  return answer->answer.context_tokens + answer->answer.known_tokens;
}

const char* carrel_answer_source(const carrel_answer* answer, size_t i, double* share) {
  if (i >= answer->answer.sources.size()) return nullptr;
  if (share != nullptr) *share = answer->answer.sources[i].share;
  return answer->answer.sources[i].text.c_str();
}

carrel_code carrel_session_open(carrel_store* store, const char* context, const char* content_id,
                                int64_t sink, int64_t local, carrel_session** out) {
  return Make(out, {{store, "store"}, {context, "context"}}, [&] {
    return Session::OpenPinned(store->store, context, Text(content_id), {sink, local});
  });
}

void carrel_session_free(carrel_session* session) { delete session; }

carrel_code carrel_session_attend(carrel_session* session, int32_t layer, const float* queries,
                                  int64_t top_k, int estimate, float* out, float* lse) {
  return Guarded([&]() -> Status {
    if (session == nullptr || queries == nullptr || out == nullptr || lse == nullptr) {
      return Missing("session, queries, out or lse");
    }
    if (Status status = CheckTopK(top_k); !status.ok()) return status;
    const ContextInfo& context = session->session->context();
    const Result<std::vector<HeadResult>> heads =
        session->session->Ask({.layer = layer,
                               .queries = OneToken(context, queries),
                               .select = SelectionOf(top_k),
                               .want = Want::kAttend,
                               .estimate = estimate != 0});
    if (!heads.ok()) return heads.status();
    for (const HeadResult& head : *heads) {
      const size_t group = head.lse.size(), at = group * static_cast<size_t>(head.kv_head);
      std::copy(head.lse.begin(), head.lse.end(), lse + at);
      std::copy(head.out.begin(), head.out.end(), out + at * static_cast<size_t>(context.head_dim));
    }
    return {};
  });
}

carrel_code carrel_session_search(carrel_session* session, int32_t layer, const float* queries,
                                  int64_t top_k, int64_t* ids, int64_t* counts) {
  return Guarded([&]() -> Status {
    if (session == nullptr || queries == nullptr || ids == nullptr || counts == nullptr) {
      return Missing("session, queries, ids or counts");
    }
    if (top_k < 1) {
      return Status(StatusCode::kInvalidArgument, absl::StrCat("top_k=", top_k, " is below 1"));
    }
    const Result<std::vector<HeadResult>> heads =
        session->session->Ask({.layer = layer,
                               .queries = OneToken(session->session->context(), queries),
                               .select = TopK{top_k},
                               .want = Want::kScores});
    if (!heads.ok()) return heads.status();
    for (const HeadResult& head : *heads) {
      // A zone may hold fewer.
      const auto count = std::min<int64_t>(top_k, static_cast<int64_t>(head.ids.size()));
      std::copy_n(head.ids.begin(), count, ids + head.kv_head * top_k);
      counts[head.kv_head] = count;
    }
    return {};
  });
}

carrel_code carrel_session_fetch(carrel_session* session, int32_t layer, const int64_t* ids,
                                 size_t count, uint16_t* k, uint16_t* v) {
  return Guarded([&]() -> Status {
    if (session == nullptr || ids == nullptr || k == nullptr || v == nullptr) {
      return Missing("session, ids, k or v");
    }
    const Result<Rows> rows = session->session->Fetch(layer, {ids, count});
    if (!rows.ok()) return rows.status();
    std::copy(rows->k.begin(), rows->k.end(), k);
    std::copy(rows->v.begin(), rows->v.end(), v);
    return {};
  });
}

carrel_code carrel_server_start(const char* folder, const char* listen, int read_only,
                                carrel_server** out) {
  return Make(out, {{folder, "folder"}, {listen, "listen"}}, [&] {
    ServerOptions options;
    options.listen = {listen};
    options.read_only = read_only != 0;
    return Server::Start(folder, options);
  });
}

const char* carrel_server_address(const carrel_server* server) {
  return server->server->addresses().front().c_str();
}

void carrel_server_stop(carrel_server* server, double wait_s) { server->server->Stop(wait_s); }
void carrel_server_free(carrel_server* server) { delete server; }
