// What:   every row scored in 8 bits, the best then exactly: a flat scan of half the bytes.
// Math:   rows are kept a second time as integers with a scale each (kernels/score/int8_score); the
//         `effort` rows with the best group scores by them are scored from the bf16 rows. zone_lse
//         is over these exact scores and the 8-bit ones of all other rows.
// Bytes:  the blob, little-endian:
//         header of 64 bytes: magic "CIN8" | version u16 = 1 | reserved u16 = 0 | rows u64 |
//           head_dim u32 | rows_crc u32 (as hnsw_links.h, of 8 rows) | zeros [36] | crc32c u32 of
//           the header so far
//         zeros up to 4096
//         blocks of 16 rows in order, the last filled up with zeros. Before one that would cross a
//         multiple of kIndexChunkBytes there are zeros up to 4096 behind it.
// Errors: DataLoss for bytes that are no such blob, or of other rows; FailedPrecondition for
//         those of another version.
// Cost:   head_dim + 4 bytes read per key, once per four heads of the group; effort rows at random.
#pragma once

#include "kvstore/index/index.h"

namespace carrel::kvstore {

// Where the blocks of a blob lie.
class Int8Layout {
 public:
  Int8Layout(int64_t rows, int64_t head_dim, int64_t chunk_bytes);

  int64_t blocks() const { return blocks_; }
  int64_t block_bytes() const { return block_bytes_; }
  int64_t Offset(int64_t block) const {
    return block / chunk_blocks_ * chunk_bytes_ + kFirst + block % chunk_blocks_ * block_bytes_;
  }
  // Blocks that lie behind each other from this one on.
  int64_t Contiguous(int64_t block) const {
    const int64_t left = chunk_blocks_ - block % chunk_blocks_;
    return left < blocks_ - block ? left : blocks_ - block;
  }
  int64_t blob_bytes() const { return blocks_ == 0 ? kFirst : Offset(blocks_ - 1) + block_bytes_; }

 private:
  static constexpr int64_t kFirst = 4096;

  int64_t blocks_, block_bytes_, chunk_bytes_;
  int64_t chunk_blocks_;  // whole ones in a chunk
};

}  // namespace carrel::kvstore
