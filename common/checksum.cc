#include "common/checksum.h"

#include <openssl/evp.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/escaping.h"
#include "common/status.h"

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace carrel {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // reflected Castagnoli

constexpr std::array<uint32_t, 256> MakeTable() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) ? (crc >> 1) ^ kPolynomial : crc >> 1;
    table[i] = crc;
  }
  return table;
}

constexpr std::array<uint32_t, 256> kTable = MakeTable();

#if defined(__x86_64__)
// The instruction takes three cycles, and one begins in each: three parts side by side. Three fill a chunk of
// a stored segment, 4 KiB, but for two words.
constexpr size_t kPartBytes = 1360;

// What kPartBytes zeros make of a state, byte by byte of it: states add up (Gopal et al., "Fast CRC Computation
// for iSCSI Polynomial Using CRC32 Instruction", Intel 2011, 2.2, by tables instead of products).
class AfterZeros {
 public:
  AfterZeros() {
    for (uint32_t bit = 0; bit < 32; ++bit) {
      uint32_t state = uint32_t{1} << bit;
      for (size_t i = 0; i < kPartBytes; ++i) state = kTable[state & 0xff] ^ (state >> 8);
      for (uint32_t byte = 0; byte < 256; ++byte) {
        if (byte >> bit % 8 & 1) of_[bit / 8][byte] ^= state;
      }
    }
  }
  uint64_t operator()(uint64_t state) const {
    return of_[0][state & 0xff] ^ of_[1][state >> 8 & 0xff] ^ of_[2][state >> 16 & 0xff] ^
           of_[3][state >> 24 & 0xff];
  }

 private:
  uint32_t of_[4][256] = {};
};

inline uint64_t WordAt(const char* p) {
  uint64_t word;
  std::memcpy(&word, p, 8);
  return word;
}

__attribute__((target("sse4.2"))) uint32_t ExtendCrc32cSse42(uint32_t crc,
                                                             absl::string_view bytes) {
  static const AfterZeros after_zeros;
  uint64_t state = ~crc;
  const char* p = bytes.data();
  size_t left = bytes.size();
  for (; left >= 3 * kPartBytes; left -= 3 * kPartBytes, p += 3 * kPartBytes) {
    uint64_t second = 0, third = 0;
    for (size_t i = 0; i < kPartBytes; i += 8) {
      state = _mm_crc32_u64(state, WordAt(p + i));
      second = _mm_crc32_u64(second, WordAt(p + kPartBytes + i));
      third = _mm_crc32_u64(third, WordAt(p + 2 * kPartBytes + i));
    }
    state = after_zeros(after_zeros(state) ^ second) ^ third;
  }
  for (; left >= 8; left -= 8, p += 8) state = _mm_crc32_u64(state, WordAt(p));
  for (; left > 0; --left, ++p) {
    state = _mm_crc32_u8(static_cast<uint32_t>(state), static_cast<uint8_t>(*p));
  }
  return ~static_cast<uint32_t>(state);
}

// Chunks whose CRCs are taken side by side.
constexpr size_t kChunksAtOnce = 4;

__attribute__((target("sse4.2"))) void Crc32cOfChunksSse42(const char* p, size_t chunk_bytes,
                                                           uint32_t* crcs) {
  uint64_t state[kChunksAtOnce];
#pragma GCC unroll 4
  for (uint64_t& s : state) s = ~uint32_t{0};
  for (size_t at = 0; at < chunk_bytes; at += 8) {
#pragma GCC unroll 4  // states in registers
    for (size_t i = 0; i < kChunksAtOnce; ++i) {
      state[i] = _mm_crc32_u64(state[i], WordAt(p + i * chunk_bytes + at));
    }
  }
#pragma GCC unroll 4
  for (size_t i = 0; i < kChunksAtOnce; ++i) crcs[i] = ~static_cast<uint32_t>(state[i]);
}
#endif

bool HasCrcInstruction() {
#if defined(__x86_64__)
  static const bool has = __builtin_cpu_supports("sse4.2");
  return has;
#else
  return false;
#endif
}

}  // namespace

namespace internal {
uint32_t ExtendCrc32cTable(uint32_t crc, absl::string_view bytes) {
  crc = ~crc;
  for (char c : bytes) crc = kTable[(crc ^ static_cast<uint8_t>(c)) & 0xff] ^ (crc >> 8);
  return ~crc;
}
}  // namespace internal

uint32_t ExtendCrc32c(uint32_t crc, absl::string_view bytes) {
#if defined(__x86_64__)
  if (HasCrcInstruction()) return ExtendCrc32cSse42(crc, bytes);
#endif
  return internal::ExtendCrc32cTable(crc, bytes);
}

void Crc32cOfChunks(absl::string_view bytes, size_t chunk_bytes, uint32_t* crcs) {
  CARREL_CHECK(chunk_bytes >= 8 && chunk_bytes % 8 == 0);
#if defined(__x86_64__)
  for (; HasCrcInstruction() && bytes.size() >= kChunksAtOnce * chunk_bytes;
       bytes.remove_prefix(kChunksAtOnce * chunk_bytes), crcs += kChunksAtOnce) {
    Crc32cOfChunksSse42(bytes.data(), chunk_bytes, crcs);
  }
#endif
  for (; !bytes.empty(); bytes.remove_prefix(std::min(chunk_bytes, bytes.size()))) {
    *crcs++ = Crc32c(bytes.substr(0, chunk_bytes));
  }
}

struct Sha256::State {
  EVP_MD_CTX* context = EVP_MD_CTX_new();
  ~State() { EVP_MD_CTX_free(context); }
};

Sha256::Sha256() : state_(std::make_unique<State>()) {
  CARREL_CHECK(state_->context != nullptr);
  CARREL_CHECK(EVP_DigestInit_ex(state_->context, EVP_sha256(), nullptr) == 1);
}

Sha256::~Sha256() = default;

void Sha256::Update(absl::string_view bytes) {
  CARREL_CHECK(EVP_DigestUpdate(state_->context, bytes.data(), bytes.size()) == 1);
}

std::array<uint8_t, 32> Sha256::Finish() {
  std::array<uint8_t, 32> digest;
  unsigned int size = 0;
  CARREL_CHECK(EVP_DigestFinal_ex(state_->context, digest.data(), &size) == 1 && size == 32);
  return digest;
}

std::string Sha256::FinishHex() {
  const std::array<uint8_t, 32> digest = Finish();
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(digest.data()), digest.size()));
}

std::string Sha256Hex(absl::string_view bytes) {
  Sha256 sha;
  sha.Update(bytes);
  return sha.FinishHex();
}

}  // namespace carrel
