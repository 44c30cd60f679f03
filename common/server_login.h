// What: what a client presents to a server, and how it knows that it is the right one.
#pragma once

#include <string>

#include "common/certificate.h"

namespace carrel {

struct ServerLogin {
  // With a CA: TLS, and the server must have a certificate of it for its host's name; certificate
  // and key are the client's own, if it has one. Without: no TLS.
  TlsPem tls;
  std::string key;  // empty: none
  bool uses_tls() const { return !tls.ca.empty(); }
};

}  // namespace carrel
