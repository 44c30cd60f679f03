// What:      the library for C, and for whatever calls C: opaque handles over the classes of the other
//            headers, whose contracts hold here.
// Errors:    every function that can fail returns a carrel_code; carrel_last_error() then has the
//            message, until this thread's next call. What it would have made is NULL.
// Ownership: what a function makes through `out` is freed by its _free; freeing NULL does nothing. A
//            handle may be freed while others that were made of it live.
// Units:     texts are UTF-8 with a size in bytes; names and paths end with 0.
// Threads:   models, stores and engines: any; readers and sessions: one at a time each.
// Stability: structs of options begin with their size, set by their _init: fields are only added
//            (docs/stability.md).
// Example:   carrel_model* model = NULL;                                         // examples/05_ask.c
//            if (carrel_model_load("models/demo", NULL, 0, &model) != 0) puts(carrel_last_error());
#ifndef CARREL_C_H_
#define CARREL_C_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CARREL_C_API __attribute__((visibility("default")))

/* 0: OK; otherwise the numbers of google.rpc.Code, as carrel/status.h names them. */
typedef int carrel_code;

typedef struct carrel_model carrel_model;
typedef struct carrel_store carrel_store;
typedef struct carrel_reader carrel_reader;
typedef struct carrel_engine carrel_engine;
typedef struct carrel_answer carrel_answer;
typedef struct carrel_session carrel_session;
typedef struct carrel_server carrel_server;

CARREL_C_API const char* carrel_version(void);
/* Of this thread's last call that failed; never NULL. */
CARREL_C_API const char* carrel_last_error(void);

/* model.h. adapter: may be NULL. threads: 0: one per core. */
CARREL_C_API carrel_code carrel_model_load(const char* path, const char* adapter, int threads,
                                           carrel_model** out);
CARREL_C_API void carrel_model_free(carrel_model* model);

/* store.h. writable: not 0: creates the folder, and locks it. */
CARREL_C_API carrel_code carrel_store_open(const char* folder, int writable, carrel_store** out);
typedef struct carrel_login {
  size_t size;
  const char *tls_ca, *tls_cert, *tls_key, *key_file; /* NULL: none */
  double retry_for_s;
} carrel_login;
CARREL_C_API void carrel_login_init(carrel_login* login);
/* login: may be NULL. */
CARREL_C_API carrel_code carrel_store_connect(const char* address, const carrel_login* login,
                                              carrel_store** out);
CARREL_C_API void carrel_store_free(carrel_store* store);

typedef struct carrel_context_info {
  const char *name, *content_id, *index; /* valid during the call that shows them */
  int64_t tokens, stored_bytes, created_unix_s;
  int32_t layers, q_heads, kv_heads, head_dim;
} carrel_context_info;
/* Shows each context, by name; not 0 from `show` ends it. */
CARREL_C_API carrel_code carrel_store_list(carrel_store* store,
                                           int (*show)(const carrel_context_info*, void* user),
                                           void* user);
CARREL_C_API carrel_code carrel_store_delete(carrel_store* store, const char* name);

/* prefill.h: of a text. index: NULL: "flat". progress: may be NULL. */
CARREL_C_API carrel_code carrel_prefill(
    carrel_model* model, carrel_store* store, const char* name, const char* text, size_t text_size,
    const char* index, void (*progress)(double share, const char* where, void* user), void* user);

/* reader.h. */
enum { CARREL_FAST = 0, CARREL_BALANCED = 1, CARREL_FAITHFUL = 2 };
enum { CARREL_ZONE_STORE = 0, CARREL_ZONE_HOST = 1, CARREL_ZONE_DEVICE = 2, CARREL_ZONE_AUTO = 3 };
enum { CARREL_CPU = 0, CARREL_CUDA = 1 };
typedef struct carrel_reader_options {
  size_t size;
  int fidelity;
  double target_error; /* > 0: instead of fidelity */
  int64_t top_k;       /* > 0, or -1 for all rows: instead of fidelity */
  int zone, device;
  const char* content_id; /* NULL: any */
} carrel_reader_options;
CARREL_C_API void carrel_reader_options_init(carrel_reader_options* options);
/* options: NULL: as _init sets them. */
CARREL_C_API carrel_code carrel_reader_open(carrel_model* model, carrel_store* store,
                                            const char* context,
                                            const carrel_reader_options* options,
                                            carrel_reader** out);
CARREL_C_API void carrel_reader_free(carrel_reader* reader);

