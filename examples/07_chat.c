/* 07_chat.cc in C: 07_chat_c MODEL STORE NAME */
#include <carrel/c.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kMost = 64, kLine = 4096 };

static int show(const char* text, size_t size, void* user) {
  (void)user;
  fwrite(text, 1, size, stdout);
  fflush(stdout);
  return 0;
}

int main(int argc, char** argv) {
  carrel_model* model = NULL;
  carrel_store* store = NULL;
  carrel_engine* engine = NULL;
  carrel_message messages[kMost];
  carrel_generate_options options;
  carrel_question question;
  const carrel_question* list = &question;
  char line[kLine];
  int failed = 1;
  if (argc != 4) {
    fprintf(stderr, "usage: %s MODEL STORE NAME\n", argv[0]);
    return 2;
  }
  carrel_generate_options_init(&options);
  options.on_text = show;
  carrel_question_init(&question);
  question.context = argv[3];
  question.messages = messages;
  question.options = &options;
  if (carrel_model_load(argv[1], NULL, 0, &model) == 0 &&
      carrel_store_open(argv[2], 0, &store) == 0 &&
      carrel_engine_start(model, store, NULL, 1, &engine) == 0) {
    failed = 0;
  }
  while (!failed && question.message_count + 2 <= kMost && fgets(line, sizeof(line), stdin)) {
    carrel_answer* answer = NULL;
    line[strcspn(line, "\n")] = 0;
    messages[question.message_count].role = "user";
    messages[question.message_count++].content = strdup(line);
    if (carrel_engine_ask(engine, &list, 1, &answer, NULL) != 0) {
      failed = 1;
      break;
    }
    printf("\n(%lld tokens were known)\n", (long long)carrel_answer_known_tokens(answer));
    messages[question.message_count].role = "assistant";
    messages[question.message_count++].content = strdup(carrel_answer_text(answer, NULL));
    carrel_answer_free(answer);
  }
  if (failed) fprintf(stderr, "%s\n", carrel_last_error());
  while (question.message_count > 0) free((char*)messages[--question.message_count].content);
  carrel_engine_free(engine);
  carrel_store_free(store);
  carrel_model_free(model);
  return failed;
}
