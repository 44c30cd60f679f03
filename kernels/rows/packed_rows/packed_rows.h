// What:   rows of K and V in 12 bits per element instead of 16, with every bit kept: what a GPU reads
//         over the bus.
// Math:   an element of bf16 is a sign, 8 bits of exponent e and 7 of mantissa. Exponents of one
//         channel lie close together: with t the channel's top exponent, t - e takes 4 bits (0 .. 14;
//         15: a zero of either sign), sign and mantissa take 8. Eight neighbours make a piece. A piece
//         with an element that this cannot say is an exception: it is kept as it is, elsewhere, and in
//         its place stand offset 15 with a mantissa, which no zero has, and its number.
// Source: ours.
// Shapes: k, v [rows, head_dim] bf16 at any byte address; a packed row is head_dim bytes of K's signs
//         and mantissas, as many of V's, head_dim / 2 bytes of K's offsets, as many of V's: a row's K
//         and V lie together. Within a piece element i has byte i and bits 4i .. 4i + 3; the number of
//         an exception is in bytes 4 .. 7, little-endian. head_dim a multiple of 16, at most
//         kMaxPackedDim.
// Edge:   any bits: infinities, NaNs and denormal numbers come back as they were.
// Threads: reentrant.
// Cost:   reads and writes memory once; of normally distributed elements one piece of 600 is an
//         exception, which costs 16 bytes more.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <vector>

namespace carrel::kernels {

inline constexpr int64_t kPackedPiece = 8;
inline constexpr int64_t kMaxPackedDim = 128;

// Of one row's K and V.
constexpr int64_t PackedRowBytes(int64_t head_dim) { return 3 * head_dim; }

// Top exponents of one KV head's channels: of K, of V.
struct PackedHead {
  uint8_t top_exponent[2][kMaxPackedDim];
};

using RowPiece = std::array<uint16_t, kPackedPiece>;

// Exceptions by number. Threads: any.
class ExceptionPieces {
 public:
  uint32_t Add(const RowPiece& piece);
  // While nothing is added.
  const std::vector<RowPiece>& all() const { return pieces_; }

 private:
  std::mutex mutex_;
  std::vector<RowPiece> pieces_;
};

// Of the top exponents those that make the fewest elements of x exceptions. x [rows, head_dim] bf16 at
// any byte address; top [head_dim].
void ChooseTopExponents(const void* x, int64_t rows, int64_t head_dim, uint8_t* top);

// packed: [rows, PackedRowBytes].
void PackRows(const PackedHead& head, const void* k, const void* v, int64_t rows, int64_t head_dim,
              uint8_t* packed, ExceptionPieces* exceptions);

// Of K or of V: x [rows, head_dim] bf16.
void UnpackRows(const PackedHead& head, bool is_v, const uint8_t* packed,
                const RowPiece* exceptions, int64_t rows, int64_t head_dim, uint16_t* x);

}  // namespace carrel::kernels
