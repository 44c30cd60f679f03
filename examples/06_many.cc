// Asks a context many questions at once, and shows what each answer rests on: 06_many MODEL STORE NAME PROMPT..
#include <carrel/engine.h>

#include <cstdio>
#include <vector>

int main(int argc, char** argv) {
  if (argc < 5) {
    std::fprintf(stderr, "usage: %s MODEL STORE NAME PROMPT..\n", argv[0]);
    return 2;
  }
  const auto fail = [](const carrel::Status& status) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return 1;
  };
  const auto model = carrel::Model::Load(argv[1]);
  if (!model.ok()) return fail(model.status());
  const auto store = carrel::Store::Open(argv[2]);
  if (!store.ok()) return fail(store.status());
  const auto engine = carrel::Engine::Start(*model, *store);
  if (!engine.ok()) return fail(engine.status());

  std::vector<carrel::Question> questions;
  for (int i = 4; i < argc; ++i) {
    questions.push_back({.context = argv[3], .prompt = argv[i], .sources = 1});
  }
  for (const auto& reply : (*engine)->AskMany(questions)) {
    if (!reply.ok()) return fail(reply.status());
    std::printf("%s\n", reply->text.c_str());
    for (const carrel::Source& source : reply->sources) {
      std::printf("  %.0f%% of it rests on:%s\n", 100 * source.share, source.text.c_str());
    }
  }
}
