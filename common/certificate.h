// What:   certificates as TLS takes them from files: read and checked before anybody relies on them.
// Errors: as ReadFile; InvalidArgument names the file and what is wrong: no PEM, a key that is not
//         the certificate's, one that is not valid yet or any more, a key that everybody may read.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace carrel {

struct TlsFiles {
  std::string certificate;  // chain, the server's or client's own first
  std::string key;
  std::string ca;  // of the peers
};

// Contents; empty for a file that was not named.
struct TlsPem {
  std::string certificate, key, ca;
  absl::Time expires = absl::InfiniteFuture();  // the certificate's own
};

// certificate and key: both or neither.
absl::StatusOr<TlsPem> ReadTlsFiles(const TlsFiles& files, absl::Time now);

}  // namespace carrel
