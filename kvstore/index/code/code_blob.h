// What:   the blob of a code index.
// Bytes:  little-endian:
//         header of 64 bytes: magic "CCOD" | version u16 = 1, of hata 2 | reserved u16 = 0 |
//           rows u64 | head_dim u32 | bits u32 | training u32 (CodeTraining) | rows_crc u32 (as
//           hnsw_links.h, of 8 rows) | error_ratio f32 | reserved 24 bytes = 0 | crc32c u32 of the
//           header so far
//         centre f32 [head_dim]
//         decoder bf16 [bits, head_dim]: key ~ centre + sum_i b_i decoder[i], b_i in {-1, +1}
//         hata: hash bf16 [bits, head_dim]
//         zeros up to a multiple of 4096
//         blocks of codes (kernels/score/code_score), rows in order, the last filled up with zeros
// Errors: DataLoss for bytes that are no such blob: names what. FailedPrecondition: of another
//         version.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/index/index.h"
#include "kvstore/index/rows/blob.h"

namespace carrel::kvstore {

struct CodeHeader {
  int64_t rows = 0;
  int64_t head_dim = 0;
  int64_t bits = 0;
  CodeTraining training = CodeTraining::kOff;
  uint32_t rows_crc = 0;
  // E (<q, key> - its estimate)^2 / |q|^2, over the head's queries and keys.
  float error_ratio = 0;
};

// How bits become keys again.
struct CodeDecoder {
  std::vector<float> centre;      // [head_dim]
  std::vector<uint16_t> decoder;  // bf16 [bits, head_dim]
  std::vector<uint16_t> hash;     // hata: bf16 [bits, head_dim], else empty

  // bf16 [bits, head_dim]: a query's own bit i is set if its product with row i is positive.
  const std::vector<uint16_t>& query_directions() const { return hash.empty() ? decoder : hash; }
};

// blocks are appended by the caller.
std::string EncodeCodeBlob(const CodeHeader& header, const CodeDecoder& decoder);
int64_t CodeBlocksOffset(const CodeHeader& header);

// Verifies and reads what precedes the blocks, and checks that as many bytes of blocks follow.
absl::StatusOr<CodeHeader> DecodeCodeBlob(const Blob& blob, CodeDecoder& decoder);

}  // namespace carrel::kvstore
