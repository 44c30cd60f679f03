// A conversation about a context's document, one turn per line of standard input: 07_chat MODEL STORE NAME
#include <carrel/engine.h>

#include <cstdio>
#include <iostream>
#include <string>

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: %s MODEL STORE NAME\n", argv[0]);
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

  carrel::Question question;
  question.context = argv[3];
  question.options.on_text = [](std::string_view piece) {
    std::fwrite(piece.data(), 1, piece.size(), stdout);
    std::fflush(stdout);
    return true;
  };
  for (std::string line; std::getline(std::cin, line);) {
    question.messages.push_back({"user", line});
    const auto reply = (*engine)->Ask(question);
    if (!reply.ok()) return fail(reply.status());
    std::printf("\n(%lld of %lld tokens were known)\n",
                static_cast<long long>(reply->context_tokens + reply->known_tokens),
                static_cast<long long>(reply->context_tokens + reply->prompt_tokens));
    question.messages.push_back({"assistant", reply->text});
  }
}
