// Serves a store until standard input ends: 03_serve STORE ADDRESS
#include <carrel/server.h>

#include <cstdio>

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s STORE ADDRESS\n", argv[0]);
    return 2;
  }
  carrel::ServerOptions options;
  options.listen = {argv[2]};
  const auto server = carrel::Server::Start(argv[1], options);
  if (!server.ok()) {
    std::fprintf(stderr, "%s\n", server.status().message().c_str());
    return 1;
  }
  std::printf("ready on %s\n", (*server)->addresses().front().c_str());
  std::fflush(stdout);
  while (std::getchar() != EOF) {
  }
  (*server)->Stop(/*wait_s=*/10);
}
