// Asks a context, in a folder or at a server, and streams the answer: 02_ask MODEL STORE|ADDRESS NAME PROMPT
#include <carrel/reader.h>

#include <cstdio>
#include <string_view>

namespace {

bool IsAddress(std::string_view store) {
  return store.starts_with("unix:") ||
         (store.find('/') == store.npos && store.find(':') != store.npos);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::fprintf(stderr, "usage: %s MODEL STORE|ADDRESS NAME PROMPT\n", argv[0]);
    return 2;
  }
  const auto fail = [](const carrel::Status& status) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return 1;
  };
  const auto model = carrel::Model::Load(argv[1]);
  if (!model.ok()) return fail(model.status());
  const auto store =
      IsAddress(argv[2]) ? carrel::Store::Connect(argv[2]) : carrel::Store::Open(argv[2]);
  if (!store.ok()) return fail(store.status());

  const auto reader = carrel::Reader::Open(*model, *store, argv[3]);
  if (!reader.ok()) return fail(reader.status());
  carrel::GenerateOptions options;
  options.on_text = [](std::string_view piece) {
    std::fwrite(piece.data(), 1, piece.size(), stdout);
    std::fflush(stdout);
    return true;
  };
  const auto answer = (*reader)->Generate(argv[4], options);
  if (!answer.ok()) return fail(answer.status());
  const carrel::ReaderStatistics statistics = (*reader)->statistics();
  std::printf("\n");
  std::fprintf(stderr, "%zu tokens in %.2f s; %.0f of %lld rows per KV head\n",
               answer->tokens.size(), answer->generate_seconds, statistics.rows_attended,
               static_cast<long long>(statistics.context_tokens));
}