typedef struct carrel_generate_options {
  size_t size;
  int64_t max_tokens;
  double temperature, top_p;
  uint64_t seed;
  /* Told each piece of text; 0 goes on, anything else ends the answer. May be NULL. */
  int (*on_text)(const char* text, size_t text_size, void* user);
  void* user;
} carrel_generate_options;
CARREL_C_API void carrel_generate_options_init(carrel_generate_options* options);
CARREL_C_API carrel_code carrel_generate(carrel_reader* reader, const char* prompt,
                                         size_t prompt_size, const carrel_generate_options* options,
                                         carrel_answer** out);
/* Valid as long as the answer. size: may be NULL; the text ends with 0 also. */
CARREL_C_API const char* carrel_answer_text(const carrel_answer* answer, size_t* size);
CARREL_C_API const int32_t* carrel_answer_tokens(const carrel_answer* answer, size_t* count);
CARREL_C_API void carrel_answer_free(carrel_answer* answer);

/* engine.h. reading: how contexts are read, without a content_id; may be NULL. answers: on their way at a time; 0: 16. */
CARREL_C_API carrel_code carrel_engine_start(carrel_model* model, carrel_store* store,
                                             const carrel_reader_options* reading, int64_t answers,
                                             carrel_engine** out);
CARREL_C_API void carrel_engine_free(carrel_engine* engine);

typedef struct carrel_message {
  const char *role, *content;
} carrel_message;
typedef struct carrel_question {
  size_t size;
  const char* context; /* NULL: the model alone */
  const char* prompt;  /* what follows its document; NULL: messages do */
  const carrel_message* messages;
  size_t message_count;
  const carrel_generate_options* options; /* NULL: the defaults */
  int64_t sources;                        /* passages of the document to find, at most */
} carrel_question;
CARREL_C_API void carrel_question_init(carrel_question* question);
/* Waits for `count` answers: answers[i] is that of *questions[i], or NULL where codes[i] is not 0. codes: may be NULL.
 * Returns the first code that is not 0, of which carrel_last_error() has the message. */
CARREL_C_API carrel_code carrel_engine_ask(carrel_engine* engine,
                                           const carrel_question* const* questions, size_t count,
                                           carrel_answer** answers, carrel_code* codes);
/* Tokens that were known before: the context's, and those of the conversation's last turn. */
CARREL_C_API int64_t carrel_answer_known_tokens(const carrel_answer* answer);
/* The i-th passage that an answer of an engine rests on, heaviest first; NULL: there are fewer. share: may be NULL. */
CARREL_C_API const char* carrel_answer_source(const carrel_answer* answer, size_t i, double* share);

/* retrieval.h: for an engine of one's own, which knows by its content id that the context is of its
 * model. */
CARREL_C_API carrel_code carrel_session_open(carrel_store* store, const char* context,
                                             const char* content_id, int64_t sink, int64_t local,
                                             carrel_session** out);
CARREL_C_API void carrel_session_free(carrel_session* session);
/* Partial attention of one token over the top_k rows per KV head of the zone (-1: all of it).
 * queries [q_heads, head_dim], out [q_heads, head_dim], lse [q_heads]. */
CARREL_C_API carrel_code carrel_session_attend(carrel_session* session, int32_t layer,
                                               const float* queries, int64_t top_k, int estimate,
                                               float* out, float* lse);
/* The ids of the best rows of one KV head each, best first: ids [kv_heads, top_k], counts
 * [kv_heads] of how many there are. */
CARREL_C_API carrel_code carrel_session_search(carrel_session* session, int32_t layer,
                                               const float* queries, int64_t top_k, int64_t* ids,
                                               int64_t* counts);
/* bf16 rows of all KV heads by position: k, v [kv_heads, count, head_dim]. */
CARREL_C_API carrel_code carrel_session_fetch(carrel_session* session, int32_t layer,
                                              const int64_t* ids, size_t count, uint16_t* k,
                                              uint16_t* v);

/* server.h: on one address, with the defaults of ServerOptions. */
CARREL_C_API carrel_code carrel_server_start(const char* folder, const char* listen, int read_only,
                                             carrel_server** out);
/* The address with the port that was bound; valid as long as the server. */
CARREL_C_API const char* carrel_server_address(const carrel_server* server);
/* Lets running sessions finish for at most wait_s. */
CARREL_C_API void carrel_server_stop(carrel_server* server, double wait_s);
CARREL_C_API void carrel_server_free(carrel_server* server);

#ifdef __cplusplus
}
#endif

#endif /* CARREL_C_H_ */
