#include "common/secret.h"

#include <openssl/crypto.h>
#include <openssl/rand.h>

#include "common/status.h"

namespace carrel {

std::string RandomBytes(size_t bytes) {
  std::string random(bytes, '\0');
  const int done =
      RAND_bytes(reinterpret_cast<unsigned char*>(random.data()), static_cast<int>(bytes));
  CARREL_CHECK(done == 1);  // the system has no source of randomness
  return random;
}

bool EqualSecrets(absl::string_view a, absl::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace carrel
