// What:   a real object store that runs as long as a test: SeaweedFS (weed) or moto (moto_server), where the
//         machine has it: the programs that $CARREL_WEED and $CARREL_MOTO name, or those on $PATH. Tests only.
// Edge:   null, where there is none: the test is skipped, with a word.
// Ownership: its files are in the folder, which outlives it; the process ends with it.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

#include "common/certificate.h"

namespace carrel::kvstore {

class ObjectServer {
 public:
  enum class Kind { kSeaweed, kMoto };
  // Of kTestCredentials, without a bucket. tls: serve https; null: http.
  static std::unique_ptr<ObjectServer> Start(Kind kind, const std::string& folder,
                                             const TlsFiles* tls = nullptr);
  ~ObjectServer();

  const std::string& endpoint() const { return endpoint_; }

 private:
  ObjectServer(pid_t pid, std::string endpoint) : pid_(pid), endpoint_(std::move(endpoint)) {}
  const pid_t pid_;
  const std::string endpoint_;
};

}  // namespace carrel::kvstore
