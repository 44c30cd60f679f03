/* 02_ask in C: 05_ask MODEL STORE NAME PROMPT */
#include <carrel/c.h>
#include <stdio.h>
#include <string.h>

static int show(const char* text, size_t size, void* user) {
  (void)user;
  fwrite(text, 1, size, stdout);
  fflush(stdout);
  return 0;
}

int main(int argc, char** argv) {
  carrel_model* model = NULL;
  carrel_store* store = NULL;
  carrel_reader* reader = NULL;
  carrel_answer* answer = NULL;
  carrel_generate_options options;
  int failed = 1;
  if (argc != 5) {
    fprintf(stderr, "usage: %s MODEL STORE NAME PROMPT\n", argv[0]);
    return 2;
  }
  carrel_generate_options_init(&options);
  options.on_text = show;
  if (carrel_model_load(argv[1], NULL, 0, &model) == 0 &&
      carrel_store_open(argv[2], 0, &store) == 0 &&
      carrel_reader_open(model, store, argv[3], NULL, &reader) == 0 &&
      carrel_generate(reader, argv[4], strlen(argv[4]), &options, &answer) == 0) {
    printf("\n");
    failed = 0;
  } else {
    fprintf(stderr, "%s\n", carrel_last_error());
  }
  carrel_answer_free(answer);
  carrel_reader_free(reader);
  carrel_store_free(store);
  carrel_model_free(model);
  return failed;
}
