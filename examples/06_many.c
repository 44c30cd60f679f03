/* 06_many.cc in C: 06_many_c MODEL STORE NAME PROMPT.. */
#include <carrel/c.h>
#include <stdio.h>

enum { kMost = 64 };

int main(int argc, char** argv) {
  carrel_model* model = NULL;
  carrel_store* store = NULL;
  carrel_engine* engine = NULL;
  carrel_question questions[kMost];
  const carrel_question* list[kMost];
  carrel_answer* answers[kMost] = {NULL};
  size_t count, i;
  int failed = 1;
  if (argc < 5 || argc > 4 + kMost) {
    fprintf(stderr, "usage: %s MODEL STORE NAME PROMPT..\n", argv[0]);
    return 2;
  }
  count = (size_t)(argc - 4);
  for (i = 0; i < count; ++i) {
    carrel_question_init(&questions[i]);
    questions[i].context = argv[3];
    questions[i].prompt = argv[4 + i];
    questions[i].sources = 1;
    list[i] = &questions[i];
  }
  if (carrel_model_load(argv[1], NULL, 0, &model) == 0 &&
      carrel_store_open(argv[2], 0, &store) == 0 &&
      carrel_engine_start(model, store, NULL, 0, &engine) == 0 &&
      carrel_engine_ask(engine, list, count, answers, NULL) == 0) {
    for (i = 0; i < count; ++i) {
      double share = 0;
      const char* source = carrel_answer_source(answers[i], 0, &share);
      printf("%s\n", carrel_answer_text(answers[i], NULL));
      if (source != NULL) printf("  %.0f%% of it rests on:%s\n", 100 * share, source);
    }
    failed = 0;
  } else {
    fprintf(stderr, "%s\n", carrel_last_error());
  }
  for (i = 0; i < count; ++i) carrel_answer_free(answers[i]);
  carrel_engine_free(engine);
  carrel_store_free(store);
  carrel_model_free(model);
  return failed;
}
