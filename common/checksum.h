// What:   CRC32C (Castagnoli) of bytes on disk and SHA-256 of identities.
// Source: CRC-32C as in RFC 3720, appendix B.4 (check value of "123456789": 0xe3069283); SHA-256 is
//         OpenSSL's.
// Cost:   CRC32C by the processor's instruction where it has one, a table otherwise (~400 MB/s). The
//         instruction waits for its own last result: of one run of bytes it does 8 in three cycles,
//         of several chunks at once 8 a cycle.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/strings/string_view.h"

namespace carrel {

// The CRC of the bytes whose CRC so far is `crc` (0 for none) followed by `bytes`.
uint32_t ExtendCrc32c(uint32_t crc, absl::string_view bytes);
inline uint32_t Crc32c(absl::string_view bytes) { return ExtendCrc32c(0, bytes); }
// crcs[i] = the CRC of bytes [i chunk_bytes, (i + 1) chunk_bytes), the last chunk perhaps shorter.
// chunk_bytes: a multiple of 8, at least 8.
void Crc32cOfChunks(absl::string_view bytes, size_t chunk_bytes, uint32_t* crcs);

namespace internal {
uint32_t ExtendCrc32cTable(uint32_t crc, absl::string_view bytes);  // the reference, for tests
}

class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;
  void Update(absl::string_view bytes);
  std::array<uint8_t, 32> Finish();  // once
  std::string FinishHex();           // once; 64 lower-case digits

 private:
  struct State;
  std::unique_ptr<State> state_;
};

std::string Sha256Hex(absl::string_view bytes);

}  // namespace carrel
