// What:   HMAC-SHA256, and MD5 where a protocol wants it: what requests to an object store are signed and
//         compared by.
// Source: RFC 2104 over FIPS 180-4; RFC 1321. OpenSSL's.
// Threads: any.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace carrel {

// 32 bytes.
std::string HmacSha256(absl::string_view key, absl::string_view message);

// 32 lower-case digits. No proof of anything: object stores name parts by it.
std::string Md5Hex(absl::string_view bytes);

}  // namespace carrel
