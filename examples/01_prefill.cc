// Prefills a text file into a store, once: 01_prefill MODEL FILE STORE NAME
#include <carrel/prefill.h>

#include <cstdio>
#include <fstream>
#include <iterator>

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: %s MODEL FILE STORE NAME\n", argv[0]);
    return 2;
  }
  const auto fail = [](const carrel::Status& status) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return 1;
  };
  std::ifstream file(argv[2]);
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};

  const auto model = carrel::Model::Load(argv[1]);
  if (!model.ok()) return fail(model.status());
  const auto tokens = (*model)->EncodeDocument(text);
  if (!tokens.ok()) return fail(tokens.status());
  const auto store = carrel::Store::Open(argv[3], carrel::StoreMode::kReadWrite);
  if (!store.ok()) return fail(store.status());

  carrel::PrefillOptions options;
  options.index = "code";
  options.progress = [](double share, const std::string& where) {
    std::fprintf(stderr, "\r%3.0f%% %s\033[K", 100 * share, where.c_str());
  };
  const auto report = carrel::Prefill(**model, *tokens, **store, argv[4], options);
  std::fprintf(stderr, "\n");
  if (!report.ok()) return fail(report.status());
  std::printf("%s: %lld tokens in %.1f s, %lld bytes, content id %s\n", argv[4],
              static_cast<long long>(report->context.tokens), report->seconds,
              static_cast<long long>(report->context.stored_bytes),
              report->context.content_id.c_str());
}
