// What:   a NATS server on loopback, as long as a test runs, where the machine has one: what $CARREL_NATS names, or
//         nats-server on $PATH or in /usr/sbin. Tests only.
// Edge:   null, where there is none: the test is skipped, with a word.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

namespace carrel::serving {

class NatsServer {
 public:
  static std::unique_ptr<NatsServer> Start();
  ~NatsServer();
  std::string url() const;
  void Kill();     // -9
  void Restart();  // at the same address; the one before is killed

 private:
  NatsServer(std::string program, int port) : program_(std::move(program)), port_(port) {}
  const std::string program_;
  const int port_;
  pid_t pid_ = -1;
};

}  // namespace carrel::serving
