/* carrel/c.h is C, and what a C program does wrong is answered, not obeyed. */
#include "carrel/c.h"

#include <string.h>

/* 0, or the line of the first expectation that does not hold. */
#define EXPECT(condition) \
  if (!(condition)) return __LINE__

int CarrelCTest_BadInput(void) {
  carrel_model* model = (carrel_model*)&model;
  carrel_store* store = NULL;
  carrel_reader* reader = NULL;
  carrel_server* server = NULL;
  EXPECT(strlen(carrel_version()) >= 5);
  EXPECT(carrel_model_load("/nowhere/at/all", NULL, 0, &model) != 0);
  EXPECT(model == NULL);
  EXPECT(strstr(carrel_last_error(), "/nowhere/at/all") != NULL);
  EXPECT(carrel_model_load(NULL, NULL, 0, &model) == 3);
  EXPECT(strcmp(carrel_last_error(), "path is NULL") == 0);
  EXPECT(carrel_model_load("/nowhere", NULL, 0, NULL) == 3);
  EXPECT(carrel_store_open("/nowhere/at/all", 0, &store) == 5);
  EXPECT(carrel_store_list(NULL, NULL, NULL) == 3);
  EXPECT(carrel_reader_open(NULL, NULL, "x", NULL, &reader) == 3);
  EXPECT(carrel_server_start("/nowhere/at/all", "nonsense", 1, &server) != 0);
  carrel_model_free(NULL);
  carrel_store_free(NULL);
  carrel_reader_free(NULL);
  carrel_answer_free(NULL);
  carrel_session_free(NULL);
  carrel_server_free(NULL);
  carrel_engine_free(NULL);
  return 0;
}

static int Stop(const char* text, size_t size, void* user) {
  (void)text;
  *(size_t*)user += size;
  return 1;
}

/* Two questions at once, of which one fails; questions of a header that knew less of them. */
static int CarrelCTest_Engine(carrel_model* model, carrel_store* store, const char* context,
                              const char* prompt) {
  carrel_engine* engine = NULL;
  carrel_question good, bad;
  const carrel_question* both[] = {&bad, &good};
  carrel_answer* answers[2];
  carrel_code codes[2];
  double share = 0;
  EXPECT(carrel_engine_start(model, store, NULL, -1, &engine) == 3 && engine == NULL);
  EXPECT(carrel_engine_start(model, store, NULL, 2, &engine) == 0);
  carrel_question_init(&good);
  good.context = context;
  good.prompt = prompt;
  good.sources = 1;
  bad = good;
  bad.context = "none";
  EXPECT(carrel_engine_ask(engine, both, 2, answers, codes) == 5);
  EXPECT(strstr(carrel_last_error(), "none") != NULL);
  EXPECT(codes[0] == 5 && answers[0] == NULL && codes[1] == 0);
  EXPECT(strlen(carrel_answer_text(answers[1], NULL)) > 0);
  EXPECT(carrel_answer_known_tokens(answers[1]) > 900);
  EXPECT(carrel_answer_source(answers[1], 0, &share) != NULL && share > 0);
  EXPECT(carrel_answer_source(answers[1], 1, NULL) == NULL);
  carrel_answer_free(answers[1]);
  good.size = offsetof(carrel_question, sources);
  EXPECT(carrel_engine_ask(engine, both + 1, 1, answers, NULL) == 0);
  EXPECT(carrel_answer_source(answers[0], 0, NULL) == NULL);
  carrel_answer_free(answers[0]);
  carrel_engine_free(engine);
  return 0;
}

/* A reader with options of a header that knew fewer of them, and an answer that its caller ends. */
int CarrelCTest_Ask(const char* model_path, const char* folder, const char* context,
                    const char* prompt) {
  carrel_model* model = NULL;
  carrel_store* store = NULL;
  carrel_reader* reader = NULL;
  carrel_answer* answer = NULL;
  carrel_reader_options reader_options;
  carrel_generate_options options;
  size_t size = 0, count = 0, seen = 0;
  EXPECT(carrel_model_load(model_path, NULL, 2, &model) == 0);
  EXPECT(carrel_store_open(folder, 0, &store) == 0);
  carrel_reader_options_init(&reader_options);
  reader_options.zone = 9; /* beyond what `size` says: not looked at */
  reader_options.size = offsetof(carrel_reader_options, zone);
  EXPECT(carrel_reader_open(model, store, context, &reader_options, &reader) == 0);
  EXPECT(carrel_generate(reader, prompt, strlen(prompt), NULL, &answer) == 0);
  EXPECT(strlen(carrel_answer_text(answer, &size)) == size && size > 0);
  EXPECT(carrel_answer_tokens(answer, &count) != NULL && count > 0);
  carrel_answer_free(answer);
  carrel_generate_options_init(&options);
  options.on_text = Stop;
  options.user = &seen;
  EXPECT(carrel_generate(reader, prompt, strlen(prompt), &options, &answer) == 1);
  EXPECT(answer == NULL && seen > 0);
  reader_options.size = sizeof(reader_options);
  carrel_reader_free(reader);
  EXPECT(CarrelCTest_Engine(model, store, context, prompt) == 0);
  EXPECT(carrel_reader_open(model, store, context, &reader_options, &reader) == 3);
  EXPECT(strstr(carrel_last_error(), "zone=9") != NULL);
  carrel_store_free(store);
  carrel_model_free(model);
  return 0;
}
