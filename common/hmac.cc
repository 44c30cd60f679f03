#include "common/hmac.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>

#include "absl/strings/escaping.h"
#include "common/status.h"

namespace carrel {

std::string HmacSha256(absl::string_view key, absl::string_view message) {
  unsigned char out[32];
  unsigned int size = sizeof out;
  CARREL_CHECK(HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
                    reinterpret_cast<const unsigned char*>(message.data()), message.size(), out,
                    &size) != nullptr &&
               size == sizeof out);
  return std::string(reinterpret_cast<const char*>(out), size);
}

std::string Md5Hex(absl::string_view bytes) {
  unsigned char out[16];
  unsigned int size = sizeof out;
  CARREL_CHECK(EVP_Digest(bytes.data(), bytes.size(), out, &size, EVP_md5(), nullptr) == 1 &&
               size == sizeof out);
  return absl::BytesToHexString(absl::string_view(reinterpret_cast<const char*>(out), size));
}

}  // namespace carrel
